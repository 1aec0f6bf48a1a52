// Settings of the caching allocator: options of PYTORCH_CUDA_ALLOC_CONF, and its device.
//
// Sizes are bytes, fractions are of the device's capacity. Source of keys, defaults, units and limits: PyTorch 2.13,
// c10/core/AllocatorConfig.{h,cpp} and c10/cuda/CUDAAllocatorConfig.{h,cpp}. Where we depart: a key that is unknown or
// means nothing here is ignored with a message, while PyTorch refuses unknown keys.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace foretrain {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// Options of PYTORCH_CUDA_ALLOC_CONF that change sizes or places of allocations.
struct AllocatorOptions {
  // Larger blocks are never split and serve only requests of nearly their size.
  std::uint64_t max_split_size = kUnlimited;
  // By how much less such a block must exceed its request.
  std::uint64_t max_non_split_rounding_size = 20 * kMiB;
  // Segment for requests above 1 MiB and below 10 MiB, and the page of expandable segments of the large pool.
  std::uint64_t large_segment_size = 20 * kMiB;
  // Steps between two powers of two to which sizes are rounded, for sizes from 1 MiB up, one entry a doubling; 0: none.
  std::array<std::uint64_t, 16> roundup_power2_divisions{};
  // Fraction of the memory allowed above which cached segments are given back, the oldest first; 0: never.
  double garbage_collection_threshold = 0.0;
  // Fraction of the capacity that the allocator may reserve; below 1 it counts as a limit of its own.
  double memory_fraction = 1.0;
  bool expandable_segments = false;
};

struct ParsedOptions {
  AllocatorOptions options;
  std::vector<std::string> messages;  // for the user: what was ignored, and why
};

// Reads e.g. "max_split_size_mb:128,roundup_power2_divisions:[256:1,>:4],expandable_segments:True". As in PyTorch,
// expandable_segments, large_segment_size and memory_fraction stay as they were `before` where they are not named; the
// others fall back to their defaults, max_non_split_rounding_size to the size of large segments. Throws
// std::invalid_argument for a value that is none, in PyTorch's words where it has some.
ParsedOptions parse_allocator_options(std::string_view text, const AllocatorOptions& before = {});

// Of the variables PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF (either may be null) the first counts where both are
// set.
ParsedOptions allocator_options_from_environment(const char* alloc_conf, const char* cuda_alloc_conf);

// How many steps between two powers of two a request of `size` is rounded to; 0 or 1: rounded to 512 B only.
std::uint64_t roundup_power2_divisions(const AllocatorOptions& options, std::uint64_t size);

}  // namespace foretrain
