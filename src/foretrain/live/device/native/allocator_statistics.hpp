// Statistics of the caching allocator, named as by torch.cuda.memory_stats(), and a breakdown by purpose.
// Source: PyTorch 2.13, c10/core/CachingDeviceAllocator.h (DeviceStats) and c10/core/Allocator.h (Stat).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace foretrain {

// Purpose of an allocation. Numbers above kOther and below kTags are free for the caller.
using Tag = std::uint8_t;
enum : Tag { kParameter, kGradient, kOptimizer, kActivation, kWorkspace, kOther };
constexpr std::size_t kTags = 16;
using BytesPerTag = std::array<std::int64_t, kTags>;

// One quantity: bytes or a count. `allocated` and `freed` are all that it ever grew and shrank by.
struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;

  void increase(std::uint64_t amount) {
    current += static_cast<std::int64_t>(amount);
    peak = std::max(peak, current);
    allocated += static_cast<std::int64_t>(amount);
  }
  void decrease(std::uint64_t amount) {
    current -= static_cast<std::int64_t>(amount);
    freed += static_cast<std::int64_t>(amount);
  }
  void reset_peak() { peak = current; }
  void reset_accumulated() { allocated = freed = 0; }
};

// One quantity, of both pools together and of each.
struct PoolStat {
  Stat all, small_pool, large_pool;

  void increase(bool small, std::uint64_t amount) {
    all.increase(amount);
    (small ? small_pool : large_pool).increase(amount);
  }
  void decrease(bool small, std::uint64_t amount) {
    all.decrease(amount);
    (small ? small_pool : large_pool).decrease(amount);
  }
};

struct Statistics {
  PoolStat allocation;            // requests that live
  PoolStat segment;               // segments of cudaMalloc; expandable segments do not count
  PoolStat active;                // blocks allocated, or freed and still used by another stream
  PoolStat inactive_split;        // free blocks whose segment cannot be given back
  PoolStat allocated_bytes;       // in blocks allocated, rounding included
  PoolStat reserved_bytes;        // in segments, and mapped in expandable segments
  PoolStat active_bytes;          // in active blocks
  PoolStat inactive_split_bytes;  // in inactive split blocks
  PoolStat requested_bytes;       // as asked for, in active blocks
  Stat oversize_allocations;      // of max_split_size and larger
  Stat oversize_segments;
  std::int64_t num_alloc_retries = 0;     // after all cached segments were given back
  std::int64_t num_ooms = 0;              // errors thrown
  std::int64_t num_sync_all_streams = 0;  // waits for all events of freed blocks
  std::int64_t num_device_alloc = 0;      // cudaMalloc and cuMemMap
  std::int64_t num_device_free = 0;       // cudaFree and cuMemUnmap
  std::int64_t num_oom_rejections = 0;    // always 0: the policy is not modelled
  std::int64_t max_split_size = -1;       // bytes; -1 is unlimited

  // Not PyTorch's: allocated bytes by what they are for, now and when most were allocated; and the peaks of the whole run,
  // which a script that resets PyTorch's in each step leaves alone.
  BytesPerTag bytes_per_tag{};
  BytesPerTag bytes_per_tag_at_most{};
  std::int64_t most_allocated = 0;
  std::int64_t most_reserved = 0;
  std::int64_t all_retries = 0;
};

// Name and value of everything in torch.cuda.memory_stats(), e.g. ("active_bytes.all.peak", 512), unsorted.
std::vector<std::pair<std::string, std::int64_t>> memory_stats(const Statistics& statistics);

void reset_peak(Statistics& statistics);
void reset_accumulated(Statistics& statistics);

}  // namespace foretrain
