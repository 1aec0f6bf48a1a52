// The blocks of the caching allocator and the three containers it keeps them in. For allocator.cpp only.
//
// PyTorch keeps free blocks in a std::set and finds allocated ones in a hash map of heap nodes; an allocation and a
// free then cost a dozen cache misses. Here blocks lie in an arena, free ones are found in short sorted arrays, and
// allocated ones by open addressing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <stdexcept>
#include <vector>

#include "allocator_statistics.hpp"

namespace foretrain {

using Address = std::uint64_t;
using Stream = std::int32_t;

// Virtual addresses of one expandable segment; its blocks say which of them are backed by memory.
struct ExpandableSegment {
  Address address = 0;
  std::uint64_t size = 0;
  std::uint64_t page = 0;  // what is mapped and unmapped at once
};

// A piece of a segment. The blocks of a segment are linked in the order of their addresses and fill it.
struct Block {
  Address address = 0;  // 0 only in the arena's stock
  std::uint64_t size = 0;
  std::uint64_t requested = 0;
  Block* previous = nullptr;
  Block* next = nullptr;
  ExpandableSegment* expandable = nullptr;  // null: from cudaMalloc
  std::uint64_t segment = 0;                // number of its segment, in the order in which they were reserved
  std::uint64_t serial = 0;                 // which allocation it was given out by
  std::uint64_t searches_before = 0;        // of its pool when it was last freed: its age
  std::vector<Stream> uses;                 // other streams that use it
  Stream stream = 0;
  std::int32_t events = 0;  // recorded when it was freed and not yet known to be over
  Tag tag = kOther;
  bool small = false;
  bool allocated = false;
  bool mapped = true;  // false: addresses of an expandable segment without memory

  bool split() const { return previous || next; }
  bool in_use() const { return allocated || events || !uses.empty(); }

  // Puts this block between two neighbours, either of which may be missing.
  void link(Block* before, Block* after) {
    previous = before;
    next = after;
    if (before) before->next = this;
    if (after) after->previous = this;
  }
  void unlink() {
    if (previous) previous->next = next;
    if (next) next->previous = previous;
  }
};

// Owns all blocks; their addresses in memory are stable.
class BlockArena {
 public:
  Block* make(Address address, std::uint64_t size, Stream stream, bool small) {
    Block* block;
    if (stock_.empty()) {
      block = &blocks_.emplace_back();
    } else {
      block = stock_.back();
      stock_.pop_back();
    }
    block->address = address;
    block->size = size;
    block->stream = stream;
    block->small = small;
    return block;
  }

  void destroy(Block* block) {
    *block = Block();
    stock_.push_back(block);
  }

  const std::deque<Block>& blocks() const { return blocks_; }

 private:
  std::deque<Block> blocks_;
  std::vector<Block*> stock_;
};

// Free blocks of one stream and pool in the order of (size, segment, address): a list of sorted arrays, so that a
// search is two binary searches and a change moves at most one short array.
class FreeBlocks {
 public:
  struct Entry {
    std::uint64_t size;
    std::uint64_t segment;
    Address address;
    Block* block;
    bool operator<(const Entry& other) const {
      if (size != other.size) return size < other.size;
      return segment != other.segment ? segment < other.segment : address < other.address;
    }
  };

  // Where an entry is. Any change of the container invalidates it.
  struct Position {
    std::size_t array;
    std::size_t index;
  };

  bool empty() const { return arrays_.empty(); }
  bool valid(Position at) const { return at.array < arrays_.size(); }
  Block* operator[](Position at) const { return arrays_[at.array][at.index].block; }
  Position begin() const { return {0, 0}; }

  Position next(Position at) const {
    if (++at.index == arrays_[at.array].size()) at = {at.array + 1, 0};
    return at;
  }

  bool first(Position at) const { return at.array == 0 && at.index == 0; }

  Position previous(Position at) const {
    if (at.index) return {at.array, at.index - 1};
    return {at.array - 1, arrays_[at.array - 1].size() - 1};
  }

  // The smallest block of at least `size` bytes; invalid if there is none.
  Position lower_bound(std::uint64_t size) const { return lower_bound(Entry{size, 0, 0, nullptr}); }

  void insert(Block* block) {
    const Entry entry = entry_of(block);
    if (arrays_.empty()) {
      arrays_.emplace_back().reserve(kLongest);
      arrays_.back().push_back(entry);
      return;
    }
    Position at = lower_bound(entry);
    if (!valid(at)) at = {arrays_.size() - 1, arrays_.back().size()};
    std::vector<Entry>& array = arrays_[at.array];
    array.insert(array.begin() + static_cast<std::ptrdiff_t>(at.index), entry);
    if (array.size() == kLongest) halve(at.array);
  }

  void erase(Block* block) { erase(lower_bound(entry_of(block))); }

  void erase(Position at) {
    std::vector<Entry>& array = arrays_[at.array];
    array.erase(array.begin() + static_cast<std::ptrdiff_t>(at.index));
    if (array.empty()) {
      arrays_.erase(arrays_.begin() + static_cast<std::ptrdiff_t>(at.array));
    } else if (array.size() < kLongest / 4) {
      join_next(at.array);
    }
  }

  std::vector<Block*> all() const {
    std::vector<Block*> blocks;
    for (const auto& array : arrays_) {
      for (const Entry& entry : array) blocks.push_back(entry.block);
    }
    return blocks;
  }

 private:
  static constexpr std::size_t kLongest = 128;

  static Entry entry_of(Block* block) { return {block->size, block->segment, block->address, block}; }

  Position lower_bound(const Entry& key) const {
    const auto array = std::partition_point(arrays_.begin(), arrays_.end(),
                                            [&](const std::vector<Entry>& entries) { return entries.back() < key; });
    if (array == arrays_.end()) return {arrays_.size(), 0};
    const auto entry = std::lower_bound(array->begin(), array->end(), key);
    return {static_cast<std::size_t>(array - arrays_.begin()), static_cast<std::size_t>(entry - array->begin())};
  }

  void halve(std::size_t index) {
    std::vector<Entry> upper;
    upper.reserve(kLongest);
    std::vector<Entry>& lower = arrays_[index];
    const auto middle = lower.begin() + kLongest / 2;
    upper.assign(middle, lower.end());
    lower.erase(middle, lower.end());
    arrays_.insert(arrays_.begin() + static_cast<std::ptrdiff_t>(index) + 1, std::move(upper));
  }

  // Only where the two together stay short, or an array at the limit would be joined and halved again and again.
  void join_next(std::size_t index) {
    if (index + 1 == arrays_.size() || arrays_[index].size() + arrays_[index + 1].size() > kLongest / 2) return;
    const std::vector<Entry>& next = arrays_[index + 1];
    arrays_[index].insert(arrays_[index].end(), next.begin(), next.end());
    arrays_.erase(arrays_.begin() + static_cast<std::ptrdiff_t>(index) + 1);
  }

  std::vector<std::vector<Entry>> arrays_;  // none of them empty
};

// Allocated blocks by address: linear probing, at most half full, no tombstones.
class BlockTable {
 public:
  Block* find(Address address) const {
    for (std::size_t at = home(address);; at = (at + 1) & mask()) {
      if (!slots_[at] || slots_[at]->address == address) return slots_[at];
    }
  }

  void insert(Block* block) {
    if (2 * ++count_ > slots_.size()) grow();
    place(block);
  }

  void erase(Address address) {
    std::size_t hole = home(address);
    while (slots_[hole]->address != address) hole = (hole + 1) & mask();
    // An entry behind the hole that would no longer be found across it moves into it.
    for (std::size_t at = (hole + 1) & mask(); slots_[at]; at = (at + 1) & mask()) {
      const std::size_t from_home = (at - home(slots_[at]->address)) & mask();
      if (from_home >= ((at - hole) & mask())) {
        slots_[hole] = slots_[at];
        hole = at;
      }
    }
    slots_[hole] = nullptr;
    --count_;
  }

 private:
  std::size_t mask() const { return slots_.size() - 1; }
  std::size_t home(Address address) const { return (address * 0x9E3779B97F4A7C15u) >> shift_; }

  void place(Block* block) {
    std::size_t at = home(block->address);
    while (slots_[at]) at = (at + 1) & mask();
    slots_[at] = block;
  }

  void grow() {
    std::vector<Block*> before(slots_.size() * 2, nullptr);
    before.swap(slots_);
    --shift_;
    for (Block* block : before) {
      if (block) place(block);
    }
  }

  std::vector<Block*> slots_ = std::vector<Block*>(1024, nullptr);
  unsigned shift_ = 64 - 10;
  std::size_t count_ = 0;
};

// Hands out ranges of fake addresses, the lowest that are free.
class AddressSpace {
 public:
  AddressSpace(Address begin, std::uint64_t size) : free_{{begin, size}} {}

  Address take(std::uint64_t size) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      const auto [address, length] = *range;
      if (length < size) continue;
      free_.erase(range);
      if (length > size) free_[address + size] = length - size;
      return address;
    }
    throw std::length_error("the fake device has no addresses left");
  }

  void give_back(Address address, std::uint64_t size) {
    auto after = free_.lower_bound(address);
    if (after != free_.end() && after->first == address + size) {
      size += after->second;
      after = free_.erase(after);
    }
    if (after != free_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == address) {
        before->second += size;
        return;
      }
    }
    free_[address] = size;
  }

 private:
  std::map<Address, std::uint64_t> free_;
};

}  // namespace foretrain
