#include "allocator_settings.hpp"

#include <algorithm>
#include <cctype>
#include <set>
#include <stdexcept>

namespace foretrain {
namespace {

// Known to PyTorch 2.13, but of the host's memory, of CUDA graphs, or of locks.
const std::set<std::string_view> kWithoutMeaning = {
    "pinned_use_background_threads", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register",  "pinned_reserve_segment_size_mb",
    "pinned_num_register_threads",   "pinned_free_catch_all",         "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",     "graph_capture_record_stream_reuse",
};

bool is_power_of_two(std::uint64_t value) { return value && !(value & (value - 1)); }

std::size_t log2_floor(std::uint64_t value) { return 63 - static_cast<std::size_t>(__builtin_clzll(value | 1)); }

[[noreturn]] void refuse(const std::string& problem) { throw std::invalid_argument(problem); }

std::vector<std::string> split_tokens(std::string_view text) {
  std::vector<std::string> tokens(1);
  for (char character : text) {
    if (std::string_view(",:[]").find(character) != std::string_view::npos) {
      tokens.emplace_back(1, character);
      tokens.emplace_back();
    } else if (!std::isspace(static_cast<unsigned char>(character))) {
      tokens.back() += character;
    }
  }
  tokens.erase(std::remove(tokens.begin(), tokens.end(), ""), tokens.end());
  return tokens;
}

class OptionParser {
 public:
  OptionParser(std::string_view text, const AllocatorOptions& before) : tokens_(split_tokens(text)) {
    const AllocatorOptions defaults;
    options_ = before;
    options_.max_split_size = defaults.max_split_size;
    options_.roundup_power2_divisions = defaults.roundup_power2_divisions;
    options_.garbage_collection_threshold = defaults.garbage_collection_threshold;
  }

  ParsedOptions parse() {
    read_large_segment_size();
    while (at_ < tokens_.size()) {
      const std::string key = next();
      expect(":", key);
      read(key);
      if (at_ < tokens_.size()) expect(",", key);
    }
    return {options_, messages_};
  }

 private:
  // Before the others, wherever it stands: it is the least that they may be.
  void read_large_segment_size() {
    const std::string key = "large_segment_size_mb";
    const auto found = std::find(tokens_.begin(), tokens_.end(), key);
    if (found != tokens_.end()) {
      at_ = static_cast<std::size_t>(found - tokens_.begin()) + 1;
      expect(":", key);
      const std::uint64_t value = read_integer(key);
      if (value <= 10) refuse("CachingAllocator option " + key + " must be > 10 MB");
      options_.large_segment_size = std::min(value, kUnlimited / kMiB) * kMiB;
    }
    options_.max_non_split_rounding_size = options_.large_segment_size;
    at_ = 0;
  }

  void read(const std::string& key) {
    if (key == "max_split_size_mb") {
      options_.max_split_size = read_mebibytes(key);
    } else if (key == "max_non_split_rounding_mb") {
      options_.max_non_split_rounding_size = read_mebibytes(key);
    } else if (key == "large_segment_size_mb") {
      next();
    } else if (key == "garbage_collection_threshold") {
      options_.garbage_collection_threshold = read_fraction(key, false);
    } else if (key == "per_process_memory_fraction") {
      options_.memory_fraction = read_fraction(key, true);
    } else if (key == "roundup_power2_divisions") {
      read_divisions(key);
    } else if (key == "expandable_segments") {
      options_.expandable_segments = read_truth(key);
    } else if (key == "backend") {
      read_backend(key);
    } else if (key == "throw_on_cudamalloc_oom") {
      if (read_truth(key)) ignore(key, "the allocator first gives back what is cached");
    } else {
      skip_value(key);
      if (!kWithoutMeaning.count(key)) ignore(key, "it is unknown");
    }
  }

  void ignore(const std::string& key, const std::string& why) {
    messages_.push_back("PYTORCH_CUDA_ALLOC_CONF: '" + key + "' is ignored: " + why);
  }

  const std::string& next() {
    if (at_ == tokens_.size()) refuse("PYTORCH_CUDA_ALLOC_CONF ends too early; write e.g. 'expandable_segments:True'");
    return tokens_[at_++];
  }

  void expect(const char* token, const std::string& key) {
    if (next() != token) refuse("Expected '" + std::string(token) + "' near '" + key + "' in PYTORCH_CUDA_ALLOC_CONF");
  }

  std::uint64_t read_integer(const std::string& key) {
    const std::string& token = next();
    try {
      return std::stoull(token);
    } catch (const std::exception&) {
      refuse("'" + key + "' must be an integer, not '" + token + "'");
    }
  }

  std::uint64_t read_mebibytes(const std::string& key) {
    const std::uint64_t least = options_.large_segment_size / kMiB;
    const std::uint64_t value = read_integer(key);
    if (value < least) refuse("CachingAllocator option " + key + " too small, must be >= " + std::to_string(least));
    return std::min(value, kUnlimited / kMiB) * kMiB;
  }

  double read_fraction(const std::string& key, bool ends_included) {
    const std::string& token = next();
    double value = -1.0;
    try {
      value = std::stod(token);
    } catch (const std::exception&) {
    }
    const bool good = ends_included ? value >= 0.0 && value <= 1.0 : value > 0.0 && value < 1.0;
    if (!good) refuse(key + " is invalid, set it in " + (ends_included ? "[0.0, 1.0]" : "(0.0, 1.0)"));
    return value;
  }

  bool read_truth(const std::string& key) {
    const std::string& token = next();
    if (token != "True" && token != "False") refuse("'" + key + "' must be True or False, not '" + token + "'");
    return token == "True";
  }

  void read_backend(const std::string& key) {
    const std::string& token = next();
    if (token == "cudaMallocAsync") {
      ignore(key, "the backend 'native' is modelled, not 'cudaMallocAsync'");
    } else if (token != "native") {
      refuse("Unknown allocator backend, options are native and cudaMallocAsync");
    }
  }

  void skip_value(const std::string& key) {
    if (next() != "[") return;
    while (next() != "]") {
      if (at_ == tokens_.size()) refuse("Expected closing bracket ']' after '" + key + "'");
    }
  }

  void read_divisions(const std::string& key) {
    auto& divisions = options_.roundup_power2_divisions;
    if (at_ < tokens_.size() && tokens_[at_] != "[") {
      const std::uint64_t value = read_integer(key);
      if (!is_power_of_two(value)) refuse("For roundups, the divisions has to be power of 2");
      divisions.fill(value);
      return;
    }
    expect("[", key);
    std::size_t last = 0;
    for (bool first = true; tokens_.at(std::min(at_, tokens_.size() - 1)) != "]"; first = false) {
      if (!first) expect(",", key);
      last = read_division(key, first, last);
    }
    expect("]", key);
  }

  // One "interval in MiB:divisions" of the list; ">" stands for all intervals behind the last one named.
  std::size_t read_division(const std::string& key, bool first, std::size_t last) {
    auto& divisions = options_.roundup_power2_divisions;
    const bool rest = at_ < tokens_.size() && tokens_[at_] == ">";
    const std::uint64_t interval = rest ? (++at_, 1) : read_integer(key);
    expect(":", key);
    const std::uint64_t value = read_integer(key);
    if (value && !is_power_of_two(value)) {
      refuse("For roundups, the divisions has to be power of 2 or 0 to disable roundup");
    }
    if (rest) {
      std::fill(divisions.begin() + static_cast<std::ptrdiff_t>(last) + 1, divisions.end(), value);
      return last;
    }
    if (!is_power_of_two(interval)) refuse("For roundups, the intervals have to be power of 2");
    const std::size_t index = std::min(log2_floor(interval), divisions.size() - 1);
    if (first) std::fill(divisions.begin(), divisions.begin() + static_cast<std::ptrdiff_t>(index), value);
    divisions[index] = value;
    return index;
  }

  std::vector<std::string> tokens_;
  std::size_t at_ = 0;
  AllocatorOptions options_;
  std::vector<std::string> messages_;
};

}  // namespace

ParsedOptions parse_allocator_options(std::string_view text, const AllocatorOptions& before) {
  return OptionParser(text, before).parse();
}

ParsedOptions allocator_options_from_environment(const char* alloc_conf, const char* cuda_alloc_conf) {
  const char* text = alloc_conf ? alloc_conf : cuda_alloc_conf;
  return parse_allocator_options(text ? text : "");
}

std::uint64_t roundup_power2_divisions(const AllocatorOptions& options, std::uint64_t size) {
  constexpr std::size_t kFirst = 20;  // the first interval begins at 1 MiB
  const std::size_t doubling = log2_floor(size);
  const std::size_t last = options.roundup_power2_divisions.size() - 1;
  return options.roundup_power2_divisions[doubling < kFirst ? 0 : std::min(doubling - kFirst, last)];
}

}  // namespace foretrain
