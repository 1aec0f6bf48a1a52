// Engine of the bounded transport (DLCP, arXiv 2008.08445): moves arrays between ranks over UDP until enough has come.
//
//     operation    stages, one after the other: arrays to send, arrays to receive, and sums when all of these are there
//     send         an array on its way to one rank: which packets have to go yet; over when the receiver says STOP
//     receive      an array that comes: one bit per packet; done when enough bytes, and all that are vital, have come
//     peer         another rank: its address, what is under way to it, its congestion control, its connection over TCP
//
// A packet is placed where it says, so that their order is free. The rate, the timer of a probe and how both change are
// functions of foretrain.network.packet.transports: the simulated transport's own, compiled (see congestion.py).
//
// Note [Opened]. A rank can place packets only of operations that it has begun. How many it has, all its packets say. Of
// the next ones it keeps some: a peer that is ahead need not wait for an answer until it sends. Who waits for more asks
// with a probe, whose answer says it.
//
// Note [Asking]. A receiver that has enough says STOP before it acknowledges. So an acknowledgement of the last packet of
// an array without STOP says that something is missing: it is asked for at once, and not when a timer ends.
//
// Note [Signals]. All signals go over UDP, with tags, and any may be lost: the next probe repeats the question. On a
// network that loses packets a signal over TCP waits for a retransmission, 200 ms on Linux where nothing follows it. The
// connection takes over where a peer answers nothing over UDP for `blocked`; it says who has ended, and BYE.
//
// Note [Budget]. What an array does not lose of its tolerance, later ones from the same rank may: the bytes lost never
// exceed the tolerance of all that has been received, nor an eighth of an array's packets or its own share. A small
// array's own share is less than a packet, so that nothing of it could ever be lost.
//
// Note [Grace]. Where enough has come, the rest is often about to: it is waited for, for a quarter longer than it takes at
// the rate so far, so that little is lost where the network loses nothing: what a busy host is later with. The papers stop
// at once. Where packets are lost, the sender asks as soon as all has gone, and what is missing then is not waited for.
//
// Note [Endings]. Of arrays that may lose some, other rules than these two notes' may say when they are over: from what
// the same array has taken before, see early_close.py and optireduce.py. Their deadlines are limits of time, which no
// tolerance holds back; but what is vital arrives. Time counts from an array's first packet: a rank that computes longer
// loses nothing for that.
//
// Note [Delay]. Most switches mark nothing. A packet counts as marked, too, whose acknowledgement took a millisecond longer
// than the fastest: a queue is as long as that, and what is urgent would wait behind it. But not while no more is under
// way than at the beginning: then the queue is of others, who would take all.
//
// Note [Direct sums]. Where a stage adds one array to the values and nothing else, each packet is added as it comes,
// while it is in a core's cache, and not placed first. Of such a stage no other array waits, so that the order of
// additions is the plan's. What has come before the stage begins was placed, and is added then, unless that is much.
//
// Note [Over TCP]. A peer that takes no packets over UDP for `blocked`, though it is sent some, is served over TCP: it may
// be that it answers nothing, or that only small packets arrive. Both sides then try a full packet over UDP every second,
// from a second on, and from twice as long on whenever it happens again. A try that comes is answered by another, which
// says so, and who hears that goes back to UDP. What a peer sends over TCP is waited for as a whole.
//
// Note [Pulls]. A server that updates parameters sends these back in place of sums, from an array of their own, and ranks
// have one for what comes. A packet that is lost there is not zeroed: what was there before stays, and is vital in the
// next pull of the same array, so that nothing is lost twice in a row. Between the sum and what is sent, the server's
// operation is held until Python has updated; others go on meanwhile.
//
// Note [Own thread]. The engine answers peers in a thread that never takes Python's lock, which a training thread may
// hold for milliseconds: TCP would answer them in the kernel.

#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "../collectives/sums.h"
#include "wire.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace {

const int64_t MOST_SEGMENTS = 64, DATAGRAM = 65000;     // of one call, of the kernel
const int64_t MOST_PAYLOAD = 8192;                        // engine.py's _LARGEST
const int64_t BATCH = 4, BUFFER = 1 << 16;             // messages and bytes of one recvmmsg
const int64_t SLICE = 256 << 10;                        // bytes that are summed before packets are looked at again
const int64_t QUEUED = 1 << 20;                         // bytes that wait for a peer's connection
const int64_t LONGEST_WAIT = 50'000'000;                // ns between two questions to a peer that computes
const int64_t GRACE = 16, LEAST_GRACE = 100'000;          // least share of an array's time, and ns; see Note [Grace]
const int64_t CARRY = 16, MOST_LOST = 8;                // arrays whose budget is kept; share of an array's packets
const int64_t AHEAD = 4, AHEAD_PACKETS = 64;            // operations, and packets of an array; see Note [Opened]
const int64_t QUEUEING = 1'000'000;                     // ns; see Note [Delay]
const int64_t UNANSWERED = 8;                           // packets that are acknowledged though nobody waits for that
const int64_t KEPT = 16 << 20;                          // bytes of packets that wait for their operation
const int64_t HISTORY = 32;                             // numbers that an ending keeps of an array
const int64_t NEVER = int64_t(1) << 62;                 // ns
const int64_t LAST = 100;                               // of this many packets of an array, the last one says that all went
const int64_t QUIET = 1'000'000'000;                    // ns without a word until a rank that waits asks
const int64_t MOST_PATIENCE = 64 * QUIET, SETTLING = 5 * QUIET; // see Note [Over TCP]; ns in which both sides go back

// The order is that of engine.py.
enum Counter {
    SENT, SENT_BYTES, SENT_AGAIN, RECEIVED, RECEIVED_BYTES, DUPLICATE, LATE, EARLY, MARKED, MALFORMED, STRANGER, FORGED,
    REPLAYED, PROBES, MAPS, OVER_TCP, OVER_UDP_AGAIN, LOST_BYTES, COUNTERS
};

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// Asks for all of a packet's memory before any of it is used: where that is in no cache of the core's own, it comes half
// as fast again, or twice as fast.
template <bool writing> void prefetch(const char* data, int64_t size) {
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(data + at, writing);
}

// Of a number that goes round.
bool before(uint32_t one, uint32_t other) { return int32_t(one - other) < 0; }

class Bits {
  public:
    void reset(int64_t count, bool value) {
        count_ = count;
        words_.assign((count + 63) / 64, value ? ~uint64_t(0) : 0);
        if (value && count % 64) words_.back() = (uint64_t(1) << count % 64) - 1;
    }
    bool get(int64_t i) const { return words_[i >> 6] >> (i & 63) & 1; }
    void set(int64_t i) { words_[i >> 6] |= uint64_t(1) << (i & 63); }
    void clear(int64_t i) { words_[i >> 6] &= ~(uint64_t(1) << (i & 63)); }
    // The first one of `value` from `i` on, or the count.
    int64_t next(int64_t i, bool value) const {
        while (i < count_) {
            uint64_t word = (value ? words_[i >> 6] : ~words_[i >> 6]) >> (i & 63);
            if (word) return std::min(count_, i + __builtin_ctzll(word));
            i = (i | 63) + 1;
        }
        return count_;
    }
    int64_t total() const {
        int64_t sum = 0;
        for (uint64_t word : words_) sum += __builtin_popcountll(word);
        return sum;
    }

  private:
    int64_t count_ = 0;
    std::vector<uint64_t> words_;
};

// Congestion control and timers: see congestion.py. Times are in ps there.
struct Law {
    int64_t (*room)(int64_t*, double*);
    void (*sent)(int64_t*, double*, int64_t packets);
    void (*heard)(int64_t*, double*, int64_t number, int64_t count, int64_t marked, int64_t trip);
    void (*lost)(int64_t*, double*);
    void (*settled)(int64_t*, double*);     // nothing is under way
    int64_t (*probe_after)(int64_t*, double*, int64_t tries);
    int64_t (*silence)(int64_t*, double*);  // until all counts as lost
    int64_t (*interval)(int64_t*, double*, int64_t bytes);
};

// Rule by which an array is over that may lose some; see Note [Endings]. Times are in ns since its first packet.
struct Ending {
    int64_t (*over)(int64_t* history, int64_t enough, int64_t last);  // with what has come; last: since all went, or -1
    void (*note)(int64_t* history, int64_t took, int64_t got, int64_t size);
    int64_t repeats;                    // whether what is missing goes again before that, and not only before NEVER
};

// ── What Python hands over ──

struct Settings {
    int64_t rank, ranks, job;
    int64_t payload;                // bytes of a packet's data, divisible by 16
    int64_t segments;               // packets in one call
    int64_t socket, wake;           // descriptors: of UDP, and an eventfd
    int64_t first_window;           // packets
    int64_t blocked, timeout;       // ns without an answer until a peer is served over TCP, and until it is lost
    int64_t ipv6;
};

// Numbers of an encoded operation; see plans.py.
struct PlanHeader {
    int64_t stages, kind, size, scratch, slot, traffic_class;
    int64_t small;  // thousandths of an array's packets that switches may drop, as their values are small; 0: all may
    int64_t waits, rescales;
    int64_t update_stage;  // the stage that begins only when Python has updated, or -1; see Note [Pulls]
};
struct StageHeader {
    int64_t sends, receives, sums;
};
struct SendNumbers {
    int64_t to, offset, size, reliable, pulled;  // pulled: from the array of what is pulled, and not from the values
};
struct ReceiveNumbers {
    int64_t from, scratch, target, place, size, need, pulled;  // target: in one of three memories; place: in the values
};
struct SumNumbers {
    int64_t into_scratch, into, from_scratch, from, size;
};

// ── State ──

struct Operation;

struct Send {
    Operation* operation;
    int64_t to, stage, packets, left, cursor, tries = 0, due = 0;
    const char* data;
    int64_t offset, size;
    uint32_t asked = 0, last = 0;           // stamp of the last probe; number of the packet that went last
    bool went = false;                      // all of it, once
    bool begun = false, answered = false;   // since the last MAP
    int64_t since_map = 0;                  // packets that have gone since then
    bool over = false;                      // all that went has been acknowledged, or has been asked for
    Bits pending, important;
};

struct Receive {
    int64_t from, stage, packets, size, need, place, got = 0, vital_missing = 0;
    int64_t* history = nullptr;     // of its ending; null where that is the share that has come
    char* target;
    const SumNumbers* direct = nullptr;     // what its packets are added by as they come; see Note [Direct sums]
    bool done = false, touched = false, pulled = false;
    int64_t first = 0, last = 0;    // ns: when the first packet, and the first of the last, had come
    int64_t until = 0;              // ns: until when the rest is waited for, once there is enough; see Note [Grace]
    Bits came, vital;

    void wait_for_rest(int64_t now) {
        int64_t took = now - first;
        double rest = double(took) * double(size - got) / double(std::max<int64_t>(got, 1));
        until = now + std::max({int64_t(1.25 * rest), took / GRACE, LEAST_GRACE});
    }
};

struct Operation {
    uint32_t number;
    std::vector<int64_t> plan;      // a copy: PlanHeader, then the stages
    std::vector<const int64_t*> stages;
    std::vector<int64_t> vital, important;  // pairs: first such byte and the one behind the last, ascending
    char *values, *pulled;          // pulled: null where nothing is
    std::unique_ptr<char[]> scratch;
    std::vector<Receive> receives;
    std::vector<int> receive_of;    // by stage and rank; -1 for none
    std::deque<Send> sends;
    int64_t stage = 0, waiting = 0, open_sends = 0, sum = 0, summed = 0;
    bool held = false;              // before its update stage
    std::vector<int64_t> lost;      // place, size, source of each gap

    const PlanHeader& header() const { return *reinterpret_cast<const PlanHeader*>(plan.data()); }
    bool done() const { return stage == header().stages && open_sends == 0; }
};

struct Early {
    uint32_t operation;
    std::vector<char> packet;
};

struct Peer {
    sockaddr_storage address{};
    socklen_t address_size = 0;
    int link = -1;                  // a connection over TCP
    Keys sending, receiving;
    int64_t* control = nullptr;     // of the law
    std::deque<Send*> sends;        // in the order of their operations
    uint64_t next_data = 0, next_signal = 0, answered = 0;  // numbers; answered: behind the last that was acknowledged
    Seen data, signals;             // of what came
    uint32_t opened = 0, acked = 0, acked_marked = 0;
    uint32_t came = 0, came_marked = 0, highest = 0, stamp = 0;
    int64_t unanswered = 0;         // packets since the last acknowledgement
    bool owes_ack = false, over_tcp = false, ended = false;
    int64_t heard = 0, asked = 0;   // ns; asked: since when there is no answer, 0 if there is
    int64_t quiet_since = 0, next_send = 0, pinged = 0;
    int64_t no_batch_until = 0;     // ns: packets go to the kernel one by one, as it has refused a batch
    int64_t unheard = 0;            // ns: since when it is sent data of which none comes, 0 if some does
    int64_t next_try = 0, patience = QUIET, returned = 0;   // ns; see Note [Over TCP]
    uint32_t tries = 0;             // of its own that came, since it is served over TCP
    bool waited_for = false;        // something is still to come from it
    int64_t least_trip = INT64_MAX; // µs
    int64_t budget = 0;             // bytes of its arrays that may be lost; see Note [Budget]
    std::vector<char> out, in;      // bytes of the connection
    size_t out_at = 0;
};

class Engine {
  public:
    Engine(const Settings& settings, const Law& law, const Ending& ending, const uint8_t* service, int64_t* counters,
           int64_t* over_tcp)
        : set_(settings), law_(law), ending_(ending), counters_(counters), over_tcp_(over_tcp), peers_(settings.ranks),
          buffers_(BATCH * BUFFER) {
        std::memcpy(service_, service, sizeof service_);
    }

    void peer(int64_t rank, const void* address, int64_t size, int64_t link, const uint32_t* sending,
              const uint32_t* receiving, int64_t* control) {
        Peer& peer = peers_[rank];
        std::memcpy(&peer.address, address, size);
        peer.address_size = size;
        peer.link = int(link);
        peer.sending = keys_of(sending);
        peer.receiving = keys_of(receiving);
        peer.control = control;
        peer.heard = now_ns();
    }

    void start() { thread_ = std::thread(&Engine::work, this); }

    void submit(const int64_t* plan, int64_t numbers, char* values, char* pulled, const int64_t* vital, int64_t vitals,
                const int64_t* important, int64_t importants) {
        auto made = std::make_unique<Operation>();
        made->plan.assign(plan, plan + numbers);
        made->vital.assign(vital, vital + 2 * vitals);
        made->important.assign(important, important + 2 * importants);
        made->values = values;
        made->pulled = pulled;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            submitted_.push_back(std::move(made));
        }
        wake();
    }

    // Waits for the next operation to be done; returns the numbers of its gaps, -1 when closed, -2 when a rank is lost:
    // `failed` is then its number, and errno, 0 where it hung up, or -1 where another rank says so. -3: some peer is
    // served over TCP from now on, or no more.
    int64_t next(int64_t* failed, const int64_t** gaps) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !finished_.empty() || paths_changed_ || ended_; });
        if (std::exchange(paths_changed_, false)) return -3;
        if (finished_.empty()) {
            failed[0] = failed_;
            failed[1] = failed_why_;
            return failed_ < 0 ? -1 : -2;
        }
        losses_ = std::move(finished_.front());
        finished_.pop_front();
        *gaps = losses_.data();
        return int64_t(losses_.size());
    }

    // Waits until an operation is held before its update stage; returns its number, or -1 when no more will be.
    int64_t next_held() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !held_.empty() || ended_; });
        if (held_.empty()) return -1;
        int64_t number = held_.front();
        held_.pop_front();
        return number;
    }

    // Lets an operation go on that is held.
    void resume(uint32_t number) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            resumed_.push_back(number);
        }
        wake();
    }

    // Ends the thread. From any other thread, any number of times.
    void close() {
        std::lock_guard<std::mutex> lock(closing_lock_);
        __atomic_store_n(&closing_, true, __ATOMIC_RELEASE);
        wake();
        if (thread_.joinable()) thread_.join();
    }

    // Says over TCP that this rank has ended, or which rank it has lost. Nothing runs meanwhile.
    void say_goodbye(int64_t lost) {
        for (int64_t rank = 0; rank < set_.ranks; ++rank) {
            Peer& peer = peers_[rank];
            if (peer.link < 0 || peer.ended) continue;
            Header header = header_of(lost < 0 ? BYE : GONE, 0, 0);
            header.operation = first_;
            header.index = uint32_t(std::max<int64_t>(lost, 0));
            seal(peer, header, nullptr, peer.next_signal++);
            queue_frame(peer, header, nullptr);
            write_link(peer);
        }
    }

    // Processes packets, one behind the other, as if they had come over UDP; for tests.
    void inject(const char* packets, const int64_t* sizes, int64_t count) {
        for (int64_t k = 0; k < count; packets += sizes[k++]) accept(packets, sizes[k], false);
    }

    // Makes a packet one with this number, for tests.
    void seal(int64_t rank, char* packet, uint64_t number) {
        seal(peers_[rank], *reinterpret_cast<Header*>(packet), packet + sizeof(Header), number);
    }

  private:
    void work() {
        while (!__atomic_load_n(&closing_, __ATOMIC_ACQUIRE) && failed_ < 0) {
            now_ = now_ns();
            next_look_ = now_ + QUIET;
            bool moved = begin_submitted();
            moved |= resume_held();
            moved |= receive_all();
            moved |= read_links();
            moved |= advance();
            acknowledge();
            while (!active_.empty() && active_.front()->done()) finish();
            check_timers();
            moved |= send_all();
            write_links();
            if (!moved && failed_ < 0) wait();
        }
        std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
        changed_.notify_all();
    }

    void wake() const {
        uint64_t one = 1;
        if (::write(int(set_.wake), &one, sizeof one) < 0) return;  // it is full: the thread wakes anyway
    }

    Keys keys_of(const uint32_t* words) const {
        Keys keys;
        std::memcpy(keys.sip, words, sizeof keys.sip);
        keys.words = words + 4;
        return keys;
    }

    void lose(int64_t rank, int why) {
        if (failed_ < 0) failed_ = rank, failed_why_ = why;
    }

    void finish() {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.push_back(std::move(active_.front()->lost));
        active_.pop_front();
        ++first_;
        changed_.notify_all();
    }

    Operation* find(uint32_t number) {
        uint32_t place = number - first_;
        return place < active_.size() ? active_[place].get() : nullptr;
    }

    // ── Operations ──

    bool begin_submitted() {
        bool any = false;
        while (true) {
            std::unique_ptr<Operation> next;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                if (submitted_.empty()) return any;
                // It shares memory with one that runs.
                if (submitted_.front()->header().waits && !active_.empty()) return any;
                next = std::move(submitted_.front());
                submitted_.pop_front();
            }
            next->number = first_ + uint32_t(active_.size());
            active_.push_back(std::move(next));
            begin(*active_.back());
            any = true;
        }
    }

    bool resume_held() {
        std::vector<uint32_t> numbers;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            numbers.swap(resumed_);
        }
        for (uint32_t number : numbers) {
            Operation* op = find(number);
            if (!op) continue;
            op->held = false;
            ++op->stage;
            start_stage(*op);
        }
        return !numbers.empty();
    }

    void hold(Operation& op) {
        op.held = true;
        std::lock_guard<std::mutex> lock(mutex_);
        held_.push_back(op.number);
        changed_.notify_all();
    }

    void begin(Operation& op) {
        const PlanHeader& header = op.header();
        const int64_t* at = op.plan.data() + sizeof(PlanHeader) / 8;
        op.scratch.reset(new char[header.scratch]);  // not zeroed: what is lost is, when it is
        op.receive_of.assign(header.stages * set_.ranks, -1);
        for (int64_t stage = 0; stage < header.stages; ++stage) {
            op.stages.push_back(at);
            const StageHeader& counts = *reinterpret_cast<const StageHeader*>(at);
            const auto* sends = reinterpret_cast<const SendNumbers*>(&counts + 1);
            const auto* receives = reinterpret_cast<const ReceiveNumbers*>(sends + counts.sends);
            for (int64_t k = 0; k < counts.receives; ++k) expect(op, stage, receives[k]);
            at = reinterpret_cast<const int64_t*>(reinterpret_cast<const SumNumbers*>(receives + counts.receives) +
                                                  counts.sums);
        }
        opened_ = op.number + 1;
        start_stage(op);
        place_early(op);
        for (Receive& receive : op.receives) peers_[receive.from].owes_ack = true;  // it says what is opened
    }

    void expect(Operation& op, int64_t stage, const ReceiveNumbers& numbers) {
        op.receive_of[stage * set_.ranks + numbers.from] = int(op.receives.size());
        op.receives.emplace_back();
        Receive& made = op.receives.back();
        made.from = numbers.from, made.stage = stage, made.size = numbers.size, made.need = numbers.need;
        made.place = numbers.place, made.pulled = numbers.pulled != 0;
        made.target = (made.pulled ? op.pulled : numbers.scratch ? op.scratch.get() : op.values) + numbers.target;
        made.packets = (numbers.size + set_.payload - 1) / set_.payload;
        made.came.reset(made.packets, false);
        if (made.need >= made.size) return;
        if (ending_.over) {
            std::vector<int64_t>& history = histories_[place_of(op, made)];
            history.resize(HISTORY);
            made.history = history.data();
        }
        int64_t& budget = peers_[made.from].budget, share = made.size - made.need;
        budget = std::max(budget, std::min(budget + share, CARRY * share));
        made.vital.reset(made.packets, false);
        mark(op.vital, numbers.place, numbers.size, made.vital);
        if (made.pulled)
            for (int64_t i : lost_pulls_[place_of(op, made)]) made.vital.set(i);
        made.vital_missing = made.vital.total();
    }

    // Key of an array that comes in every step.
    static std::array<int64_t, 4> place_of(const Operation& op, const Receive& receive) {
        return {op.header().slot, receive.stage, receive.from, receive.size};
    }

    // Sets the bits of packets that have some of these extents, of an array of `size` bytes at `place` of the values.
    void mark(const std::vector<int64_t>& extents, int64_t place, int64_t size, Bits& packets) const {
        for (size_t k = 0; k < extents.size(); k += 2) {
            int64_t from = std::max(extents[k] - place, int64_t(0)), to = std::min(extents[k + 1] - place, size);
            for (int64_t i = from / set_.payload; from < to && i <= (to - 1) / set_.payload; ++i) packets.set(i);
        }
    }

    void start_stage(Operation& op) {
        op.waiting = op.sum = op.summed = 0;
        if (op.stage == op.header().stages) return;
        const StageHeader& counts = *reinterpret_cast<const StageHeader*>(op.stages[op.stage]);
        const auto* sends = reinterpret_cast<const SendNumbers*>(&counts + 1);
        for (int64_t k = 0; k < counts.sends; ++k) start_send(op, sends[k]);
        const auto* receives = reinterpret_cast<const ReceiveNumbers*>(sends + counts.sends);
        for (Receive& receive : op.receives) {
            if (receive.stage != op.stage) continue;
            op.waiting += !receive.done;
            if (counts.receives == 1 && counts.sums == 1)
                add_directly(op, receive, *reinterpret_cast<const SumNumbers*>(receives + 1));
        }
    }

    // Adds what has come of the only array of a stage, and from now on each of its packets; not where that is too much.
    void add_directly(Operation& op, Receive& receive, const SumNumbers& sum) {
        if (sum.into_scratch || sum.size != receive.size || receive.got > SLICE) return;
        receive.direct = &sum;
        op.sum = 1;
        for (int64_t i = receive.came.next(0, true); i < receive.packets; i = receive.came.next(i + 1, true)) {
            int64_t from = i * set_.payload;
            add(op, sum, from, receive.target + from, std::min(set_.payload, receive.size - from));
        }
    }

    static void add(Operation& op, const SumNumbers& sum, int64_t from, const char* data, int64_t size) {
        const ::Kind& kind = kinds[op.header().kind];
        alignas(8) char aligned[MOST_PAYLOAD];
        if (reinterpret_cast<uintptr_t>(data) % kind.item)  // behind a packet of odd bytes, over TCP
            data = static_cast<const char*>(std::memcpy(aligned, data, size));
        kind.add(op.values + sum.into + from, data, size / kind.item);
    }

    void start_send(Operation& op, const SendNumbers& numbers) {
        op.sends.emplace_back();
        Send& made = op.sends.back();
        made.operation = &op;
        made.to = numbers.to, made.stage = op.stage, made.offset = numbers.offset, made.size = numbers.size;
        made.data = (numbers.pulled ? op.pulled : op.values) + numbers.offset;
        made.packets = made.left = (numbers.size + set_.payload - 1) / set_.payload;
        made.pending.reset(made.packets, true);
        made.cursor = first_packet(op, op.stage, made.packets);
        tag(op, made, numbers.reliable != 0);
        made.due = now_ + first_question(peers_[made.to]);
        ++op.open_sends;
        // Operations end in order: the sum of an earlier one goes before the contributions to later ones.
        std::deque<Send*>& sends = peers_[made.to].sends;
        auto is_later = [&](Send* each) { return before(op.number, each->operation->number); };
        auto later = std::find_if(sends.begin(), sends.end(), is_later);
        sends.insert(later, &made);
    }

    // What is not waited for is what goes last: another part of the array each time.
    static int64_t first_packet(const Operation& op, int64_t stage, int64_t packets) {
        return int64_t((op.number * 2654435761u + uint32_t(stage) * 40503u) % uint64_t(packets));
    }

    // Decides which packets are important.
    void tag(Operation& op, Send& send, bool reliable) {
        const PlanHeader& header = op.header();
        bool compares = header.small && header.kind <= 3;  // of integers all are important
        send.important.reset(send.packets, reliable || (header.small && !compares));
        mark(op.vital, send.offset, send.size, send.important);
        mark(op.important, send.offset, send.size, send.important);
        if (compares && !reliable) tag_by_magnitude(header, send);
    }

    // Takes for important, of the packets that are not, those whose mean magnitude is a quantile of the last time or more.
    void tag_by_magnitude(const PlanHeader& header, Send& send) {
        int64_t key = ((int64_t(header.slot) << 16) + send.stage) * set_.ranks + send.to;
        auto known = thresholds_.find(key);
        std::vector<float> means;
        for (int64_t i = send.important.next(0, false); i < send.packets; i = send.important.next(i + 1, false)) {
            int64_t size = std::min(set_.payload, send.size - i * set_.payload);
            means.push_back(magnitude(header.kind, send.data + i * set_.payload, size));
            if (known == thresholds_.end() || means.back() >= known->second) send.important.set(i);
        }
        if (means.empty()) return;
        auto place = means.begin() + int64_t(means.size()) * header.small / 1000;
        std::nth_element(means.begin(), place, means.end());
        thresholds_[key] = *place;
    }

    static float magnitude(int64_t kind, const char* data, int64_t size) {
        int64_t count = size / kinds[kind].item;
        double sum = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (kind == 0) sum += std::fabs(reinterpret_cast<const float*>(data)[i]);
            if (kind == 1) sum += std::fabs(reinterpret_cast<const double*>(data)[i]);
            if (kind == 2) sum += std::fabs(Half::widen(reinterpret_cast<const uint16_t*>(data)[i]));
            if (kind == 3) sum += std::fabs(Brain::widen(reinterpret_cast<const uint16_t*>(data)[i]));
        }
        return count ? float(sum / double(count)) : 0.0f;
    }

    // Bytes that an array has to have yet until it is enough, without what is vital. Over TCP nothing is lost.
    int64_t needed(const Receive& receive) const {
        int64_t missing = receive.size - receive.got;
        if (receive.need >= receive.size || peers_[receive.from].over_tcp) return missing;
        int64_t most = std::max(receive.packets / MOST_LOST * set_.payload, receive.size - receive.need);
        return std::max<int64_t>(missing - std::min(peers_[receive.from].budget, most), 0);
    }

    // Completes receives that have enough, and goes on to sums and to the next stages.
    bool advance() {
        bool moved = false;
        for (size_t k = 0; k < active_.size(); ++k) {
            Operation& op = *active_[k];
            for (Receive& receive : op.receives)
                if (receive.touched) complete(op, receive);
            while (op.stage < op.header().stages && op.waiting == 0 && !op.held) {
                if (sum_slice(op)) {
                    moved = true;
                    break;  // the rest after the next look at the socket
                }
                if (op.header().rescales) rescale(op);
                moved = true;
                if (op.stage + 1 == op.header().update_stage) {
                    hold(op);
                    break;
                }
                ++op.stage;
                start_stage(op);
            }
        }
        return moved;
    }

    void complete(Operation& op, Receive& receive) {
        receive.touched = false;
        bool must_wait = !receive.history || peers_[receive.from].over_tcp;
        if (receive.done || receive.vital_missing || (must_wait && needed(receive))) return;
        if (!receive.until) receive.wait_for_rest(now_);
        int64_t until = receive.history ? over_at(receive) : receive.until;
        if (receive.got < receive.size && now_ < until) {
            receive.touched = true;  // looked at again
            next_look_ = std::min(next_look_, until);
            return;
        }
        receive.done = true;
        if (receive.history)
            ending_.note(receive.history, now_ - receive.first, receive.got, receive.size);
        else
            peers_[receive.from].budget -= receive.size - receive.got;
        if (receive.stage == op.stage) --op.waiting;
        std::vector<int64_t> none, &lost = receive.pulled ? lost_pulls_[place_of(op, receive)] : none;
        lost.clear();
        for (int64_t i = receive.came.next(0, false); i < receive.packets; i = receive.came.next(i, false)) {
            int64_t end = receive.came.next(i, true);
            for (int64_t packet = i; packet < end; ++packet) lost.push_back(packet);
            int64_t from = i * set_.payload, size = std::min(end * set_.payload, receive.size) - from;
            if (!receive.direct && !receive.pulled) std::memset(receive.target + from, 0, size);
            op.lost.insert(op.lost.end(), {receive.place + from, size, receive.from});
            counters_[LOST_BYTES] += size;
            i = end;
        }
        say_stop(peers_[receive.from], op, receive);
    }

    int64_t over_at(const Receive& receive) const {
        int64_t last = receive.last ? receive.last - receive.first : -1;
        return receive.first + ending_.over(receive.history, receive.got >= receive.need, last);
    }

    // Says that an array needs nothing more, and which of its packets were lost, of as many as one packet has bits for.
    void say_stop(Peer& peer, const Operation& op, const Receive& receive) {
        Header header = header_of(STOP, op.number, receive.stage);
        std::vector<char> bits;
        if (receive.got < receive.size) {
            int64_t told = std::min(receive.packets, 8 * set_.payload);
            bits.resize((told + 7) / 8);
            for (int64_t i = receive.came.next(0, false); i < told; i = receive.came.next(i + 1, false))
                bits[i / 8] |= char(1 << i % 8);
        }
        header.length = uint16_t(bits.size());
        send_one(peer, header, bits.data());
    }

    // Adds a part of what the stage adds; returns whether there is more.
    bool sum_slice(Operation& op) {
        const StageHeader& counts = *reinterpret_cast<const StageHeader*>(op.stages[op.stage]);
        const auto* sends = reinterpret_cast<const SendNumbers*>(&counts + 1);
        const auto* receives = reinterpret_cast<const ReceiveNumbers*>(sends + counts.sends);
        const auto* sums = reinterpret_cast<const SumNumbers*>(receives + counts.receives);
        const ::Kind& kind = kinds[op.header().kind];
        for (int64_t budget = SLICE; op.sum < counts.sums;) {
            if (budget <= 0) return true;
            const SumNumbers& sum = sums[op.sum];
            int64_t size = std::min(sum.size - op.summed, SLICE);
            char* into = (sum.into_scratch ? op.scratch.get() : op.values) + sum.into + op.summed;
            const char* from = (sum.from_scratch ? op.scratch.get() : op.values) + sum.from + op.summed;
            kind.add(into, from, size / kind.item);
            budget -= size;
            op.summed += size;
            if (op.summed == sum.size) ++op.sum, op.summed = 0;
        }
        return false;
    }

    // Multiplies each packet's sum by how many contributions there are over how many came: their mean, N times. Each
    // array that is received holds the contribution of one rank.
    void rescale(Operation& op) {
        const ::Kind& kind = kinds[op.header().kind];
        std::vector<const Receive*> parts;
        for (const Receive& receive : op.receives)
            if (receive.stage == op.stage && receive.need < receive.size) parts.push_back(&receive);
        if (parts.empty() || !kind.scale) return;
        const Receive& first = *parts[0];
        for (int64_t i = 0; i < first.packets; ++i) {
            int64_t came = 0, from = i * set_.payload;
            for (const Receive* part : parts) came += part->came.get(i);
            if (came == int64_t(parts.size())) continue;
            int64_t all = op.header().rescales, there = all - int64_t(parts.size()) + came;
            int64_t size = std::min(set_.payload, first.size - from);
            if (there) kind.scale(op.values + first.place + from, float(all) / float(there), size / kind.item);
        }
    }

    // ── Receiving ──

    bool receive_all() {
        bool any = false;
        for (int turn = 0; turn < 8; ++turn) {
            mmsghdr messages[BATCH];
            iovec places[BATCH];
            alignas(cmsghdr) char control[BATCH][128];
            std::memset(messages, 0, sizeof messages);
            for (int64_t k = 0; k < BATCH; ++k) {
                places[k] = {buffers_.data() + k * BUFFER, BUFFER};
                messages[k].msg_hdr.msg_iov = &places[k];
                messages[k].msg_hdr.msg_iovlen = 1;
                messages[k].msg_hdr.msg_control = control[k];
                messages[k].msg_hdr.msg_controllen = sizeof control[k];
            }
            int count = ::recvmmsg(int(set_.socket), messages, BATCH, MSG_DONTWAIT, nullptr);
            if (count <= 0) return any;
            any = true;
            for (int k = 0; k < count; ++k) take_message(messages[k], buffers_.data() + k * BUFFER);
            if (count < BATCH) return any;
        }
        return any;
    }

    void take_message(mmsghdr& message, const char* data) {
        int64_t size = message.msg_len, segment = size;
        bool marked = false;
        for (cmsghdr* c = CMSG_FIRSTHDR(&message.msg_hdr); c; c = CMSG_NXTHDR(&message.msg_hdr, c)) {
            if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
                int found;
                std::memcpy(&found, CMSG_DATA(c), sizeof found);
                segment = found;
            } else if ((c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TOS) ||
                       (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_TCLASS)) {
                marked = (*CMSG_DATA(c) & 3) == 3;
            }
        }
        if (segment <= 0) segment = size;
        for (int64_t at = 0; at < size; at += segment) accept(data + at, std::min(segment, size - at), marked);
    }

    void accept(const char* packet, int64_t size, bool marked, bool over_link = false) {
        if (size < int64_t(sizeof(Header))) return void(++counters_[MALFORMED]);
        Header header;
        std::memcpy(&header, packet, sizeof header);
        if (header.job != uint32_t(set_.job) || header.source >= set_.ranks || header.source == set_.rank)
            return void(++counters_[STRANGER]);
        const char* data = packet + sizeof header;
        if (header.length != size - int64_t(sizeof header) || header.length > set_.payload || header.kind >= MESSAGES)
            return void(++counters_[MALFORMED]);
        Peer& peer = peers_[header.source];
        Seen& seen = header.kind == DATA ? peer.data : peer.signals;
        uint64_t number = full_number(header.number, seen.highest());
        if (!peer.control || tag_of(peer.receiving, header, number, data) != header.tag) return void(++counters_[FORGED]);
        if (!seen.add(number)) return void(++counters_[REPLAYED]);
        peer.heard = now_;
        peer.asked = 0;
        // It has heard nothing over UDP; its answers would not come either.
        bool last_words = header.kind == GONE || header.kind == BYE;
        if (over_link && !last_words && now_ - peer.returned > SETTLING) serve_over_tcp(peer);
        if (before(peer.opened, header.opened)) open(peer, header.opened);
        switch (header.kind) {
            case DATA: return take_data(peer, header, data, marked);
            case ACK: return take_ack(peer, header, data);
            case STOP: return stop(peer, header.operation, header.stage, data, header.length);
            case PROBE: return answer(peer, header);
            case MAP: return take_map(peer, header, data);
            case PING: return header.length ? take_try(peer, header) : void(peer.owes_ack = true);
            case GONE: return lose(header.index < set_.ranks ? header.index : header.source, -1);
            case BYE: return ended(peer, header);
        }
    }

    void take_data(Peer& peer, const Header& header, const char* data, bool marked) {
        ++counters_[RECEIVED];
        counters_[RECEIVED_BYTES] += header.length;
        if (Operation* op = find(header.operation)) {
            if (!place(*op, header, data)) return void(++counters_[MALFORMED]);
        } else if (before(header.operation, first_)) {
            ++counters_[LATE];
        } else {
            ++counters_[EARLY];
            if (header.operation - opened_ >= AHEAD || early_bytes_ >= KEPT) return;
            early_.push_back({header.operation, {data - sizeof header, data + header.length}});
            early_bytes_ += header.length;
        }
        ++peer.came;
        if (marked) ++peer.came_marked, ++counters_[MARKED];
        if (before(peer.highest, header.number) || peer.came == 1) peer.highest = header.number;
        peer.stamp = header.stamp;
        peer.owes_ack |= (header.flags & ANSWER) || ++peer.unanswered >= UNANSWERED;
    }

    // Returns whether there is such a place.
    bool place(Operation& op, const Header& header, const char* data) {
        if (header.stage >= op.header().stages) return false;
        int at = op.receive_of[header.stage * set_.ranks + header.source];
        if (at < 0) return false;
        Receive& receive = op.receives[at];
        int64_t from = int64_t(header.index) * set_.payload;
        if (from >= receive.size || header.length != std::min(set_.payload, receive.size - from)) return false;
        if (receive.came.get(header.index)) return ++counters_[DUPLICATE], true;
        if (receive.done) return ++counters_[LATE], true;
        receive.came.set(header.index);
        if (!receive.first) receive.first = now_;
        if (!receive.last && header.flags & FINAL) receive.last = now_;
        if (receive.direct) {
            add(op, *receive.direct, from, data, header.length);
        } else {
            prefetch<true>(receive.target + from, header.length);
            std::memcpy(receive.target + from, data, header.length);
        }
        receive.got += header.length;
        if (receive.vital_missing && receive.vital.get(header.index)) --receive.vital_missing;
        receive.touched = true;
        return true;
    }

    void place_early(Operation& op) {
        auto end = std::remove_if(early_.begin(), early_.end(), [&](const Early& early) {
            if (early.operation != op.number) return false;
            Header header;
            std::memcpy(&header, early.packet.data(), sizeof header);
            if (!place(op, header, early.packet.data() + sizeof header)) ++counters_[MALFORMED];
            early_bytes_ -= header.length;
            return true;
        });
        early_.erase(end, early_.end());
    }

    void open(Peer& peer, uint32_t opened) {
        peer.opened = opened;
        peer.unheard = 0;  // what went ahead may have been dropped
        for (Send* send : peer.sends)
            if (send->went && before(send->operation->number, opened))
                send->due = std::min(send->due, now_ + probe_delay(peer, 0));
    }

    void take_ack(Peer& peer, const Header& header, const char* data) {
        if (header.length != sizeof(Arrived)) return void(++counters_[MALFORMED]);
        Arrived arrived;
        std::memcpy(&arrived, data, sizeof arrived);
        int64_t count = int32_t(arrived.packets - peer.acked), marked = int32_t(arrived.marked - peer.acked_marked);
        uint64_t number = full_number(header.index, peer.next_data);
        if (count <= 0 || count > 1 << 20 || number >= peer.next_data) return;
        peer.unheard = 0;
        peer.acked = arrived.packets;
        peer.acked_marked = arrived.marked;
        peer.answered = number + 1;
        peer.quiet_since = now_;
        int64_t trip = std::max<int64_t>(uint32_t(uint32_t(now_ / 1000) - header.stamp), 1);
        peer.least_trip = std::min(peer.least_trip, trip);
        if (trip > peer.least_trip + QUEUEING / 1000 && int64_t(peer.next_data - number) > set_.first_window) marked = count;
        law_.heard(peer.control, reinterpret_cast<double*>(peer.control), int64_t(number), count,
                   std::clamp<int64_t>(marked, 0, count), trip * 1'000'000);
        for (Send* send : peer.sends)  // see Note [Asking]
            if (send->went && send->left == 0 && !send->over && !before(header.index, send->last))
                if (is_open(peer, *send)) send->over = true, send->due = now_;
    }

    Send* sending(Peer& peer, uint32_t number, int64_t stage) {
        for (Send* send : peer.sends)
            if (send->operation->number == number && send->stage == stage) return send;
        return nullptr;
    }

    // Of a rank's own contribution it notes what was lost, as it does of those that it receives.
    void stop(Peer& peer, uint32_t number, int64_t stage, const char* bits = nullptr, int64_t length = 0) {
        Send* send = sending(peer, number, stage);
        if (!send) return;
        for (int64_t i = 0; i < std::min(8 * length, send->packets); ++i) {
            if (!(bits[i / 8] >> i % 8 & 1)) continue;
            int64_t from = i * set_.payload, size = std::min(set_.payload, send->size - from);
            Operation& op = *send->operation;
            op.lost.insert(op.lost.end(), {send->offset + from, size, set_.rank});
        }
        peer.unheard = 0;
        --send->operation->open_sends;
        peer.sends.erase(std::find(peer.sends.begin(), peer.sends.end(), send));
        settle(peer);
    }

    void answer(Peer& peer, const Header& header) {
        Operation* op = find(header.operation);
        if (!op) {
            if (before(header.operation, first_)) return signal(peer, STOP, header.operation, header.stage);
            peer.owes_ack = true;  // its answer says what is opened
            return;
        }
        int at = header.stage < op->header().stages ? op->receive_of[header.stage * set_.ranks + header.source] : -1;
        if (at < 0) return void(++counters_[MALFORMED]);
        Receive& receive = op->receives[at];
        if (receive.done) return say_stop(peer, *op, receive);
        if (receive.history) return answer_ending(peer, *op, receive, header.stamp);
        if (!needed(receive) && !receive.vital_missing) {
            receive.until = now_;  // all has gone: what has not come is lost
            receive.touched = true;
            return;
        }
        int64_t wanted = needed(receive);
        wanted = receive.need >= receive.size ? receive.packets : wanted ? wanted / set_.payload + 2 : 0;
        say_missing(peer, *op, receive, header.stamp, wanted);
    }

    void answer_ending(Peer& peer, Operation& op, Receive& receive, uint32_t asked) {
        if (!receive.first) receive.first = now_;
        if (!receive.last) receive.last = now_;  // who asks has sent all
        receive.touched = true;
        peer.owes_ack = true;  // where nothing goes again, no map is an answer
        bool repeats = ending_.repeats || peer.over_tcp || ending_.over(receive.history, 0, 0) >= NEVER;
        say_missing(peer, op, receive, asked, repeats ? receive.packets : 0);
    }

    // Says what is missing: all that is vital, and as many others as are wanted yet, if these are sure to arrive.
    void say_missing(Peer& peer, Operation& op, const Receive& receive, uint32_t asked, int64_t wanted) {
        bool chosen = receive.vital_missing > 0;
        std::vector<char> bits(set_.payload);
        for (int64_t first = 0; first < receive.packets; first += 8 * set_.payload) {
            int64_t end = std::min(first + 8 * set_.payload, receive.packets), any = 0;
            std::fill(bits.begin(), bits.end(), 0);
            for (int64_t i = receive.came.next(first, false); i < end; i = receive.came.next(i + 1, false)) {
                if (!(chosen && receive.vital.get(i)) && --wanted < 0) continue;
                bits[(i - first) / 8] |= char(1 << (i - first) % 8);
                ++any;
            }
            if (!any) continue;
            Header header = header_of(MAP, op.number, receive.stage);
            header.index = uint32_t(first);
            header.stamp = asked;
            header.length = uint16_t((end - first + 7) / 8);
            send_one(peer, header, bits.data());
            ++counters_[MAPS];
        }
    }

    void take_map(Peer& peer, const Header& header, const char* data) {
        Send* send = sending(peer, header.operation, header.stage);
        if (!send || header.stamp != send->asked || header.index >= send->packets) return;
        send->tries = 0;
        send->answered = true;
        int64_t end = std::min<int64_t>(header.index + 8 * int64_t(header.length), send->packets), again = 0;
        for (int64_t i = header.index; i < end; ++i) {
            if (!(data[(i - header.index) / 8] >> (i - header.index) % 8 & 1)) continue;
            if (!send->pending.get(i)) send->pending.set(i), ++send->left, ++again;
            send->important.set(i);  // what goes again must arrive
        }
        send->due = now_ + probe_delay(peer, 0);
        // Bursts that are lost as a whole have no acknowledgements that would close the window.
        int64_t went = peer.over_tcp ? 0 : send->since_map;
        bool mostly_lost = (went > 1 && again >= went) || (went >= set_.first_window && 2 * again > went);
        send->since_map = 0;
        if (mostly_lost) return law_.lost(peer.control, reinterpret_cast<double*>(peer.control));
        settle(peer);
    }

    // Forgets what was lost where nothing else is under way: the last packets of an array have none behind them whose
    // acknowledgement would say so.
    void settle(Peer& peer) {
        for (Send* send : peer.sends)
            if (send->begun && !send->answered) return;
        law_.settled(peer.control, reinterpret_cast<double*>(peer.control));
    }

    void ended(Peer& peer, const Header& header) {
        peer.ended = true;
        std::deque<Send*> open = peer.sends;
        for (Send* send : open)
            if (before(send->operation->number, header.operation)) stop(peer, send->operation->number, send->stage);
    }

    // ── Sending ──

    Header header_of(uint8_t kind, uint32_t operation, int64_t stage) const {
        Header header{};
        header.job = uint32_t(set_.job);
        header.source = uint16_t(set_.rank);
        header.kind = kind;
        header.operation = operation;
        header.stage = uint16_t(stage);
        header.stamp = uint32_t(now_ / 1000);
        header.opened = opened_;
        return header;
    }

    void signal(Peer& peer, uint8_t kind, uint32_t operation, int64_t stage) {
        send_one(peer, header_of(kind, operation, stage), nullptr);
    }

    // Numbers and tags a packet, which is then as it goes.
    static void seal(const Peer& peer, Header& header, const char* data, uint64_t number) {
        header.number = uint32_t(number);
        header.tag = tag_of(peer.sending, header, number, data);
    }

    void acknowledge() {
        for (Peer& peer : peers_) {
            if (!peer.owes_ack) continue;
            peer.owes_ack = false;
            peer.unanswered = 0;
            Header header = header_of(ACK, 0, 0);
            Arrived arrived{peer.came, peer.came_marked};
            header.index = peer.highest;
            header.stamp = peer.stamp;
            header.length = sizeof arrived;
            send_one(peer, header, reinterpret_cast<const char*>(&arrived));
        }
    }

    // Sends a signal in the first class, as what must arrive.
    void send_one(Peer& peer, Header header, const char* data) {
        header.flags = IMPORTANT;
        seal(peer, header, data, peer.next_signal++);
        if (peer.over_tcp) return queue_frame(peer, header, data);
        iovec parts[2] = {{&header, sizeof header}, {const_cast<char*>(data), header.length}};
        transmit(peer, parts, header.length ? 2 : 1, 0, service_[1]);
    }

    // Returns whether the kernel has taken it.
    bool transmit(Peer& peer, iovec* parts, size_t count, int64_t segment, uint8_t service) {
        if (segment && now_ < peer.no_batch_until) return transmit_one_by_one(peer, parts, count, service);
        msghdr message{};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(uint16_t)) + CMSG_SPACE(sizeof(int))] = {};
        message.msg_name = &peer.address;
        message.msg_namelen = peer.address_size;
        message.msg_iov = parts;
        message.msg_iovlen = count;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* c = CMSG_FIRSTHDR(&message);
        int value = service;
        c->cmsg_level = set_.ipv6 ? IPPROTO_IPV6 : IPPROTO_IP;
        c->cmsg_type = set_.ipv6 ? IPV6_TCLASS : IP_TOS;
        c->cmsg_len = CMSG_LEN(sizeof value);
        std::memcpy(CMSG_DATA(c), &value, sizeof value);
        size_t used = CMSG_SPACE(sizeof value);
        if (segment) {
            uint16_t size = uint16_t(segment);
            c = CMSG_NXTHDR(&message, c);
            c->cmsg_level = IPPROTO_UDP;
            c->cmsg_type = UDP_SEGMENT;
            c->cmsg_len = CMSG_LEN(sizeof size);
            std::memcpy(CMSG_DATA(c), &size, sizeof size);
            used += CMSG_SPACE(sizeof size);
        }
        message.msg_controllen = used;
        ssize_t sent = ::sendmsg(int(set_.socket), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return blocked_ = true, false;
        // EMSGSIZE: a path whose packets are smaller than the interface says, where the kernel cuts single ones into
        // fragments. EIO: an interface that computes no checksums, or encrypts, before Linux 6.11.
        if (sent < 0 && segment && (errno == EINVAL || errno == EMSGSIZE || errno == EIO)) {
            peer.no_batch_until = now_ + QUIET;
            return transmit_one_by_one(peer, parts, count, service);
        }
        return true;  // what the network refuses counts as lost
    }

    bool transmit_one_by_one(Peer& peer, iovec* parts, size_t count, uint8_t service) {
        for (size_t k = 0; k < count; k += 2)
            if (!transmit(peer, parts + k, 2, 0, service)) return k > 0;
        return true;
    }

    bool send_all() {
        bool any = false;
        blocked_ = false;
        for (bool more = true; more && !blocked_;) {
            more = false;
            for (Peer& peer : peers_)
                if (peer.control && send_burst(peer)) more = any = true;
            if (any) break;  // a look at what has come after each round
        }
        return any;
    }

    bool is_open(const Peer& peer, const Send& send) const { return before(send.operation->number, peer.opened); }

    // Packets of an array that may go; see Note [Opened].
    int64_t ready(const Peer& peer, const Send& send) const {
        if (is_open(peer, send)) return send.left;
        if (send.operation->number - peer.opened >= AHEAD || send.went) return 0;
        return std::clamp<int64_t>(AHEAD_PACKETS - (send.packets - send.left), 0, send.left);
    }

    bool send_burst(Peer& peer) {
        if (peer.sends.empty() || (!peer.over_tcp && now_ < peer.next_send)) return false;
        auto found = std::find_if(peer.sends.begin(), peer.sends.end(), [&](Send* each) { return ready(peer, *each); });
        if (found == peer.sends.end()) return false;
        Send* send = *found;
        double* real = reinterpret_cast<double*>(peer.control);
        int64_t room = peer.over_tcp ? (QUEUED - int64_t(peer.out.size() - peer.out_at)) / set_.payload
                                     : law_.room(peer.control, real);
        int64_t whole = set_.payload + int64_t(sizeof(Header));
        // A third of the window: who sends as much at once wants to hear of it, or would stand still later.
        int64_t third = std::max<int64_t>((room + int64_t(peer.next_data - peer.answered)) / 3, 1);
        int64_t most = std::min({room, set_.segments, MOST_SEGMENTS, DATAGRAM / whole, ready(peer, *send)});
        if (most <= 0) {
            if (!peer.quiet_since) peer.quiet_since = now_;
            return false;
        }
        int64_t chosen[MOST_SEGMENTS], count = choose(*send, most, chosen);
        Header headers[MOST_SEGMENTS];
        iovec parts[2 * MOST_SEGMENTS];
        int64_t bytes = 0;
        bool important = send->important.get(chosen[0]);
        for (int64_t k = 0; k < count; ++k) {
            const char* data = send->data + chosen[k] * set_.payload;
            Header& header = headers[k];
            header = header_of(DATA, send->operation->number, send->stage);
            header.flags = important ? IMPORTANT : 0;
            if (send->left - k <= (send->packets + LAST - 1) / LAST) header.flags |= FINAL;
            if (k + 1 == count && (count == send->left || count >= std::min(third, room))) header.flags |= ANSWER;
            header.index = uint32_t(chosen[k]);
            header.length = uint16_t(std::min(set_.payload, send->size - chosen[k] * set_.payload));
            prefetch<false>(data, header.length);
            seal(peer, header, data, peer.next_data + uint64_t(k));
            parts[2 * k] = {&header, sizeof header};
            parts[2 * k + 1] = {const_cast<char*>(data), header.length};
            bytes += header.length + sizeof header;
            if (peer.over_tcp) queue_frame(peer, header, data);
        }
        uint8_t service = service_[2 * send->operation->header().traffic_class + important];
        if (!peer.over_tcp && !transmit(peer, parts, 2 * count, count > 1 ? whole : 0, service)) return false;
        for (int64_t k = 0; k < count; ++k) send->pending.clear(chosen[k]);
        send->left -= count;
        send->cursor = (chosen[count - 1] + 1) % send->packets;
        peer.next_data += uint64_t(count);
        counters_[SENT] += count;
        counters_[SENT_BYTES] += bytes;
        if (send->went) counters_[SENT_AGAIN] += count;
        if (!peer.over_tcp) {
            law_.sent(peer.control, real, count);
            peer.next_send = now_ + law_.interval(peer.control, real, bytes) / 1000;
        }
        send->begun = true, send->answered = false;
        send->since_map += count;
        peer.quiet_since = now_;
        if (!peer.unheard && !peer.over_tcp && is_open(peer, *send)) peer.unheard = now_;
        if (send->left == 0) {
            send->went = true;
            send->last = uint32_t(peer.next_data - 1);
            send->over = false;
            send->due = now_ + probe_delay(peer, send->tries);
        }
        return true;
    }

    // Chooses packets from the cursor on that are as important as the first; a short one ends them.
    int64_t choose(const Send& send, int64_t most, int64_t* chosen) const {
        int64_t at = send.pending.next(send.cursor, true), count = 0, looked = 0;
        if (at == send.packets) at = send.pending.next(0, true);
        bool important = send.important.get(at);
        for (; at < send.packets && count < most && looked < 2 * MOST_SEGMENTS; ++looked) {
            if (send.important.get(at) == important) chosen[count++] = at;
            at = send.pending.next(at + 1, true);
        }
        return count;
    }

    // ── Timers ──

    int64_t probe_delay(Peer& peer, int64_t tries) {
        int64_t delay = law_.probe_after(peer.control, reinterpret_cast<double*>(peer.control), tries) / 1000;
        return std::min(delay, LONGEST_WAIT);
    }

    // Receivers say on their own what they have opened.
    int64_t first_question(Peer& peer) { return std::max<int64_t>(probe_delay(peer, 0), 2'000'000); }

    void check_timers() {
        next_due_ = now_ + QUIET;
        for (Peer& peer : peers_) peer.waited_for = false;
        for (auto& op : active_)
            for (Receive& receive : op->receives) peers_[receive.from].waited_for |= !receive.done;
        for (int64_t rank = 0; rank < set_.ranks; ++rank) {
            Peer& peer = peers_[rank];
            if (!peer.control) continue;
            bool unsent = false;
            for (size_t k = 0; k < peer.sends.size(); ++k) {
                Send& send = *peer.sends[k];
                bool open = is_open(peer, send);
                if (open && send.left > 0) {
                    unsent = true;
                    continue;
                }
                if (now_ >= send.due) ask(peer, send, open);
                next_due_ = std::min(next_due_, send.due);
                if (!open) break;  // one question is enough
            }
            if (unsent && !peer.over_tcp) {
                // All acknowledgements may have been lost.
                if (!peer.quiet_since) peer.quiet_since = now_;
                double* real = reinterpret_cast<double*>(peer.control);
                int64_t until = peer.quiet_since + std::max<int64_t>(law_.silence(peer.control, real) / 1000, 1'000'000);
                if (law_.room(peer.control, real) <= 0) {
                    if (now_ >= until) {
                        law_.lost(peer.control, real);
                        note_asked(peer);
                        peer.quiet_since = now_;
                    }
                    next_due_ = std::min(next_due_, std::max(until, now_ + 100'000));
                } else {
                    next_due_ = std::min(next_due_, std::max(peer.next_send, now_));
                }
            }
            check_alive(peer, rank);
        }
    }

    void ask(Peer& peer, Send& send, bool open) {
        ++send.tries;
        send.asked = uint32_t(now_ / 1000);
        ++counters_[PROBES];
        note_asked(peer);
        signal(peer, PROBE, send.operation->number, send.stage);
        send.due = now_ + probe_delay(peer, open ? send.tries : std::max<int64_t>(send.tries, 3));
    }

    void note_asked(Peer& peer) {
        if (!peer.asked) peer.asked = now_;
    }

    // A rank is lost that answers nothing for long, or that has ended though something is still wanted of it.
    void check_alive(Peer& peer, int64_t rank) {
        if (peer.waited_for && now_ - peer.heard > QUIET && now_ - peer.pinged > QUIET / 4) {
            peer.pinged = now_;
            note_asked(peer);
            signal(peer, PING, 0, 0);
        }
        if (peer.waited_for) next_due_ = std::min(next_due_, now_ + QUIET / 4);
        if (peer.ended && (peer.waited_for || !peer.sends.empty())) return lose(rank, 0);
        if (peer.over_tcp) try_udp(peer);
        if (peer.unheard) next_due_ = std::min(next_due_, peer.unheard + set_.blocked);
        int64_t since = std::min(peer.asked ? peer.asked : NEVER, peer.unheard ? peer.unheard : NEVER);
        if (now_ - since < set_.blocked) return;
        serve_over_tcp(peer);
        peer.unheard = 0;
        if (peer.asked && now_ - peer.asked > set_.timeout) lose(rank, ETIMEDOUT);
    }

    // ── Connections ──

    void serve_over_tcp(Peer& peer) {
        if (peer.over_tcp || peer.link < 0) return;
        note_over_tcp(peer, true);
        ++counters_[OVER_TCP];
        for (Send* send : peer.sends) send->due = now_;
        peer.tries = 0;
        peer.next_try = now_ + peer.patience;
        peer.patience = std::min(2 * peer.patience, MOST_PATIENCE);
    }

    void note_over_tcp(Peer& peer, bool served) {
        int64_t rank = &peer - peers_.data();
        peer.over_tcp = over_tcp_[rank] = served;
        for (auto& op : active_)  // what is enough has changed
            for (Receive& receive : op->receives)
                if (receive.from == rank && receive.got) receive.touched = true;
        std::lock_guard<std::mutex> lock(mutex_);
        paths_changed_ = true;
        changed_.notify_all();
    }

    void try_udp(Peer& peer) {
        if (peer.ended) return;
        if (now_ >= peer.next_try) {
            send_try(peer);
            peer.next_try = now_ + QUIET;
        }
        next_due_ = std::min(next_due_, peer.next_try);
    }

    // Sends a packet as large as any over UDP; it says how many of the peer's have come.
    void send_try(Peer& peer) {
        std::vector<char> data(set_.payload);
        Header header = header_of(PING, 0, 0);
        header.index = peer.tries;
        header.length = uint16_t(set_.payload);
        seal(peer, header, data.data(), peer.next_signal++);
        iovec parts[2] = {{&header, sizeof header}, {data.data(), data.size()}};
        transmit(peer, parts, 2, 0, service_[1]);
    }

    void take_try(Peer& peer, const Header& header) {
        ++peer.tries;
        if (!header.index) return send_try(peer);
        if (!peer.over_tcp) return;
        send_try(peer);
        note_over_tcp(peer, false);
        peer.returned = now_;
        ++counters_[OVER_UDP_AGAIN];
        law_.settled(peer.control, reinterpret_cast<double*>(peer.control));
        for (Send* send : peer.sends) send->due = now_;
    }

    void queue_frame(Peer& peer, const Header& header, const char* data) {
        if (peer.link < 0) return;
        uint32_t size = uint32_t(sizeof header) + header.length;
        if (peer.out_at == peer.out.size()) peer.out.clear(), peer.out_at = 0;
        const char* parts[] = {reinterpret_cast<const char*>(&size), reinterpret_cast<const char*>(&header)};
        peer.out.insert(peer.out.end(), parts[0], parts[0] + sizeof size);
        peer.out.insert(peer.out.end(), parts[1], parts[1] + sizeof header);
        if (header.length) peer.out.insert(peer.out.end(), data, data + header.length);
    }

    void write_links() {
        for (Peer& peer : peers_) write_link(peer);
    }

    void write_link(Peer& peer) {
        while (peer.link >= 0 && peer.out_at < peer.out.size()) {
            ssize_t sent = ::send(peer.link, peer.out.data() + peer.out_at, peer.out.size() - peer.out_at,
                                  MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent <= 0) return;  // that it has ended shows when it is read
            peer.out_at += size_t(sent);
        }
    }

    bool read_links() {
        bool any = false;
        for (int64_t rank = 0; rank < set_.ranks; ++rank) {
            Peer& peer = peers_[rank];
            while (peer.link >= 0) {
                char data[16384];
                ssize_t got = ::recv(peer.link, data, sizeof data, MSG_DONTWAIT);
                if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) break;
                if (got <= 0) {
                    int why = got < 0 ? errno : 0;
                    peer.link = -1;
                    if (!peer.ended) lose(rank, why);
                    break;
                }
                any = true;
                peer.in.insert(peer.in.end(), data, data + got);
                take_frames(peer, rank);
            }
        }
        return any;
    }

    void take_frames(Peer& peer, int64_t rank) {
        size_t at = 0;
        while (peer.in.size() - at >= 4) {
            uint32_t size;
            std::memcpy(&size, peer.in.data() + at, 4);
            if (size > sizeof(Header) + size_t(set_.payload)) return lose(rank, EPROTO);
            if (peer.in.size() - at - 4 < size) break;
            accept(peer.in.data() + at + 4, size, false, true);
            at += 4 + size;
        }
        peer.in.erase(peer.in.begin(), peer.in.begin() + int64_t(at));
    }

    void wait() {
        std::vector<pollfd>& fds = fds_;
        fds.clear();
        fds.push_back({int(set_.socket), short(POLLIN | (blocked_ ? POLLOUT : 0)), 0});
        fds.push_back({int(set_.wake), POLLIN, 0});
        for (Peer& peer : peers_)
            if (peer.link >= 0)
                fds.push_back({peer.link, short(POLLIN | (peer.out_at < peer.out.size() ? POLLOUT : 0)), 0});
        int64_t nanoseconds = std::max<int64_t>(std::min(next_due_, next_look_) - now_ns(), 0);
        timespec time{time_t(nanoseconds / 1'000'000'000), long(nanoseconds % 1'000'000'000)};
        if (::ppoll(fds.data(), fds.size(), &time, nullptr) > 0 && fds[1].revents) {
            uint64_t woken;
            if (::read(int(set_.wake), &woken, sizeof woken) < 0) return;
        }
    }

    Settings set_;
    Law law_;
    Ending ending_;
    std::map<std::array<int64_t, 4>, std::vector<int64_t>> histories_;  // by slot, stage, rank and size
    std::map<std::array<int64_t, 4>, std::vector<int64_t>> lost_pulls_;  // the same; packets that the last pull has lost
    uint8_t service_[16];           // type of service by class: droppable, important
    int64_t *counters_, *over_tcp_;  // over_tcp_: by rank, whether it is served so
    std::vector<Peer> peers_;
    std::vector<char> buffers_;
    std::mutex mutex_;
    std::deque<std::unique_ptr<Operation>> submitted_, active_;
    uint32_t first_ = 0, opened_ = 0;
    std::map<int64_t, float> thresholds_;
    std::deque<Early> early_;
    int64_t early_bytes_ = 0;
    std::deque<std::vector<int64_t>> finished_;
    std::deque<uint32_t> held_;
    std::vector<uint32_t> resumed_;
    std::vector<int64_t> losses_;
    std::condition_variable changed_;
    std::mutex closing_lock_;
    std::thread thread_;
    std::vector<pollfd> fds_;
    int64_t now_ = 0, next_due_ = 0, next_look_ = 0, failed_ = -1;
    int failed_why_ = 0;
    bool closing_ = false, blocked_ = false, ended_ = false, paths_changed_ = false;
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void* foretrain_bounded_new(const Settings* settings, const Law* law, const Ending* ending,
                                     const uint8_t* service, int64_t* counters, int64_t* over_tcp) {
    return new Engine(*settings, *law, *ending, service, counters, over_tcp);
}

EXPORTED void foretrain_bounded_delete(Engine* engine) { delete engine; }

EXPORTED void foretrain_bounded_peer(Engine* engine, int64_t rank, const void* address, int64_t size, int64_t link,
                                     const uint32_t* sending, const uint32_t* receiving, int64_t* control) {
    engine->peer(rank, address, size, link, sending, receiving, control);
}

// Hands an operation over, in the order of all ranks.
EXPORTED void foretrain_bounded_submit(Engine* engine, const int64_t* plan, int64_t numbers, char* values, char* pulled,
                                       const int64_t* vital, int64_t vitals, const int64_t* important,
                                       int64_t importants) {
    engine->submit(plan, numbers, values, pulled, vital, vitals, important, importants);
}

EXPORTED void foretrain_bounded_start(Engine* engine) { engine->start(); }

EXPORTED int64_t foretrain_bounded_next(Engine* engine, int64_t* failed, const int64_t** gaps) {
    return engine->next(failed, gaps);
}

EXPORTED int64_t foretrain_bounded_next_held(Engine* engine) { return engine->next_held(); }

EXPORTED void foretrain_bounded_resume(Engine* engine, int64_t number) { engine->resume(uint32_t(number)); }

EXPORTED void foretrain_bounded_close(Engine* engine) { engine->close(); }

EXPORTED void foretrain_bounded_say_goodbye(Engine* engine, int64_t lost) { engine->say_goodbye(lost); }

EXPORTED void foretrain_bounded_inject(Engine* engine, const char* packets, const int64_t* sizes, int64_t count) {
    engine->inject(packets, sizes, count);
}

EXPORTED void foretrain_bounded_seal(Engine* engine, int64_t rank, char* packet, int64_t number) {
    engine->seal(rank, packet, uint64_t(number));
}
