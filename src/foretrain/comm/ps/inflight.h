// Bytes of one worker in flight to and from servers; `foretrain.comm.ps.client.inflight` says what each call does.
//
// Wires take servers' answers: acknowledgements, and where they know the places of sums those, too. They tell their owner
// which chunks servers have and which tasks have landed.

#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

class InFlight {
  public:
    struct Span {
        int64_t start, end, chunk;
    };
    struct Part {
        int64_t task, offset, size, shard;
    };

    explicit InFlight(std::vector<int64_t> sizes)
        : sizes_(sizes), left_(sizes), unacknowledged_(sizes.size()), pushed_(sizes.size()), pulled_(sizes.size()) {}

    // Notes that a chunk pushes, or pulls, these bytes.
    void add(int64_t chunk, int64_t task, int64_t start, int64_t end, bool pull) {
        chunks_[chunk] += end - start;
        if (pull) return pulled_[task].push_back({start, end, chunk});
        unacknowledged_[task].push_back({start, end, chunk});
        pushed_[task].push_back({start, end, chunk});
    }

    // Notes that a server has these bytes; appends the chunks whose bytes servers now have completely.
    void acknowledge(int64_t task, int64_t start, int64_t end, std::vector<int64_t>& finished) {
        finish(split(unacknowledged_[task], start, end), finished);
    }

    // Notes that the sum of these bytes has arrived; returns what is new, and whether the task has landed.
    std::pair<std::vector<Span>, bool> arrive(int64_t task, int64_t start, int64_t end, std::vector<int64_t>& finished) {
        std::vector<Span> fresh = split(pushed_[task], start, end);
        for (const Span& each : fresh) left_[task] -= each.end - each.start;
        bool landed = !fresh.empty() && !left_[task];
        if (landed) left_[task] = sizes_[task];
        finish(split(pulled_[task], start, end), finished);
        return {fresh, landed};
    }

    // Calls `each(part, low, high)` with the parts that hold bytes [start, end) of a task.
    template <typename Each>
    void parts_of(int64_t task, int64_t start, int64_t end, Each each) const {
        auto before = [&](const Part& part, int64_t) {
            return part.task < task || (part.task == task && part.offset + part.size <= start);
        };
        auto part = std::lower_bound(parts.begin(), parts.end(), start, before);
        for (; part != parts.end() && part->task == task && part->offset < end; ++part)
            each(part - parts.begin(), std::max(start, part->offset), std::min(end, part->offset + part->size));
    }

    // Everything that was pushed, or pulled, and has not returned, by task.
    const std::vector<std::vector<Span>>& out(bool pulled) const { return pulled ? pulled_ : pushed_; }

    std::mutex mutex;                       // of whoever calls
    std::vector<int64_t> finished;          // chunks, for the caller in Python
    std::vector<Span> fresh;                // ranges, for the same
    // For wires.
    std::vector<Part> parts;                // by number, which follows task and offset
    std::vector<char*> places;              // of sums, by task; none where the owner stores them
    std::vector<bool> absent;               // by task: no worker had a gradient for some of it
    int64_t step = -1;
    bool together = false;                  // a wire has taken a sum of this round
    int64_t moved = 0;                      // ns, monotonic clock: when a wire took an answer

  private:
    // Removes [start, end) from spans, and returns what was removed.
    static std::vector<Span> split(std::vector<Span>& spans, int64_t start, int64_t end) {
        std::vector<Span> inside;
        size_t kept = 0, count = spans.size();
        for (size_t k = 0; k < count; ++k) {
            Span span = spans[k];
            int64_t low = std::max(start, span.start), high = std::min(end, span.end);
            if (low >= high) {
                spans[kept++] = span;
                continue;
            }
            inside.push_back({low, high, span.chunk});
            bool before = span.start < low, behind = high < span.end;
            if (before) spans[kept++] = {span.start, low, span.chunk};
            if (behind && !before) spans[kept++] = {high, span.end, span.chunk};
            if (behind && before) spans.push_back({high, span.end, span.chunk});
        }
        spans.erase(spans.begin() + kept, spans.begin() + count);
        return inside;
    }

    void finish(const std::vector<Span>& spans, std::vector<int64_t>& finished) {
        for (const Span& each : spans) {
            int64_t& left = chunks_[each.chunk];
            left -= each.end - each.start;
            if (left) continue;
            chunks_.erase(each.chunk);
            finished.push_back(each.chunk);
        }
    }

    std::vector<int64_t> sizes_, left_;
    std::vector<std::vector<Span>> unacknowledged_, pushed_, pulled_;
    std::unordered_map<int64_t, int64_t> chunks_;   // bytes that each waits for
};

}  // namespace
