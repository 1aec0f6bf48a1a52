// Runs the commands on standard input on an Allocator and prints what comes of them: the tests' way in.
// The commands are those of oracle/oracle.cpp, which runs them on PyTorch's own allocator.
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "allocator.hpp"

using namespace foretrain;

namespace {

constexpr Address kFirstAddress = Address{1} << 46;

// Streams whose work is over when the commands say so.
struct Streams {
  std::map<Stream, std::uint64_t> recorded, finished;
  int synchronized = 0;

  StreamCallbacks callbacks() {
    const auto place = [](std::uint64_t event) { return static_cast<Stream>(event >> 32); };
    StreamCallbacks made;
    made.record = [this](Stream stream) { return std::uint64_t(stream) << 32 | ++recorded[stream]; };
    made.over = [this, place](std::uint64_t event) { return (event & 0xFFFFFFFF) <= finished[place(event)]; };
    made.synchronize = [this] { ++synchronized; };
    made.wait = [this, place](std::uint64_t event) {
      finished[place(event)] = std::max(finished[place(event)], event & 0xFFFFFFFF);
    };
    return made;
  }
};

struct Shell {
  Streams streams;
  std::map<std::string, Address> names;
  AllocatorOptions options;
  std::unique_ptr<Allocator> allocator;

  void start(std::istringstream& line) {
    Settings settings;
    line >> settings.capacity >> settings.overhead >> settings.poll_always;
    options = settings.options;
    allocator = std::make_unique<Allocator>(settings, streams.callbacks());
  }

  void configure(std::istringstream& line) {
    std::string text;
    std::getline(line >> std::ws, text);
    const ParsedOptions parsed = parse_allocator_options(text, options);
    options = parsed.options;
    allocator->set_options(options);
    allocator->set_memory_fraction(options.memory_fraction);
    for (const std::string& message : parsed.messages) std::cout << "message " << message << "\n";
    std::cout << "options " << options.max_split_size << " " << options.max_non_split_rounding_size << " "
              << options.large_segment_size << " " << options.garbage_collection_threshold << " "
              << options.expandable_segments;
    for (std::uint64_t divisions : options.roundup_power2_divisions) std::cout << " " << divisions;
    std::cout << "\n";
  }

  void allocate(std::istringstream& line) {
    std::string name;
    std::uint64_t bytes;
    Stream stream = 0;
    int tag = kOther;
    line >> name >> bytes >> stream >> tag;
    try {
      names[name] = allocator->allocate(bytes, stream, static_cast<Tag>(line ? tag : int{kOther}));
      std::cout << "at " << (names[name] ? names[name] - kFirstAddress : 0) << "\n";
    } catch (const OutOfMemory& error) {
      std::cout << "oom " << error.message() << "\n";
    }
  }

  void print_stats() const {
    const Statistics statistics = allocator->statistics();
    for (const auto& [name, value] : memory_stats(statistics)) std::cout << "stat " << name << " " << value << "\n";
    for (std::size_t tag = 0; tag < kTags; ++tag) {
      std::cout << "tag " << tag << " " << statistics.bytes_per_tag[tag] << " "
                << statistics.bytes_per_tag_at_most[tag] << "\n";
    }
    const auto [free, total] = allocator->memory_info();
    std::cout << "info " << free << " " << total << "\n";
  }

  void print_snapshot() const {
    for (const SegmentInfo& segment : allocator->snapshot()) {
      std::cout << "segment " << segment.address - kFirstAddress << " " << segment.total_size << " "
                << segment.requested_size << " " << segment.allocated_size << " " << segment.active_size << " "
                << segment.stream << " " << segment.is_large << " " << segment.is_expandable << "\n";
      for (const BlockInfo& block : segment.blocks) {
        std::cout << "block " << block.address - kFirstAddress << " " << block.size << " " << block.requested_size
                  << " " << block.state() << "\n";
      }
    }
  }

  void print_allocation(const std::string& name) const {
    const Allocation found = allocator->find(names.at(name));
    std::cout << "found " << found.block.size << " " << found.base - kFirstAddress << " " << found.base_size << "\n";
  }

  void run(const std::string& command, std::istringstream& line) {
    std::string name;
    Stream stream;
    std::uint64_t number;
    if (command == "new") {
      start(line);
    } else if (command == "conf") {
      configure(line);
    } else if (command == "alloc") {
      allocate(line);
    } else if (command == "free") {
      line >> name;
      allocator->release(names.at(name));
    } else if (command == "use") {
      line >> name >> stream;
      allocator->record_stream(names.at(name), stream);
    } else if (command == "tag") {
      line >> name >> number;
      allocator->retag(names.at(name), static_cast<Tag>(number));
    } else if (command == "finish") {
      line >> stream;
      streams.finished[stream] = streams.recorded[stream];
    } else if (command == "overhead") {
      line >> number;
      allocator->set_overhead(number);
    } else if (command == "fraction") {
      double fraction;
      line >> fraction;
      allocator->set_memory_fraction(fraction);
    } else if (command == "rounded") {
      line >> number;
      std::cout << "rounded " << allocator->rounded(number) << " " << allocator->segment_for(number) << "\n";
    } else if (command == "find") {
      line >> name;
      print_allocation(name);
    } else if (command == "format") {
      line >> number;
      std::cout << "text " << format_size(number) << "\n";
    } else if (command == "synchronized") {
      std::cout << "synchronized " << streams.synchronized << "\n";
    } else if (command == "empty") {
      allocator->empty_cache();
    } else if (command == "reset_peak") {
      allocator->reset_peak();
    } else if (command == "reset_accumulated") {
      allocator->reset_accumulated();
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
  Shell shell;
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    std::string command;
    if (!(line >> command)) continue;
    try {
      shell.run(command, line);
    } catch (const std::exception& error) {
      std::cout << "error " << error.what() << "\n";
    }
  }
}
