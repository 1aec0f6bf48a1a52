// Memory of one simulated GPU: reserves, splits, caches and runs out of memory as PyTorch's caching allocator does.
//
// A model of c10::cuda::CUDACachingAllocator of PyTorch 2.13, backend "native" (c10/cuda/CUDACachingAllocator.cpp). It
// hands out addresses that nothing is behind: never dereference them. One instance per device; std only, no torch, no
// threads of its own; all methods may be called from any thread.
//
// Units: sizes in bytes. Ownership: an address belongs to the caller from allocate() to release(). Errors: allocate()
// throws OutOfMemory and leaves the allocator usable; an address that was not given out, or was released, and a
// tag that is none throw std::invalid_argument.
//
// # Note [How memory is given out]
// A request is rounded up to 512 B. Up to 1 MiB it comes from the small pool, whose segments have 2 MiB; above from the
// large pool, whose segments have 20 MiB for requests below 10 MiB and else the request rounded up to 2 MiB. It gets
// the smallest free block of its pool and stream that fits, of equals the one in the segment reserved first and there
// the lowest; what is left of the block is split off if it has 512 B (small pool, expandable segments) or more than
// 1 MiB (large pool). A freed block merges with free neighbours.
// If nothing fits a segment is reserved; if the device is full, cached segments that are wholly free are given back.
//
// # Note [Departures]
// - Blocks that other streams use: PyTorch asks at every allocation which of their events are over. Here asking means
//   to ask the executor for the time, and the answer matters only where otherwise memory would have to be reserved; so
//   it is asked then, and only then, unless Settings::poll_always. Which block is found may differ, what is reserved
//   hardly does.
// - Private pools (CUDA graphs, MemPool), memory history and the backend cudaMallocAsync are not modelled.
// - The device has no memory but the allocator's and Settings::overhead; cudaMalloc never fails by fragmentation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "allocator_settings.hpp"
#include "allocator_statistics.hpp"

namespace foretrain {

using Address = std::uint64_t;  // 0 is no memory
using Stream = std::int32_t;

struct Settings {
  std::uint64_t capacity = 80 * (std::uint64_t{1} << 30);  // cudaDeviceProp::totalGlobalMem
  std::uint64_t overhead = 0;  // of the device but not of PyTorch: CUDA context, NCCL's buffers
  int device = 0;
  bool poll_always = false;  // ask for events at every allocation; see Note [Departures]
  AllocatorOptions options;
};

// Functions of the device's streams that the allocator calls. Called with the allocator's lock held: must not call the allocator
// nor wait for a lock that is held while calling it. Where they are missing, all events are over at once. Events are
// asked for in the order in which they were recorded on their stream, and none behind one that is not over.
struct StreamCallbacks {
  std::function<std::uint64_t(Stream)> record;  // an event behind all work of the stream; its number
  std::function<bool(std::uint64_t)> over;      // has it happened? once it has, the event is not used again
  std::function<void(std::uint64_t)> wait;      // returns when it has happened; the event is not used again
  std::function<void()> synchronize;            // once before memory goes back: cudaFree waits for the whole device
};

// Thrown when a request cannot be met although all that could be given back was. Sizes in bytes.
struct OutOfMemory {
  int device = 0;
  std::uint64_t requested = 0;  // by the caller
  std::uint64_t tried = 0;      // the segment that could not be reserved
  std::uint64_t capacity = 0;
  std::uint64_t free = 0;  // as cudaMemGetInfo would say
  std::uint64_t in_use = 0;  // by this process, overhead included
  std::uint64_t allowed = kUnlimited;  // by the memory fraction, if one is set
  std::uint64_t allocated = 0;
  std::uint64_t reserved = 0;
  BytesPerTag bytes_per_tag{};  // of what is allocated

  // The text of torch.OutOfMemoryError in PyTorch 2.13, to the letter.
  std::string message() const;
};

// As c10 writes sizes: "1.50 GiB", "20.00 MiB", "512 bytes".
std::string format_size(std::uint64_t size);

struct BlockInfo {
  Address address = 0;
  std::uint64_t size = 0;
  std::uint64_t requested_size = 0;
  bool allocated = false;
  bool active = false;  // allocated, or freed and still used by another stream
  Tag tag = kOther;

  // As torch.cuda.memory_snapshot() names it.
  const char* state() const { return allocated ? "active_allocated" : active ? "active_pending_free" : "inactive"; }
};

// A segment, or a mapped stretch of an expandable segment, and the blocks that fill it in the order of addresses.
struct SegmentInfo {
  Address address = 0;
  std::uint64_t total_size = 0;
  std::uint64_t requested_size = 0;
  std::uint64_t allocated_size = 0;
  std::uint64_t active_size = 0;
  Stream stream = 0;
  bool is_large = false;
  bool is_expandable = false;
  std::vector<BlockInfo> blocks;
};

// Position of an allocation, for cudaIpcGetMemHandle.
struct Allocation {
  BlockInfo block;
  Stream stream = 0;
  Address base = 0;             // of its segment
  std::uint64_t base_size = 0;  // of its segment
};

class Allocator {
 public:
  explicit Allocator(const Settings& settings, StreamCallbacks streams = {});
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  // Memory that `stream` may use at once; 0 for no bytes. Throws OutOfMemory.
  Address allocate(std::uint64_t bytes, Stream stream, Tag tag = kOther);

  // Gives memory back to the cache: at once for the stream it was allocated on, for any other that used it when the
  // work that stream has now is over. Nothing happens for 0.
  void release(Address address);

  // `stream` uses this memory, too.
  void record_stream(Address address, Stream stream);

  // The allocation is for something else than was thought. If it lived at the peak already, the peak's breakdown
  // learns of it as well.
  void retag(Address address, Tag tag);

  // Gives back all segments that are wholly free, after the events of all freed blocks are over.
  void empty_cache();

  // At most this fraction of the capacity may be reserved; 1 lifts the limit. Throws std::invalid_argument outside
  // [0, 1].
  void set_memory_fraction(double fraction);
  double memory_fraction() const;

  void set_options(const AllocatorOptions& options);
  void set_overhead(std::uint64_t overhead);

  Statistics statistics() const;
  std::int64_t allocated() const;  // bytes, rounding included
  void reset_peak();
  void reset_accumulated();

  // Free bytes of the device and its capacity, as of cudaMemGetInfo.
  std::pair<std::uint64_t, std::uint64_t> memory_info() const;

  // All segments in the order of their addresses.
  std::vector<SegmentInfo> snapshot() const;

  // The allocation that begins at `address`. Throws std::invalid_argument if there is none.
  Allocation find(Address address) const;

  // The size to which a request of `bytes` is rounded, and the segment that would be reserved for it.
  std::uint64_t rounded(std::uint64_t bytes) const;
  std::uint64_t segment_for(std::uint64_t bytes) const;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace foretrain
