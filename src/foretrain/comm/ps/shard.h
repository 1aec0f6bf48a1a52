// Sums of one shard: who has pushed which bytes of which round, and their sum once all have.
//
// A state machine without socket, clock or thread; `foretrain.comm.ps.server.shard` says what it does, and the tests
// compare it with the same in Python. Contributions are added in the order of ranks, however they came, so that two
// runs give the same bits. Sixteen-bit numbers are added in float32 and rounded once.

#pragma once

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <vector>

#include "../collectives/sums.h"

namespace {

const int64_t MOST_WORKERS = 1024;
using Workers = std::bitset<MOST_WORKERS>;

struct Range {
    int64_t start, end;
};
using Ranges = std::vector<Range>;

// Returns where a range ends that somebody names; −1 where no number is large enough.
inline int64_t end_of(int64_t start, int64_t size) {
    int64_t end;
    return __builtin_add_overflow(start, size, &end) ? -1 : end;
}

// Appends a range that lies behind all others, or joins it to the last.
inline void extend(Ranges& ranges, int64_t start, int64_t end) {
    if (!ranges.empty() && ranges.back().end == start) {
        ranges.back().end = end;
    } else {
        ranges.push_back({start, end});
    }
}

// Pushed bytes of a part: the workers in masks_[k] have pushed edges_[k] to edges_[k + 1].
class Coverage {
  public:
    Coverage(int64_t size, const Workers& group) : edges_{0, size}, masks_(1), group_(group), left_(size) {}

    bool whole() const { return !left_; }

    // Notes a push; appends the ranges that are new, and those that are now complete.
    void add(int64_t worker, int64_t start, int64_t end, Ranges& fresh, Ranges& complete) {
        size_t first = cut(start), last = cut(end);
        for (size_t k = first; k < last; ++k) {
            if (masks_[k][worker]) continue;
            masks_[k].set(worker);
            extend(fresh, edges_[k], edges_[k + 1]);
            if (by_all(masks_[k])) extend(complete, edges_[k], edges_[k + 1]);
        }
        for (size_t k = std::min(last, masks_.size() - 1); k >= std::max<size_t>(first, 1); --k)
            if (masks_[k] == masks_[k - 1]) edges_.erase(edges_.begin() + k), masks_.erase(masks_.begin() + k);
        for (const Range& each : complete) left_ -= each.end - each.start;
    }

    // Forgets a lost worker in all incomplete ranges; appends those that all others have pushed.
    void remove_worker(int64_t worker, Ranges& complete) {
        Workers before = group_;
        group_.reset(worker);
        for (size_t k = 0; k < masks_.size(); ++k) {
            if ((masks_[k] & before) == before) continue;
            masks_[k].reset(worker);
            if (group_.any() && by_all(masks_[k])) extend(complete, edges_[k], edges_[k + 1]);
        }
        for (const Range& each : complete) left_ -= each.end - each.start;
    }

    // Returns the ranges of [start, end) that all have pushed.
    Ranges complete(int64_t start, int64_t end) const {
        Ranges found;
        for (size_t k = 0; k < masks_.size() && edges_[k] < end; ++k)
            if (edges_[k + 1] > start && by_all(masks_[k]))
                extend(found, std::max(start, edges_[k]), std::min(end, edges_[k + 1]));
        return found;
    }

    // Returns the bytes that a worker of the group has yet to push.
    int64_t missing(int64_t worker) const {
        int64_t left = 0;
        for (size_t k = 0; k < masks_.size(); ++k)
            if (group_[worker] && !masks_[k][worker]) left += edges_[k + 1] - edges_[k];
        return left;
    }

  private:
    bool by_all(const Workers& mask) const { return (mask & group_) == group_; }

    // Returns the place of an edge, inserted if there was none.
    size_t cut(int64_t at) {
        size_t place = std::lower_bound(edges_.begin(), edges_.end(), at) - edges_.begin();
        if (edges_[place] != at) {
            edges_.insert(edges_.begin() + place, at);
            masks_.insert(masks_.begin() + place, Workers(masks_[place - 1]));
        }
        return place;
    }

    std::vector<int64_t> edges_;
    std::vector<Workers> masks_;
    Workers group_;
    int64_t left_;      // bytes that some worker has not pushed
};

// Bytes from `offset` on, as a worker has pushed them, and what keeps them.
struct Pushed {
    int64_t offset, end;
    const char* data;
    std::shared_ptr<void> keep;
};

#define TOTAL(name, type)                                                                               \
    CLONED void name(const void* one, const void* other, void* sum, int64_t count) {                    \
        const type *a = static_cast<const type*>(one), *b = static_cast<const type*>(other);            \
        type* to = static_cast<type*>(sum);                                                             \
        for (int64_t i = 0; i < count; ++i) to[i] = a[i] + b[i];                                        \
    }
TOTAL(total_float32, float)
TOTAL(total_float64, double)

#define HALVES(name, half)                                                                              \
    CLONED void widen_##name(const uint16_t* from, float* to, int64_t count) {                          \
        for (int64_t i = 0; i < count; ++i) to[i] = half::widen(from[i]);                               \
    }                                                                                                   \
    CLONED void add_widened_##name(const uint16_t* from, float* to, int64_t count) {                    \
        for (int64_t i = 0; i < count; ++i) to[i] += half::widen(from[i]);                              \
    }                                                                                                   \
    CLONED void round_##name(const float* from, uint16_t* to, int64_t count) {                          \
        for (int64_t i = 0; i < count; ++i) to[i] = half::round(from[i]);                               \
    }
HALVES(float16, Half)
HALVES(bfloat16, Brain)

enum Kinds { FLOAT32, FLOAT64, FLOAT16, BFLOAT16 };     // the first of plan.KINDS
const int64_t BLOCK = 4 << 10;  // elements added at a time: sum and summands stay in a core's cache

// Writes `scale` times the sum of bytes [start, end), by rank, into the same place of `out`. A worker without any of them
// adds nothing, and one with some zeros elsewhere. Returns whether any has some.
inline bool add_up(const std::vector<const std::vector<Pushed>*>& by_rank, int64_t start, int64_t end, int64_t kind,
                   char* out, double scale) {
    std::vector<const char*> summands;
    std::vector<std::unique_ptr<char[]>> made;
    for (const std::vector<Pushed>* pushed : by_rank) {
        char* whole = nullptr;
        for (const Pushed& each : *pushed) {
            int64_t low = std::max(start, each.offset), high = std::min(end, each.end);
            if (low >= high) continue;
            const char* data = each.data + (low - each.offset);
            if (low == start && high == end) {
                summands.push_back(data);
                break;
            }
            if (!whole) {
                made.emplace_back(whole = new char[end - start]());
                summands.push_back(whole);
            }
            std::memcpy(whole + (low - start), data, high - low);
        }
    }
    if (summands.empty()) return false;
    const int64_t width = kinds[kind].item, count = (end - start) / width;
    float wide[BLOCK];
    for (int64_t low = 0; low < count; low += BLOCK) {
        int64_t many = std::min(BLOCK, count - low);
        char* to = out + start + low * width;
        auto at = [&](size_t k) { return summands[k] + low * width; };
        auto halves = [&](size_t k) { return reinterpret_cast<const uint16_t*>(at(k)); };
        if (width == 2) {
            bool brain = kind == BFLOAT16;
            (brain ? widen_bfloat16 : widen_float16)(halves(0), wide, many);
            for (size_t k = 1; k < summands.size(); ++k)
                (brain ? add_widened_bfloat16 : add_widened_float16)(halves(k), wide, many);
            if (scale != 1) scale_float32(wide, float(scale), many);
            (brain ? round_bfloat16 : round_float16)(wide, reinterpret_cast<uint16_t*>(to), many);
            continue;
        }
        if (summands.size() == 1) {
            std::memcpy(to, at(0), many * width);
        } else {
            (kind == FLOAT64 ? total_float64 : total_float32)(at(0), at(1), to, many);
        }
        for (size_t k = 2; k < summands.size(); ++k) kinds[kind].add(to, at(k), many);
        if (scale != 1 && kind == FLOAT64) {
            for (int64_t i = 0; i < many; ++i) reinterpret_cast<double*>(to)[i] *= scale;
        } else if (scale != 1) {
            scale_float32(to, float(scale), many);
        }
    }
    return true;
}

// Sum of bytes [start, end) of a part in a round; `absent` if no worker had a gradient.
struct Value {
    int64_t part, step, start, end, absent;
    int64_t length() const { return absent ? 0 : end - start; }
};

struct Delivery {
    int64_t worker;
    Value value;
};

class Shard {
  public:
    enum Code : int64_t { TAKEN, NO_PART, NO_RANGE, NO_SIZE, NO_ROUND, TOO_EARLY, DIFFERENT };

    struct Part {
        int64_t size, kind, urgency;
        struct Round {
            int64_t step;
            bool again;
            Coverage coverage;
            std::vector<std::vector<Pushed>> pushed;    // by worker
            Ranges absent;                              // for which no worker had a gradient
            Workers held;                               // workers that get only what they pull
            std::vector<std::pair<int64_t, Range>> pulls;
        };
        std::unique_ptr<Round> rounds[2];
        std::unique_ptr<char[]> sums[2];

        int64_t latest() const {
            return std::max(rounds[0] ? rounds[0]->step : -1, rounds[1] ? rounds[1]->step : -1);
        }
    };

    Shard(int64_t workers, bool restarted) : workers_(workers), restarted_(restarted) {
        for (int64_t k = 0; k < workers; ++k) group_.set(k);
    }

    void add_part(int64_t number, int64_t size, int64_t kind, int64_t urgency) {
        Part& made = parts_[number];
        made.size = size, made.kind = kind, made.urgency = urgency;
        for (auto& each : made.sums) each.reset(new char[size]());
    }

    void leave_out(int64_t worker) { group_.reset(worker); }

    const Part* part(int64_t number) const {
        auto found = parts_.find(number);
        return found == parts_.end() ? nullptr : &found->second;
    }

    const char* data(const Value& value) const {
        return value.absent ? nullptr : parts_.at(value.part).sums[value.step & 1].get() + value.start;
    }

    // Adds a push, and appends the sums to send now. `data` is null if the worker has no gradient. `detail` is the round
    // that an error tells of.
    Code push(int64_t worker, int64_t number, int64_t step, Pushed pushed, bool again, bool held,
              std::vector<Delivery>& to, int64_t& detail) {
        auto found = parts_.find(number);
        if (found == parts_.end()) return NO_PART;
        Part& part = found->second;
        int64_t width = kinds[part.kind].item, start = pushed.offset, end = pushed.end;
        if (start < 0 || end <= start || end > part.size || start % width || end % width) return NO_RANGE;
        int64_t latest = detail = part.latest();
        if (latest >= 0 && !(latest - 1 <= step && step <= latest + 1 + restarted_)) return step < latest ? TAKEN : NO_ROUND;
        std::unique_ptr<Part::Round>& place = part.rounds[step & 1];
        if (!place || place->step < step) {
            if (place && !place->coverage.whole() && !restarted_) return detail = place->step, TOO_EARLY;
            place.reset(new Part::Round{step, again, Coverage(part.size, group_), {}, {}, {}, {}});
            place->pushed.resize(workers_);
        } else if (place->step > step) {
            return TAKEN;
        }
        Part::Round& round = *place;
        if (round.again != again) return DIFFERENT;
        if (held) round.held.set(worker);

        Ranges fresh, complete;
        round.coverage.add(worker, start, end, fresh, complete);
        if (!round.held[worker]) {  // what it had pushed before is answered again
            int64_t at = start;
            auto answer = [&](int64_t until) {
                for (const Range& each : at < until ? round.coverage.complete(at, until) : Ranges())
                    values(number, part, round, each, [&](const Value& value) { to.push_back({worker, value}); });
            };
            for (const Range& each : fresh) answer(each.start), at = each.end;
            answer(end);
        }
        if (pushed.data) {
            for (const Range& each : fresh)
                round.pushed[worker].push_back({each.start, each.end, pushed.data + (each.start - start), pushed.keep});
        }
        for (const Range& each : complete) deliver(round, sum(number, part, round, each), to);
        // Sums have a buffer of their own.
        if (round.coverage.whole() && !complete.empty()) round.pushed.assign(workers_, {});
        return TAKEN;
    }

    // Appends the sums that `worker` asks for and that exist; the others are delivered when they do.
    Code pull(int64_t worker, int64_t number, int64_t step, Range wanted, std::vector<Delivery>& to) {
        auto found = parts_.find(number);
        if (found == parts_.end()) return NO_PART;
        Part& part = found->second;
        Part::Round* round = part.rounds[step & 1].get();
        if (!round || round->step != step || wanted.start < 0 || wanted.end <= wanted.start || wanted.end > part.size)
            return NO_RANGE;
        round->pulls.push_back({worker, wanted});
        for (const Range& each : round->coverage.complete(wanted.start, wanted.end))
            values(number, part, *round, each, [&](const Value& value) { to.push_back({worker, value}); });
        return TAKEN;
    }

    // Removes a lost worker; appends the sums that this completes.
    void remove_worker(int64_t worker, std::vector<Delivery>& to) {
        group_.reset(worker);
        for (auto& each : parts_) {
            Part& part = each.second;
            bool turned = part.rounds[0] && part.rounds[1] && part.rounds[1]->step < part.rounds[0]->step;
            for (int k = 0; k < 2; ++k) {
                Part::Round* round = part.rounds[k ^ turned].get();
                if (!round) continue;
                Ranges complete;
                round->coverage.remove_worker(worker, complete);
                for (const Range& one : complete) deliver(*round, sum(each.first, part, *round, one), to);
            }
        }
    }

    std::mutex mutex;       // of whoever calls
    std::vector<Delivery> told;     // to the caller in Python

  private:
    Value sum(int64_t number, Part& part, Part::Round& round, Range range) {
        std::vector<const std::vector<Pushed>*> counted;
        for (int64_t worker = 0; worker < workers_; ++worker)
            if (group_[worker]) counted.push_back(&round.pushed[worker]);
        char* out = part.sums[round.step & 1].get();
        double scale = double(workers_) / double(group_.count());
        bool some = add_up(counted, range.start, range.end, part.kind, out, scale);
        if (!some) round.absent.push_back(range);
        return {number, round.step, range.start, range.end, !some};
    }

    // Appends a sum for each worker that gets it now.
    void deliver(const Part::Round& round, const Value& value, std::vector<Delivery>& to) const {
        for (int64_t worker = 0; worker < workers_; ++worker)
            if (group_[worker] && !round.held[worker]) to.push_back({worker, value});
        for (const auto& pull : round.pulls) {
            int64_t low = std::max(pull.second.start, value.start), high = std::min(pull.second.end, value.end);
            if (low < high) to.push_back({pull.first, {value.part, value.step, low, high, value.absent}});
        }
    }

    // Hands over the sums of a complete range in order, apart from what no worker had a gradient for.
    template <class Put>
    void values(int64_t number, Part& part, Part::Round& round, Range range, Put put) const {
        Ranges absent = round.absent;
        std::sort(absent.begin(), absent.end(), [](Range a, Range b) { return a.start < b.start; });
        int64_t start = range.start;
        for (const Range& each : absent) {
            if (each.start >= range.end || each.end <= start) continue;
            if (start < each.start) put(Value{number, round.step, start, each.start, 0});
            int64_t end = std::min(range.end, each.end);
            put(Value{number, round.step, std::max(start, each.start), end, 1});
            start = end;
        }
        if (start < range.end) put(Value{number, round.step, start, range.end, 0});
    }

    std::map<int64_t, Part> parts_;
    int64_t workers_;
    bool restarted_;
    Workers group_;
};

// Sums to send to one worker: the most urgent first, as far as its credit allows.
class Outlet {
  public:
    static constexpr int64_t SHARED = 64 << 10;     // frames.SMALL: bytes of a range that shares a message, at most

    Outlet(int64_t credit, int64_t slice) : credit_(credit), slice_(slice) {}

    void put(int64_t urgency, const Value& value) { heap_.push({urgency, ++count_, value}); }

    // Returns the values of the next message, `SHARED` bytes at most each where there are several, all of one round.
    std::vector<Value> take() {
        std::vector<Value> found;
        if (heap_.empty() || under_way_ >= credit_) return found;
        found.push_back(pop());
        int64_t size = found[0].length();
        if (size <= SHARED) {
            while (!heap_.empty() && heap_.top().value.step == found[0].step &&
                   heap_.top().value.length() <= std::min(SHARED, slice_ - size)) {
                found.push_back(pop());
                size += found.back().length();
            }
        }
        under_way_ += size;
        return found;
    }

    void received(int64_t size) { under_way_ = std::max<int64_t>(0, under_way_ - size); }

  private:
    struct Entry {
        int64_t urgency, count;
        Value value;
        bool operator<(const Entry& other) const {      // the greatest is on top
            return urgency != other.urgency ? urgency > other.urgency : count > other.count;
        }
    };

    Value pop() {
        Entry entry = heap_.top();
        heap_.pop();
        if (entry.value.length() > slice_) {
            Entry rest = entry;
            rest.value.start = entry.value.end = entry.value.start + slice_;
            heap_.push(rest);
        }
        return entry.value;
    }

    int64_t credit_, slice_, under_way_ = 0, count_ = 0;
    std::priority_queue<Entry> heap_;
};

}  // namespace
