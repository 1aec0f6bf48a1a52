#include "allocator_statistics.hpp"

namespace foretrain {
namespace {

template <typename Function>
void for_each_pool_stat(Statistics& statistics, Function apply) {
  apply("allocation", statistics.allocation);
  apply("segment", statistics.segment);
  apply("active", statistics.active);
  apply("inactive_split", statistics.inactive_split);
  apply("allocated_bytes", statistics.allocated_bytes);
  apply("reserved_bytes", statistics.reserved_bytes);
  apply("active_bytes", statistics.active_bytes);
  apply("inactive_split_bytes", statistics.inactive_split_bytes);
  apply("requested_bytes", statistics.requested_bytes);
}

template <typename Function>
void for_each_stat(Statistics& statistics, Function apply) {
  for_each_pool_stat(statistics, [&](const std::string& name, PoolStat& stat) {
    apply(name + ".all", stat.all);
    apply(name + ".small_pool", stat.small_pool);
    apply(name + ".large_pool", stat.large_pool);
  });
  apply("oversize_allocations", statistics.oversize_allocations);
  apply("oversize_segments", statistics.oversize_segments);
}

}  // namespace

std::vector<std::pair<std::string, std::int64_t>> memory_stats(const Statistics& statistics) {
  std::vector<std::pair<std::string, std::int64_t>> named = {
      {"num_alloc_retries", statistics.num_alloc_retries}, {"num_ooms", statistics.num_ooms},
      {"num_sync_all_streams", statistics.num_sync_all_streams}, {"num_device_alloc", statistics.num_device_alloc},
      {"num_device_free", statistics.num_device_free}, {"num_oom_rejections", statistics.num_oom_rejections},
      {"max_split_size", statistics.max_split_size},
  };
  Statistics copy = statistics;
  for_each_stat(copy, [&](const std::string& name, const Stat& stat) {
    named.emplace_back(name + ".current", stat.current);
    named.emplace_back(name + ".peak", stat.peak);
    named.emplace_back(name + ".allocated", stat.allocated);
    named.emplace_back(name + ".freed", stat.freed);
  });
  return named;
}

void reset_peak(Statistics& statistics) {
  for_each_stat(statistics, [](const std::string&, Stat& stat) { stat.reset_peak(); });
}

void reset_accumulated(Statistics& statistics) {
  for_each_stat(statistics, [](const std::string&, Stat& stat) { stat.reset_accumulated(); });
  statistics.num_alloc_retries = statistics.num_ooms = statistics.num_sync_all_streams = 0;
  statistics.num_device_alloc = statistics.num_device_free = statistics.num_oom_rejections = 0;
}

}  // namespace foretrain
