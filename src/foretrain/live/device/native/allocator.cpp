#include "allocator.hpp"

#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "allocator_blocks.hpp"

namespace foretrain {
namespace {

constexpr std::uint64_t kSmallestBlock = 512;
constexpr std::uint64_t kLargestSmall = kMiB;
constexpr std::uint64_t kSmallSegment = 2 * kMiB;
constexpr std::uint64_t kSmallestOwnSegment = 10 * kMiB;
constexpr std::uint64_t kLargeRounding = 2 * kMiB;
constexpr std::uint64_t kLargestRequest = std::uint64_t{1} << 60;

// Far from where Linux maps anything, so that a fake address cannot be taken for a real one.
constexpr Address kFirstAddress = Address{1} << 46;
constexpr std::uint64_t kAddressesPerDevice = std::uint64_t{1} << 43;

std::uint64_t round_up(std::uint64_t size, std::uint64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// To the next of `divisions` (a power of two) equal steps between two powers of two.
std::uint64_t round_to_division(std::uint64_t size, std::uint64_t divisions) {
  if (!(size & (size - 1))) return size;
  const std::uint64_t floor = std::uint64_t{1} << (63 - __builtin_clzll(size));
  const std::uint64_t step = floor / divisions;
  return step ? round_up(size, step) : 2 * floor;
}

void check_tag(Tag tag) {
  if (tag < kTags) return;
  throw std::invalid_argument("tag " + std::to_string(tag) + " is not below " + std::to_string(kTags));
}

struct LowerAddress {
  bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
};

// The cached blocks of one stream in one pool.
struct Shelf {
  Stream stream;
  FreeBlocks free;
  std::set<Block*, LowerAddress> unmapped;  // addresses of expandable segments that may be mapped
};

struct Pool {
  explicit Pool(bool is_small) : small(is_small) {}

  Shelf& shelf(Stream stream) {
    if (last_ < shelves.size() && shelves[last_].stream == stream) return shelves[last_];
    for (last_ = 0; last_ < shelves.size(); ++last_) {
      if (shelves[last_].stream == stream) return shelves[last_];
    }
    shelves.push_back({stream, {}, {}});
    return shelves.back();
  }

  const bool small;
  std::deque<Shelf> shelves;  // a deque, since references outlive the next stream's first allocation
  std::uint64_t searches = 0;

 private:
  std::size_t last_ = 0;
};

// Events recorded on a stream when blocks that it used were freed, the oldest first.
struct PendingEvents {
  Stream stream;
  std::deque<std::pair<std::uint64_t, Block*>> queue;
};

BlockInfo describe(const Block& block) {
  const bool active = block.in_use();
  return {block.address, block.size, active ? block.requested : 0, block.allocated, active, block.tag};
}

}  // namespace

std::string format_size(std::uint64_t size) {
  constexpr std::pair<std::uint64_t, const char*> kUnits[] = {
      {std::uint64_t{1} << 30, "GiB"}, {kMiB, "MiB"}, {1024, "KiB"}};
  for (const auto& [unit, name] : kUnits) {
    if (size <= unit) continue;
    char text[48];
    std::snprintf(text, sizeof text, "%.2f %s", static_cast<double>(size) / static_cast<double>(unit), name);
    return text;
  }
  return std::to_string(size) + " bytes";
}

std::string OutOfMemory::message() const {
  if (requested >= kLargestRequest) return "CUDA out of memory. Tried to allocate more than 1EB memory.";
  return "CUDA out of memory. Tried to allocate " + format_size(tried) + ". GPU " + std::to_string(device) +
         " has a total capacity of " + format_size(capacity) + " of which " + format_size(free) +
         " is free. Including non-PyTorch memory, this process has " + format_size(in_use) + " memory in use. " +
         (allowed == kUnlimited ? "" : format_size(allowed) + " allowed; ") + "Of the allocated memory " +
         format_size(allocated) + " is allocated by PyTorch, and " + format_size(reserved - allocated) +
         " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
         " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory"
         " Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
         "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)";
}

// Everything behind the lock. The methods are called with it held, and named after what they do in the algorithm.
class Allocator::State {
 public:
  State(const Settings& settings, StreamCallbacks streams)
      : settings_(settings),
        streams_(std::move(streams)),
        addresses_(kFirstAddress + static_cast<Address>(settings.device) * kAddressesPerDevice, kAddressesPerDevice) {
    set_options(settings.options);
    set_memory_fraction(settings.options.memory_fraction);
  }

  std::mutex& lock() { return mutex_; }

  Address allocate(std::uint64_t bytes, Stream stream, Tag tag) {
    check_tag(tag);
    if (bytes >= kLargestRequest) throw failure(bytes, bytes);
    const std::uint64_t size = rounded(bytes);
    Pool& pool = size <= kLargestSmall ? small_ : large_;
    if (settings_.poll_always && pending_) poll_events();
    if (collects()) ++pool.searches;
    Block* block = take_free(pool, size, stream);
    if (!block && pending_ && !settings_.poll_always && poll_events()) block = take_free(pool, size, stream);
    if (!block) block = reserve(pool, size, stream);
    if (!block) {
      ++statistics_.num_ooms;
      throw failure(bytes, segment_size(size));
    }
    return give_out(block, size, bytes, tag);
  }

  void release(Address address) {
    Block* block = owned(address);
    table_.erase(address);
    block->allocated = false;
    statistics_.allocation.decrease(block->small, 1);
    statistics_.allocated_bytes.decrease(block->small, block->size);
    statistics_.bytes_per_tag[block->tag] -= static_cast<std::int64_t>(block->size);
    if (block->size >= settings_.options.max_split_size) statistics_.oversize_allocations.decrease(1);
    if (block->uses.empty()) {
      free_block(block);
    } else {
      record_events(block);
    }
  }

  void record_stream(Address address, Stream stream) {
    Block* block = owned(address);
    if (stream == block->stream) return;
    if (std::find(block->uses.begin(), block->uses.end(), stream) == block->uses.end()) block->uses.push_back(stream);
  }

  void retag(Address address, Tag tag) {
    check_tag(tag);
    Block* block = owned(address);
    const auto size = static_cast<std::int64_t>(block->size);
    for (BytesPerTag* bytes : {&statistics_.bytes_per_tag, &statistics_.bytes_per_tag_at_most}) {
      if (bytes == &statistics_.bytes_per_tag_at_most && block->serial > serial_at_most_) continue;
      (*bytes)[block->tag] -= size;
      (*bytes)[tag] += size;
    }
    block->tag = tag;
  }

  void empty_cache() {
    synchronized_ = false;
    release_cached();
  }

  void release_cached() {
    wait_for_events();
    for (Pool* pool : {&large_, &small_}) {
      for (Shelf& shelf : pool->shelves) release_shelf(shelf);
    }
  }

  void set_memory_fraction(double fraction) {
    if (!(fraction >= 0.0 && fraction <= 1.0)) {
      throw std::invalid_argument("invalid fraction:" + std::to_string(fraction) + ". Please set within [0, 1].");
    }
    allowed_ = kUnlimited;
    if (fraction < 1.0) allowed_ = static_cast<std::uint64_t>(fraction * static_cast<double>(settings_.capacity));
  }

  double memory_fraction() const {
    if (allowed_ == kUnlimited) return 1.0;
    return static_cast<double>(allowed_) / static_cast<double>(settings_.capacity);
  }

  void set_options(const AllocatorOptions& options) {
    settings_.options = options;
    rounds_ = false;
    for (std::uint64_t divisions : options.roundup_power2_divisions) rounds_ = rounds_ || divisions > 1;
    statistics_.max_split_size = static_cast<std::int64_t>(options.max_split_size);
  }

  void set_overhead(std::uint64_t overhead) { settings_.overhead = overhead; }

  const Statistics& statistics() const { return statistics_; }
  void reset_accumulated() { foretrain::reset_accumulated(statistics_); }
  void reset_peak() { foretrain::reset_peak(statistics_); }

  std::pair<std::uint64_t, std::uint64_t> memory_info() const { return {device_free(), settings_.capacity}; }

  std::vector<SegmentInfo> snapshot() const {
    std::vector<SegmentInfo> segments;
    for (const Block& block : arena_.blocks()) {
      const bool head = block.address && block.mapped && !(block.previous && block.previous->mapped);
      if (head) segments.push_back(describe_segment(block));
    }
    std::sort(segments.begin(), segments.end(),
              [](const SegmentInfo& a, const SegmentInfo& b) { return a.address < b.address; });
    return segments;
  }

  Allocation find(Address address) const {
    const Block* block = owned(address);
    Allocation found{describe(*block), block->stream, 0, 0};
    while (block->previous && block->previous->mapped) block = block->previous;
    found.base = block->address;
    for (; block && block->mapped; block = block->next) found.base_size += block->size;
    return found;
  }

  std::uint64_t rounded(std::uint64_t bytes) const {
    if (bytes < kSmallestBlock) return kSmallestBlock;
    if (rounds_) {
      const std::uint64_t divisions = roundup_power2_divisions(settings_.options, bytes);
      if (divisions > 1 && bytes > kSmallestBlock * divisions) return round_to_division(bytes, divisions);
    }
    return round_up(bytes, kSmallestBlock);
  }

  std::uint64_t segment_size(std::uint64_t size) const {
    if (size <= kLargestSmall) return kSmallSegment;
    return size < kSmallestOwnSegment ? settings_.options.large_segment_size : round_up(size, kLargeRounding);
  }

 private:
  bool collects() const { return allowed_ != kUnlimited && settings_.options.garbage_collection_threshold > 0.0; }

  Block* owned(Address address) const {
    Block* block = table_.find(address);
    if (!block) throw std::invalid_argument("invalid device pointer: " + std::to_string(address));
    return block;
  }

  std::uint64_t device_free() const {
    const std::uint64_t in_use = reserved_ + settings_.overhead;
    return in_use < settings_.capacity ? settings_.capacity - in_use : 0;
  }

  OutOfMemory failure(std::uint64_t requested, std::uint64_t tried) const {
    OutOfMemory error;
    error.device = settings_.device;
    error.requested = requested;
    error.tried = tried;
    error.capacity = settings_.capacity;
    error.free = device_free();
    error.in_use = reserved_ + settings_.overhead;
    error.allowed = allowed_;
    error.allocated = static_cast<std::uint64_t>(statistics_.allocated_bytes.all.current);
    error.reserved = static_cast<std::uint64_t>(statistics_.reserved_bytes.all.current);
    error.bytes_per_tag = statistics_.bytes_per_tag;
    return error;
  }

  // --- giving out --------------------------------------------------------------------------------------------------

  // The smallest free block that fits, taken off its shelf; null if there is none.
  Block* take_free(Pool& pool, std::uint64_t size, Stream stream) {
    const AllocatorOptions& options = settings_.options;
    FreeBlocks& free = pool.shelf(stream).free;
    auto at = free.lower_bound(size);
    if (!free.valid(at)) return nullptr;
    if (free[at]->expandable) {
      at = options.expandable_segments ? least_expandable(free, at) : first_from_malloc(free, at);
      if (!free.valid(at)) return nullptr;
    }
    Block* block = free[at];
    if (size < options.max_split_size && block->size >= options.max_split_size) return nullptr;
    if (size >= options.max_split_size && block->size >= size + options.max_non_split_rounding_size) return nullptr;
    free.erase(at);
    return block;
  }

  // A block before unmapped addresses counts with them, so that the end of a segment is used last.
  static FreeBlocks::Position least_expandable(const FreeBlocks& free, FreeBlocks::Position at) {
    const auto extent = [](const Block* block) {
      return block->size + (block->next && !block->next->mapped ? block->next->size : 0);
    };
    for (auto next = free.next(at); free[at]->expandable && free.valid(next); next = free.next(next)) {
      if (extent(free[next]) >= extent(free[at])) break;
      at = next;
    }
    return at;
  }

  static FreeBlocks::Position first_from_malloc(const FreeBlocks& free, FreeBlocks::Position at) {
    while (free.valid(at) && free[at]->expandable) at = free.next(at);
    return at;
  }

  bool should_split(const Block& block, std::uint64_t size) const {
    const std::uint64_t rest = block.size - size;
    if (block.small || settings_.options.expandable_segments) return rest >= kSmallestBlock;
    return size < settings_.options.max_split_size && rest > kLargestSmall;
  }

  Address give_out(Block* block, std::uint64_t size, std::uint64_t bytes, Tag tag) {
    const bool was_split = block->split();
    if (should_split(*block, size)) {
      split_off(block, size);
      count_split(*block, was_split);
    } else if (was_split && !block->expandable) {
      statistics_.inactive_split.decrease(block->small, 1);
      statistics_.inactive_split_bytes.decrease(block->small, block->size);
    }
    block->allocated = true;
    block->requested = bytes;
    block->tag = tag;
    block->serial = ++serial_;
    table_.insert(block);
    count_allocation(*block);
    return block->address;
  }

  // Leaves `block` the first `size` bytes and puts the rest back on the shelf.
  void split_off(Block* block, std::uint64_t size) {
    Block* rest = arena_.make(block->address + size, block->size - size, block->stream, block->small);
    rest->expandable = block->expandable;
    rest->segment = block->segment;
    rest->link(block, block->next);
    block->size = size;
    shelve(rest);
  }

  void count_split(const Block& block, bool was_split) {
    if (block.expandable) return;
    if (was_split) {
      statistics_.inactive_split_bytes.decrease(block.small, block.size);
    } else {
      statistics_.inactive_split_bytes.increase(block.small, block.next->size);
      statistics_.inactive_split.increase(block.small, 1);
    }
  }

  void count_allocation(const Block& block) {
    statistics_.allocation.increase(block.small, 1);
    statistics_.allocated_bytes.increase(block.small, block.size);
    statistics_.active.increase(block.small, 1);
    statistics_.active_bytes.increase(block.small, block.size);
    statistics_.requested_bytes.increase(block.small, block.requested);
    statistics_.bytes_per_tag[block.tag] += static_cast<std::int64_t>(block.size);
    if (statistics_.allocated_bytes.all.current > statistics_.most_allocated) {
      statistics_.most_allocated = statistics_.allocated_bytes.all.current;
      statistics_.bytes_per_tag_at_most = statistics_.bytes_per_tag;
      serial_at_most_ = serial_;
    }
    if (block.size >= settings_.options.max_split_size) statistics_.oversize_allocations.increase(1);
  }

  // --- taking back -------------------------------------------------------------------------------------------------

  Pool& pool_of(const Block& block) { return block.small ? small_ : large_; }
  Shelf& shelf_of(const Block& block) { return pool_of(block).shelf(block.stream); }

  void shelve(Block* block) {
    Pool& pool = pool_of(*block);
    block->searches_before = pool.searches;
    pool.shelf(block->stream).free.insert(block);
  }

  // Caches a block that is no longer in use, merged with its free neighbours.
  void free_block(Block* block) {
    statistics_.active.decrease(block->small, 1);
    statistics_.active_bytes.decrease(block->small, block->size);
    statistics_.requested_bytes.decrease(block->small, block->requested);
    std::int64_t blocks = 0;
    std::int64_t bytes = 0;
    for (Block* neighbour : {block->previous, block->next}) {
      const std::uint64_t merged = merge(block, neighbour);
      blocks -= merged ? 1 : 0;
      bytes -= static_cast<std::int64_t>(merged);
    }
    shelve(block);
    if (block->expandable) return;
    if (block->split()) {
      blocks += 1;
      bytes += static_cast<std::int64_t>(block->size);
    }
    change(statistics_.inactive_split, block->small, blocks);
    change(statistics_.inactive_split_bytes, block->small, bytes);
  }

  static void change(PoolStat& stat, bool small, std::int64_t amount) {
    if (amount > 0) stat.increase(small, static_cast<std::uint64_t>(amount));
    if (amount < 0) stat.decrease(small, static_cast<std::uint64_t>(-amount));
  }

  // Swallows a free neighbour that is mapped as `block` is. Returns its size, or 0 if it cannot be merged.
  std::uint64_t merge(Block* block, Block* neighbour) {
    if (!neighbour || neighbour->in_use() || neighbour->mapped != block->mapped) return 0;
    Shelf& shelf = shelf_of(*neighbour);
    if (neighbour->mapped) {
      shelf.free.erase(neighbour);
    } else {
      shelf.unmapped.erase(neighbour);
    }
    const std::uint64_t size = neighbour->size;
    if (block->previous == neighbour) block->address = neighbour->address;
    block->size += size;
    neighbour->unlink();
    arena_.destroy(neighbour);
    return size;
  }

  // --- events of other streams -------------------------------------------------------------------------------------

  void record_events(Block* block) {
    const std::vector<Stream> uses = std::exchange(block->uses, {});
    for (Stream stream : uses) {
      ++block->events;
      events_of(stream).emplace_back(streams_.record ? streams_.record(stream) : 0, block);
      ++pending_;
    }
  }

  std::deque<std::pair<std::uint64_t, Block*>>& events_of(Stream stream) {
    for (PendingEvents& events : events_) {
      if (events.stream == stream) return events.queue;
    }
    return events_.emplace_back(PendingEvents{stream, {}}).queue;
  }

  // Frees the blocks whose events are over. Of each stream the first that is not hides those behind it. Returns
  // whether a block became free.
  bool poll_events() {
    bool freed = false;
    for (PendingEvents& events : events_) {
      while (!events.queue.empty() && (!streams_.over || streams_.over(events.queue.front().first))) {
        freed = finish_event(events) || freed;
      }
    }
    return freed;
  }

  void wait_for_events() {
    ++statistics_.num_sync_all_streams;
    for (PendingEvents& events : events_) {
      while (!events.queue.empty()) {
        if (streams_.wait) streams_.wait(events.queue.front().first);
        finish_event(events);
      }
    }
  }

  bool finish_event(PendingEvents& events) {
    Block* block = events.queue.front().second;
    events.queue.pop_front();
    --pending_;
    if (--block->events) return false;
    free_block(block);
    return true;
  }

  // --- segments ----------------------------------------------------------------------------------------------------

  // A block of at least `size` bytes in memory newly reserved, after giving back as much as that takes; null if it
  // cannot be had.
  Block* reserve(Pool& pool, std::uint64_t size, Stream stream) {
    synchronized_ = false;
    collect_garbage();
    Block* block = reserve_once(pool, size, stream);
    if (!block && release_oversize(pool, size, stream)) block = reserve_once(pool, size, stream);
    if (block) return block;
    release_cached();
    ++statistics_.num_alloc_retries;
    ++statistics_.all_retries;
    return reserve_once(pool, size, stream);
  }

  Block* reserve_once(Pool& pool, std::uint64_t size, Stream stream) {
    const std::uint64_t segment = segment_size(size);
    if (allowed_ != kUnlimited && reserved_ + segment > allowed_) return nullptr;
    if (settings_.options.expandable_segments) return expand(pool, size, stream);
    if (segment > device_free()) return nullptr;
    count_reserved(pool.small, segment);
    statistics_.segment.increase(pool.small, 1);
    if (segment >= settings_.options.max_split_size) statistics_.oversize_segments.increase(1);
    Block* block = arena_.make(addresses_.take(segment), segment, stream, pool.small);
    block->segment = ++segments_;
    return block;
  }

  void count_reserved(bool small, std::uint64_t size) {
    reserved_ += size;
    statistics_.reserved_bytes.increase(small, size);
    statistics_.most_reserved = std::max(statistics_.most_reserved, statistics_.reserved_bytes.all.current);
    ++statistics_.num_device_alloc;
  }

  void count_returned(bool small, std::uint64_t size) {
    reserved_ -= size;
    statistics_.reserved_bytes.decrease(small, size);
    ++statistics_.num_device_free;
  }

  // Gives a wholly free segment back to the device. The block must be on its shelf.
  void release_segment(Block* block) {
    synchronize_once();
    count_returned(block->small, block->size);
    statistics_.segment.decrease(block->small, 1);
    if (block->size >= settings_.options.max_split_size) statistics_.oversize_segments.decrease(1);
    shelf_of(*block).free.erase(block);
    addresses_.give_back(block->address, block->size);
    arena_.destroy(block);
  }

  // cudaFree waits for the device; while the caller stays here nothing new is launched, so once is enough.
  void synchronize_once() {
    if (!synchronized_ && streams_.synchronize) streams_.synchronize();
    synchronized_ = true;
  }

  void release_shelf(Shelf& shelf) {
    for (Block* block : shelf.free.all()) {
      if (block->expandable) {
        unmap(block);
      } else if (!block->split()) {
        release_segment(block);
      }
    }
  }

  // With max_split_size: gives back the smallest cached oversize block that would do, or else several, the largest
  // first. Returns whether that is enough. PyTorch does not ask whether such a block is split, and fails where the
  // limit was lowered while it was.
  bool release_oversize(Pool& pool, std::uint64_t size, Stream stream) {
    const std::uint64_t least = settings_.options.max_split_size;
    if (least == kUnlimited) return false;
    const std::uint64_t wanted = std::max(size, least);
    FreeBlocks& free = pool.shelf(stream).free;
    const auto fitting = free.lower_bound(wanted);
    if (free.valid(fitting) && whole_segment(*free[fitting])) {
      release_segment(free[fitting]);
      return true;
    }
    std::vector<Block*> largest;
    std::uint64_t released = 0;
    for (auto at = fitting; !free.first(at) && released < wanted;) {
      at = free.previous(at);
      if (free[at]->size < least) break;
      if (!whole_segment(*free[at])) continue;
      released += free[at]->size;
      largest.push_back(free[at]);
    }
    for (Block* block : largest) release_segment(block);
    return released >= wanted;
  }

  // Above the threshold: gives back cached segments of the large pool that are older than their average, until below.
  void collect_garbage() {
    if (!collects()) return;
    const auto threshold = static_cast<std::uint64_t>(settings_.options.garbage_collection_threshold *
                                                      static_cast<double>(allowed_));
    if (reserved_ <= threshold) return;
    const std::uint64_t target = reserved_ - threshold;
    std::vector<Block*> candidates = whole_cached_segments();
    std::uint64_t total_age = 0;
    for (const Block* block : candidates) total_age += age(*block);
    std::uint64_t reclaimed = 0;
    for (bool freed = true; freed && reclaimed < target && !candidates.empty();) {
      const double mean = static_cast<double>(total_age) / static_cast<double>(candidates.size());
      const auto old = [&](const Block* block) { return static_cast<double>(age(*block)) >= mean; };
      const auto first_old =
          std::stable_partition(candidates.begin(), candidates.end(), [&](const Block* block) { return !old(block); });
      freed = first_old != candidates.end();
      for (auto block = first_old; block != candidates.end(); ++block) {
        reclaimed += (*block)->size;
        total_age -= age(**block);
        release_segment(*block);
      }
      candidates.erase(first_old, candidates.end());
    }
  }

  static bool whole_segment(const Block& block) { return !block.split() && !block.expandable; }

  std::uint64_t age(const Block& block) const { return large_.searches - block.searches_before; }

  std::vector<Block*> whole_cached_segments() const {
    std::vector<Block*> whole;
    for (const Shelf& shelf : large_.shelves) {
      for (Block* block : shelf.free.all()) {
        if (whole_segment(*block)) whole.push_back(block);
      }
    }
    return whole;
  }

  // --- expandable segments -----------------------------------------------------------------------------------------

  // A block of at least `size` bytes at the lowest address where free and unmapped blocks give room, mapped as far as
  // needed. Null if the device is full; what was mapped until then stays, as a free block.
  Block* expand(Pool& pool, std::uint64_t size, Stream stream) {
    Shelf& shelf = pool.shelf(stream);
    Block* block = find_room(pool, shelf, size);
    if (!block->mapped && !map(shelf, block, std::min(block->size, size))) return nullptr;
    while (block->size < size) {
      Block* next = block->next;
      if (!map(shelf, next, std::min(size - block->size, next->size))) return nullptr;
      block = next;
    }
    shelf.free.erase(block);
    return block;
  }

  Block* find_room(Pool& pool, Shelf& shelf, std::uint64_t size) {
    for (Block* candidate : shelf.unmapped) {
      Block* first = candidate;
      if (first->previous && !first->previous->in_use()) first = first->previous;
      std::uint64_t room = 0;
      for (Block* block = first; room < size && block && !block->in_use(); block = block->next) room += block->size;
      if (room >= size) return first;
    }
    return new_expandable(pool, shelf);
  }

  // An eighth more addresses than the device has memory: pages may have to be mapped anew behind the others.
  Block* new_expandable(Pool& pool, Shelf& shelf) {
    const std::uint64_t page = pool.small ? kSmallSegment : settings_.options.large_segment_size;
    const std::uint64_t size = round_up(settings_.capacity + settings_.capacity / 8, page);
    auto segment = std::make_unique<ExpandableSegment>(ExpandableSegment{addresses_.take(size), size, page});
    Block* block = arena_.make(segment->address, size, shelf.stream, pool.small);
    block->segment = ++segments_;
    block->mapped = false;
    block->expandable = segment.get();
    shelf.unmapped.insert(block);
    expandables_.push_back(std::move(segment));
    return block;
  }

  // Backs the first `size` bytes of an unmapped block, rounded up to pages, with memory.
  bool map(Shelf& shelf, Block* block, std::uint64_t size) {
    const std::uint64_t mapped = round_up(size, block->expandable->page);
    if (mapped > device_free()) return false;
    shelf.unmapped.erase(block);
    block->mapped = true;
    if (mapped < block->size) {
      Block* rest = arena_.make(block->address + mapped, block->size - mapped, block->stream, block->small);
      rest->mapped = false;
      rest->expandable = block->expandable;
      rest->segment = block->segment;
      rest->link(block, block->next);
      block->size = mapped;
      shelf.unmapped.insert(rest);
    }
    merge(block, block->previous);
    merge(block, block->next);
    shelve(block);
    count_reserved(block->small, mapped);
    return true;
  }

  // Takes the memory from the whole pages of a free block.
  void unmap(Block* block) {
    const std::uint64_t page = block->expandable->page;
    const Address origin = block->expandable->address;
    const Address begin = origin + round_up(block->address - origin, page);
    const Address end = origin + (block->address + block->size - origin) / page * page;
    if (begin >= end) return;
    synchronize_once();
    Shelf& shelf = shelf_of(*block);
    shelf.free.erase(block);
    if (begin > block->address) shelve(cut(block, block->address, begin, block->previous, block));
    const Address last = block->address + block->size;
    if (end < last) shelve(cut(block, end, last, block, block->next));
    block->address = begin;
    block->size = end - begin;
    block->mapped = false;
    merge(block, block->previous);
    merge(block, block->next);
    shelf.unmapped.insert(block);
    count_returned(block->small, end - begin);
    if (!block->split()) release_expandable(shelf, block);
  }

  // A mapped block of its own for the part [begin, end) of `block`, between its new neighbours.
  Block* cut(const Block* block, Address begin, Address end, Block* before, Block* after) {
    Block* part = arena_.make(begin, end - begin, block->stream, block->small);
    part->expandable = block->expandable;
    part->segment = block->segment;
    part->link(before, after);
    return part;
  }

  void release_expandable(Shelf& shelf, Block* block) {
    const ExpandableSegment* segment = block->expandable;
    shelf.unmapped.erase(block);
    addresses_.give_back(segment->address, segment->size);
    const auto found = std::find_if(expandables_.begin(), expandables_.end(),
                                    [&](const auto& owned_segment) { return owned_segment.get() == segment; });
    expandables_.erase(found);
    arena_.destroy(block);
  }

  SegmentInfo describe_segment(const Block& head) const {
    SegmentInfo segment;
    segment.address = head.address;
    segment.stream = head.stream;
    segment.is_large = !head.small;
    segment.is_expandable = head.expandable != nullptr;
    for (const Block* block = &head; block && block->mapped; block = block->next) {
      segment.blocks.push_back(describe(*block));
      const BlockInfo& info = segment.blocks.back();
      segment.total_size += info.size;
      segment.allocated_size += info.allocated ? info.size : 0;
      segment.active_size += info.active ? info.size : 0;
      segment.requested_size += info.active ? info.requested_size : 0;
    }
    return segment;
  }

  std::mutex mutex_;
  Settings settings_;
  StreamCallbacks streams_;
  AddressSpace addresses_;
  Statistics statistics_;
  BlockArena arena_;
  BlockTable table_;
  Pool large_{false};
  Pool small_{true};
  std::vector<std::unique_ptr<ExpandableSegment>> expandables_;
  std::vector<PendingEvents> events_;  // in the order in which streams were first used across
  std::size_t pending_ = 0;            // events in all queues
  std::uint64_t reserved_ = 0;
  std::uint64_t allowed_ = kUnlimited;
  std::uint64_t segments_ = 0;        // ever reserved
  std::uint64_t serial_ = 0;          // of the last allocation
  std::uint64_t serial_at_most_ = 0;  // when most was allocated
  bool synchronized_ = false;         // with the device, in the call under way
  bool rounds_ = false;               // whether any size is rounded to divisions
};

Allocator::Allocator(const Settings& settings, StreamCallbacks streams)
    : state_(std::make_unique<State>(settings, std::move(streams))) {}

Allocator::~Allocator() = default;

Address Allocator::allocate(std::uint64_t bytes, Stream stream, Tag tag) {
  if (!bytes) return 0;
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->allocate(bytes, stream, tag);
}

void Allocator::release(Address address) {
  if (!address) return;
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->release(address);
}

void Allocator::record_stream(Address address, Stream stream) {
  if (!address) return;
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->record_stream(address, stream);
}

void Allocator::retag(Address address, Tag tag) {
  if (!address) return;
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->retag(address, tag);
}

void Allocator::empty_cache() {
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->empty_cache();
}

void Allocator::set_memory_fraction(double fraction) {
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->set_memory_fraction(fraction);
}

double Allocator::memory_fraction() const {
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->memory_fraction();
}

void Allocator::set_options(const AllocatorOptions& options) {
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->set_options(options);
}

void Allocator::set_overhead(std::uint64_t overhead) {
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->set_overhead(overhead);
}

Statistics Allocator::statistics() const {
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->statistics();
}

std::int64_t Allocator::allocated() const {
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->statistics().allocated_bytes.all.current;
}

void Allocator::reset_peak() {
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->reset_peak();
}

void Allocator::reset_accumulated() {
  const std::lock_guard<std::mutex> guard(state_->lock());
  state_->reset_accumulated();
}

std::pair<std::uint64_t, std::uint64_t> Allocator::memory_info() const {
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->memory_info();
}

std::vector<SegmentInfo> Allocator::snapshot() const {
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->snapshot();
}

Allocation Allocator::find(Address address) const {
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->find(address);
}

std::uint64_t Allocator::rounded(std::uint64_t bytes) const {
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->rounded(bytes);
}

std::uint64_t Allocator::segment_for(std::uint64_t bytes) const {
  const std::lock_guard<std::mutex> guard(state_->lock());
  return state_->segment_size(state_->rounded(bytes));
}

}  // namespace foretrain
