// Runs the commands of ../shell.cpp on PyTorch's own caching allocator, over the runtime of cudart.cpp.
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <iostream>
#include <map>
#include <sstream>
#include <string>

extern "C" void cuda_oracle_start(std::uint64_t capacity, std::uint64_t overhead);
extern "C" void cuda_oracle_finish(void* stream);

namespace c10::cuda {
namespace _internal {
void setHasPrimaryContext(bool (*function)(DeviceIndex));
}
namespace detail {
void init_p2p_access_cache(std::int64_t devices);
}
}  // namespace c10::cuda

namespace {

using c10::CachingAllocator::AcceleratorAllocatorConfig;
constexpr std::uint64_t kFirstAddress = std::uint64_t{1} << 46;

struct Oracle {
  c10::cuda::CUDACachingAllocator::CUDAAllocator* allocator = nullptr;
  std::map<std::string, void*> names;
  std::map<int, c10::cuda::CUDAStream> streams;

  c10::cuda::CUDAStream stream(int number) {
    const auto found = streams.find(number);
    if (found != streams.end()) return found->second;
    const auto made = number ? c10::cuda::getStreamFromPool(false, 0) : c10::cuda::getDefaultCUDAStream(0);
    return streams.emplace(number, made).first->second;
  }

  int number_of(void* handle) {
    for (const auto& [number, stream] : streams) {
      if (stream.stream() == handle) return number;
    }
    return -1;
  }

  void configure(const std::string& text) {
    c10::CachingAllocator::setAllocatorSettings(text);
    using c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig;
    allocator->setMemoryFraction(CUDAAllocatorConfig::per_process_memory_fraction(), 0);
    using Config = AcceleratorAllocatorConfig;
    std::cout << "options " << Config::max_split_size() << " " << Config::max_non_split_rounding_size() << " "
              << Config::large_segment_size() << " " << Config::garbage_collection_threshold() << " "
              << Config::use_expandable_segments();
    for (std::size_t divisions : Config::roundup_power2_divisions()) std::cout << " " << divisions;
    std::cout << "\n";
  }

  void allocate(std::istringstream& line) {
    std::string name;
    std::size_t bytes;
    int number = 0;
    line >> name >> bytes >> number;
    try {
      names[name] = bytes ? allocator->raw_alloc_with_stream(bytes, stream(number).stream()) : nullptr;
      const auto address = reinterpret_cast<std::uint64_t>(names[name]);
      std::cout << "at " << (address ? address - kFirstAddress : 0) << "\n";
    } catch (const c10::OutOfMemoryError& error) {
      std::cout << "oom " << error.what_without_backtrace() << "\n";
    }
  }

  static void print(const std::string& name, const c10::CachingAllocator::Stat& stat) {
    std::cout << "stat " << name << ".current " << stat.current << "\nstat " << name << ".peak " << stat.peak
              << "\nstat " << name << ".allocated " << stat.allocated << "\nstat " << name << ".freed " << stat.freed
              << "\n";
  }

  static void print(const std::string& name, const c10::CachingAllocator::StatArray& stats) {
    print(name + ".all", stats[0]);
    print(name + ".small_pool", stats[1]);
    print(name + ".large_pool", stats[2]);
  }

  void print_stats() {
    const auto stats = allocator->getDeviceStats(0);
    std::cout << "stat num_alloc_retries " << stats.num_alloc_retries << "\nstat num_ooms " << stats.num_ooms
              << "\nstat num_sync_all_streams " << stats.num_sync_all_streams << "\nstat num_device_alloc "
              << stats.num_device_alloc << "\nstat num_device_free " << stats.num_device_free
              << "\nstat num_oom_rejections " << stats.num_oom_rejections << "\n";
    print("allocation", stats.allocation);
    print("segment", stats.segment);
    print("active", stats.active);
    print("inactive_split", stats.inactive_split);
    print("allocated_bytes", stats.allocated_bytes);
    print("reserved_bytes", stats.reserved_bytes);
    print("active_bytes", stats.active_bytes);
    print("inactive_split_bytes", stats.inactive_split_bytes);
    print("requested_bytes", stats.requested_bytes);
    print("oversize_allocations", stats.oversize_allocations);
    print("oversize_segments", stats.oversize_segments);
    const auto [free, total] = allocator->getMemoryInfo(0);
    std::cout << "info " << free << " " << total << "\n";
  }

  void print_snapshot() {
    for (const auto& segment : allocator->snapshot().segments) {
      std::cout << "segment " << segment.address - kFirstAddress << " " << segment.total_size << " "
                << segment.requested_size << " " << segment.allocated_size << " " << segment.active_size << " "
                << number_of(segment.stream) << " " << segment.is_large << " " << segment.is_expandable << "\n";
      std::uint64_t address = segment.address - kFirstAddress;
      for (const auto& block : segment.blocks) {
        std::cout << "block " << address << " " << block.size << " " << block.requested_size << " "
                  << (block.allocated ? "active_allocated" : block.active ? "active_pending_free" : "inactive") << "\n";
        address += block.size;
      }
    }
  }

  void run(const std::string& command, std::istringstream& line) {
    std::string name;
    int number = 0;
    if (command == "new") {
      std::uint64_t capacity, overhead;
      line >> capacity >> overhead;
      cuda_oracle_start(capacity, overhead);
      allocator = c10::cuda::CUDACachingAllocator::get();
      allocator->init(1);
    } else if (command == "conf") {
      std::string text;
      std::getline(line >> std::ws, text);
      configure(text);
    } else if (command == "alloc") {
      allocate(line);
    } else if (command == "free") {
      line >> name;
      allocator->raw_delete(names.at(name));
    } else if (command == "use") {
      line >> name >> number;
      const c10::DataPtr pointer(names.at(name), names.at(name), allocator->raw_deleter(), c10::Device(c10::kCUDA, 0));
      allocator->recordStream(pointer, stream(number));
      const_cast<c10::DataPtr&>(pointer).release_context();
    } else if (command == "finish") {
      line >> number;
      cuda_oracle_finish(stream(number).stream());
    } else if (command == "fraction") {
      double fraction;
      line >> fraction;
      allocator->setMemoryFraction(fraction, 0);
    } else if (command == "empty") {
      allocator->emptyCache();
    } else if (command == "reset_peak") {
      allocator->resetPeakStats(0);
    } else if (command == "reset_accumulated") {
      allocator->resetAccumulatedStats(0);
    } else if (command == "stats") {
      print_stats();
    } else if (command == "snapshot") {
      print_snapshot();
    } else {
      std::cout << "unknown " << command << "\n";
    }
  }
};

}  // namespace

int main() {
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  Oracle oracle;
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    std::string command;
    if (!(line >> command)) continue;
    try {
      oracle.run(command, line);
    } catch (const c10::Error& error) {
      std::cout << "error " << error.what_without_backtrace() << "\n";
    } catch (const std::exception& error) {
      std::cout << "error " << error.what() << "\n";
    }
  }
}
