// Collectives over connected TCP sockets: the loop that sends, receives and adds at the same time.
//
// A plan is a list of legs, run one after the other. A leg sends a stream of extents of `values` to one peer while it
// receives another from one peer. The first `adding` bytes that come are added to `values`, the others replace it.
// The plans, and the same loop in Python, are in plan.py and fallback.py: keep all three alike.
//
// Note [Ahead]. While an operation only waits for bytes, the beginning of the next one is sent, as far as it depends on
// nothing that has not come: the wire is not idle between them, nor while a thread wakes up. The streams stay the same.

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "sums.h"

namespace {

struct Leg {
    int64_t to, from;           // descriptors
    int64_t head;               // bytes that may be sent before any has come; each that has come allows one more
    int64_t lag;                // not 0: a byte is added only where ours has been sent, since it is the same place
    int64_t adding;             // bytes
    int64_t sends, receives;    // numbers of the extents that follow: those sent, then those received
};

struct Extent {
    int64_t offset, size;       // bytes of `values`; no extent is empty
};

bool later() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// The operation that follows the one that runs, offered by another thread; a plan of 0 is none.
struct Next {
    int64_t plan, values;       // addresses
    int64_t sent;               // bytes, by whoever runs the one before
};

// Sends at most `most` bytes of the first leg of `next`, as far as that allows it. Errors show when it runs.
// Returns whether there is more.
bool send_ahead(Next& next, int64_t most) {
    const int64_t* plan = reinterpret_cast<const int64_t*>(__atomic_load_n(&next.plan, __ATOMIC_ACQUIRE));
    if (plan == nullptr) return false;
    const Leg& leg = *reinterpret_cast<const Leg*>(plan);
    // The head is the first extent, or nothing.
    const Extent& extent = *reinterpret_cast<const Extent*>(plan + sizeof(Leg) / sizeof(int64_t));
    if (next.sent >= leg.head) return false;
    const char* from = reinterpret_cast<const char*>(next.values) + extent.offset + next.sent;
    ssize_t sent = ::send(leg.to, from, std::min(leg.head - next.sent, most), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) next.sent += sent;
    return sent > 0 ? next.sent < leg.head : later();
}

// A place in a stream of extents.
struct Cursor {
    const Extent* extent;
    int64_t total = 0, passed = 0, within = 0;

    Cursor(const Extent* first, int64_t count) : extent(first) {
        for (int64_t i = 0; i < count; ++i) total += first[i].size;
    }
    int64_t place() const { return extent->offset + within; }
    int64_t rest() const { return passed < total ? extent->size - within : 0; }
    void pass(int64_t bytes) {
        passed += bytes;
        within += bytes;
        if (within == extent->size) ++extent, within = 0;
    }
};

class Run {
  public:
    Run(char* values, char* scratch, int64_t size, Kind kind, const Leg& leg, Next* next, int64_t* failed)
        : values_(values), scratch_(scratch), size_(size), kind_(kind), leg_(leg),
          out_(reinterpret_cast<const Extent*>(&leg + 1), leg.sends), in_(out_.extent + leg.sends, leg.receives),
          next_(next), failed_(failed) {}

    // What was sent before.
    void ahead(int64_t bytes) {
        if (bytes > 0) out_.pass(bytes);
    }

    // Returns false where a peer is lost, which `failed` then tells.
    bool all() {
        while (out_.passed < out_.total || in_.passed < in_.total) {
            bool moved = add(), readable = false;
            if (!send(moved) || !look(moved, readable)) return false;
            if (readable && !receive()) return false;
        }
        return true;
    }

  private:
    int64_t ready() const { return std::min({out_.total, leg_.head + in_.passed}) - out_.passed; }
    int64_t room() const {
        int64_t rest = in_.rest() - held_;
        return in_.passed < leg_.adding ? std::min(rest, size_ - held_) : rest;
    }

    bool send(bool& moved) {
        int64_t size = std::min({out_.rest(), ready(), size_});
        if (size <= 0) return true;
        ssize_t sent = ::send(leg_.to, values_ + out_.place(), size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) return later() || lost(leg_.to, errno);
        out_.pass(sent);
        return moved = true;
    }

    // Waits for a peer, unless something moved. Bytes are received only where they are seen first: recv would pass over
    // the mark of urgent data, which says whom a peer that failed has lost.
    bool look(bool moved, bool& readable) {
        bool sends = ready() > 0, owes = out_.passed < out_.total, receives = room() > 0;
        bool more = !owes && next_ && send_ahead(*next_, size_);
        pollfd fds[2] = {{receives ? int(leg_.from) : -1, POLLIN | POLLPRI, 0},
                         {owes ? int(leg_.to) : -1, short(sends ? POLLOUT : POLLRDHUP), 0}};
        if (more) fds[1] = {int(reinterpret_cast<const Leg*>(next_->plan)->to), POLLOUT, 0}, sends = true;
        if ((moved && !receives) || ::poll(fds, 2, moved ? 0 : -1) <= 0) return true;
        // Who hangs up before it has all from us has failed.
        if (fds[1].revents && !sends) return lost(leg_.to, 0);
        readable = fds[0].revents;
        return !(fds[0].revents & POLLPRI && ::sockatmark(leg_.from) == 1) || lost(leg_.from, 0);
    }

    bool receive() {
        bool adds = in_.passed < leg_.adding;
        ssize_t got = ::recv(leg_.from, adds ? scratch_ + held_ : values_ + in_.place(), room(), MSG_DONTWAIT);
        if (got < 0) return later() || lost(leg_.from, errno);
        if (got == 0) return lost(leg_.from, 0);
        adds ? void(held_ += got) : in_.pass(got);
        return true;
    }

    bool add() {
        int64_t bytes = leg_.lag ? std::min(held_, out_.passed - in_.passed) : held_;
        bytes -= bytes % kind_.item;
        if (bytes <= 0) return false;
        kind_.add(values_ + in_.place(), scratch_, bytes / kind_.item);
        std::memmove(scratch_, scratch_ + bytes, held_ -= bytes);
        in_.pass(bytes);
        return true;
    }

    bool lost(int64_t descriptor, int error) {
        failed_[0] = descriptor;
        failed_[1] = error;
        return false;
    }

    char *values_, *scratch_;
    int64_t size_;              // of the scratch, which also limits what is sent at once
    Kind kind_;
    const Leg& leg_;
    Cursor out_, in_;
    int64_t held_ = 0;          // bytes in the scratch, received and not yet added
    Next* next_;                // in the last leg
    int64_t* failed_;
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Runs the plan, of whose first leg `ahead` bytes were sent; `next` may be offered meanwhile. Returns 0 if it is done,
// 1 if a peer is lost: `failed` is then its descriptor, and errno or 0 for a hang-up.
EXPORTED int foretrain_run_plan(char* values, char* scratch, int64_t size, int64_t kind, const int64_t* plan,
                                int64_t legs, int64_t ahead, Next* next, int64_t* failed) {
    for (; legs > 0; --legs) {
        const Leg& leg = *reinterpret_cast<const Leg*>(plan);
        Run run(values, scratch, size, kinds[kind], leg, legs == 1 ? next : nullptr, failed);
        run.ahead(ahead);
        if (!run.all()) return 1;
        ahead = 0;
        plan += sizeof(Leg) / sizeof(int64_t) + 2 * (leg.sends + leg.receives);
    }
    return 0;
}

// Offers what follows the operation that runs in another thread.
EXPORTED void foretrain_offer(Next* next, const int64_t* plan, const char* values) {
    next->values = reinterpret_cast<int64_t>(values);
    next->sent = 0;
    __atomic_store_n(&next->plan, reinterpret_cast<int64_t>(plan), __ATOMIC_RELEASE);
}

// Sends at most `most` bytes of the beginning of `next` while nothing runs.
EXPORTED void foretrain_send_ahead(Next* next, int64_t most) { send_ahead(*next, most); }
