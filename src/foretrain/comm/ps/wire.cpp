// Messages of the parameter server over TCP: framing, tags, bytes from and to their places.
//
// A wire has one thread, which receives, checks tags, and sends what the kernel did not take at once. Its owner, another
// thread, queues messages and calls `poll`, which sends them, waits, and returns what has happened as a batch. Receiving
// does not wait for the owner: acknowledgements of TCP that did would tell BBR of a slow network. A message is a prefix
// of 64 bytes and a payload:
//
//     4 bytes   length of the payload
//     44        header, as frames.py has it; bytes 8 to 15 are the message's place in its direction
//     16        tag over all of that and the payload; zero before there is a key
//
// Note [Places]. Payloads are received where they stay, in slabs that the owner gives, one message behind the other.
// A slab is the owner's again when nothing more is received into it. Without a slab nothing is received: the sender's
// window closes, so that memory is bounded. What is sent is sent from where it is. The owner keeps what it gave to `send`
// until a SENT event says that the kernel has it, and the memory of what it pushes as long as the wire. Few bytes are
// copied instead.
//
// Note [Served connections]. A server's owner may let the wire itself serve a worker: pushes go to the `Shard`, sums and
// acknowledgements back, and the owner sees none of them. What is not regular goes to the owner, and so does everything
// behind it on that connection, until the owner has seen it: messages keep their order. A worker's owner lets the wire push
// ranges of tasks, and take the answers, see `InFlight`: acknowledgements, and sums where they can be written to where they
// belong; it sees which chunks a server has and which tasks have landed.
//
// Note [Strangers]. Of a connection without a key no more is read than a handshake needs, and it is closed when it has
// none after some seconds, or when too many wait; so it holds neither memory nor a place for longer. A connection with
// a key is closed by the first message whose tag or place is wrong.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "inflight.h"
#include "gmac.h"
#include "shard.h"

namespace {

const int64_t HEADER = 44, PREFIX = 64, SMALL = 4 << 10, ALIGN = 64;
const int64_t TURN = 256 << 10;     // bytes to receive of one connection before others have their turn
const int64_t BUFFER = 2 << 20;     // bytes that the kernel may hold to send, so that it does while the owner decides
const int PIECES = 64;              // of one call of the kernel
const int64_t REST = 100000000;     // ns for which a listener rests that has no descriptor for a connection

enum What : int64_t { OPENED, MESSAGE, CLOSED, SENT, SLAB, WANTED, WATCHED, FINISHED, LANDED };

// frames.FrameKind, and flags.
enum Frame : uint8_t { PUSH = 7, PULL = 8, VALUE = 9, RECEIVED = 10, ALIVE = 11 };
enum Flag : uint8_t { ABSENT = 1, ACCUMULATES = 2, PULL_ONLY = 4, SEVERAL = 16 };

const int64_t STRANGE = -2;  // slab of a message without a key: its payload's address is in `at`, until the next `poll`
// Why a connection was closed; errno otherwise.
enum Why : int64_t { HUNG_UP = 0, NO_MESSAGE = -1, TOO_LARGE = -2, FORGED = -3, LATE = -4, CROWDED = -5 };

#pragma pack(push, 1)
struct Prefix {
    uint32_t length;
    uint8_t header[HEADER];
    uint8_t tag[16];
};
struct Event {
    int64_t connection, what;
    int64_t slab, at, length;       // MESSAGE: where the payload is. CLOSED: why, in `at`. SENT: how many, in `at`.
                                    // SLAB: its number, in `at`. WANTED: bytes of a slab, in `at`. FINISHED: a chunk,
                                    // in `at`. LANDED: a task, in `at`, and whether there was a gradient, in `length`
    uint8_t header[HEADER];
    uint8_t unused[4];
};
struct Header {
    char magic[2];
    uint8_t kind, flag;
    uint32_t sender;
    uint64_t place;
    uint32_t part;
    int64_t step, offset, size;
};
struct Item {                       // of a message with several ranges
    int64_t part, offset, size, length;
};
#pragma pack(pop)
static_assert(sizeof(Header) == HEADER && sizeof(Item) == 32, "the layout is the protocol");
static_assert(sizeof(Prefix) == PREFIX && sizeof(Event) == 88, "the layout is the protocol");

struct Message {                    // on its way out
    Prefix prefix;
    std::vector<iovec> pieces;      // the prefix is not among them
    std::vector<char> copy;
    std::shared_ptr<void> keep;     // what the pieces lie in, where the owner does not keep it
    int64_t size = 0, sent = 0;     // bytes of it all; of those, the kernel's
    bool sealed = false;
};

// Slabs that sums need no longer, see `Shard`.
struct Released {
    std::mutex mutex;
    std::vector<int64_t> slabs;
};

// A worker that is served here, see Note [Served connections].
struct Served {
    std::shared_ptr<Shard> shard;
    int64_t worker, epoch, number;      // number: of this shard
    int64_t main, aside;                // connections
    Outlet outlet;
    int64_t pushes = 0, acknowledged = 0, heard = 0;
    bool touched = false;
};

struct Stretch {                    // bytes of a task
    int64_t task, start, end;
};
struct Unacknowledged {             // message
    int64_t step;
    std::vector<Stretch> stretches;
};

// A server whose answers are taken here.
struct Taken {
    std::shared_ptr<InFlight> inflight;
    int64_t aside;                      // connection for acknowledgements
    int64_t shard, worker, epoch;       // epoch: of the declaration
    int64_t slice;                      // bytes of a message of several ranges, at most
    int64_t arrived = 0, heard = 0;     // bytes of sums to acknowledge; ns
    std::deque<Unacknowledged> pushed;
    int64_t acknowledged = 0;           // messages
};

struct Connection {
    int64_t number;
    int fd;
    bool connecting, accepted;
    uint32_t interest = 0;
    int64_t deadline = 0;           // ns; of a stranger
    std::unique_ptr<Gmac> sending, receiving;
    uint64_t said = 0, heard = 0;   // messages with tags
    std::deque<std::unique_ptr<Message>> out;
    int64_t sent = 0, told = 0;     // whole messages; those that the owner knows of
    bool finishing = false;
    bool held = false;              // a stranger's message waits for the owner
    int64_t unread = 0;             // messages that wait for the owner
    int64_t kept = 0;               // the latest message that the owner keeps
    std::shared_ptr<Served> served;
    std::shared_ptr<Taken> taken;
    // Of the message that is being received.
    Prefix prefix;
    int64_t got = 0;                // bytes, of prefix and payload
    char* place = nullptr;
    int64_t slab = -1, at = 0;
    std::vector<char> strange;      // payload of a stranger
};

struct Slab {
    char* memory;
    int64_t size, used = 0, pending = 0;        // bytes handed out; messages received into it, or kept for a sum
    bool seen = false;                          // by the owner, which may have views of it
};

// A size that is set is not adapted any more, and a smaller one than wanted would be worse than that.
bool may_buffer() {
    static const bool may = [] {
        char text[32] = {0};
        int fd = ::open("/proc/sys/net/core/wmem_max", O_RDONLY | O_CLOEXEC);
        bool found = fd >= 0 && ::read(fd, text, sizeof text - 1) > 0;
        if (fd >= 0) ::close(fd);
        return found && std::atoll(text) >= BUFFER;
    }();
    return may;
}

int64_t now_ns() {
    timespec now;
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

bool later() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

class Wire {
  public:
    Wire(int64_t most, int64_t handshake) : most_(most), handshake_(handshake), poll_(::epoll_create1(EPOLL_CLOEXEC)) {
        control(EPOLL_CTL_ADD, stop_, EPOLLIN, STOP);
        thread_ = std::thread([this] { work(); });
    }

    ~Wire() {
        {
            Lock lock(mutex_);
            stopping_ = true;
        }
        wake(stop_);
        if (thread_.joinable()) thread_.join();
        for (auto& each : connections_) ::close(each.second->fd);
        if (listening_ >= 0) ::close(listening_);
        for (int each : {poll_, ready_, stop_}) ::close(each);
    }

    // Wakes `poll` when `fd` is readable; it stays the caller's.
    void watch(int fd) { watched_ = fd; }

    // Returns the port, or minus errno. `patience` is the ns that a stranger has, `crowd` how many may wait.
    int64_t listen(const char* host, const char* port, int64_t patience, int64_t crowd) {
        Lock lock(mutex_);
        patience_ = patience, crowd_ = crowd;
        addrinfo* found = resolved(host, port);
        if (!found) return -EADDRNOTAVAIL;
        listening_ = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        int yes = 1;
        ::setsockopt(listening_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        int failed = listening_ < 0 || ::bind(listening_, found->ai_addr, found->ai_addrlen) || ::listen(listening_, 128);
        ::freeaddrinfo(found);
        if (failed) return -errno;
        control(EPOLL_CTL_ADD, listening_, EPOLLIN, LISTEN);
        sockaddr_storage bound;
        socklen_t size = sizeof bound;
        ::getsockname(listening_, reinterpret_cast<sockaddr*>(&bound), &size);
        return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                                 : reinterpret_cast<sockaddr_in&>(bound).sin_port);
    }

    // Returns the number of a connection that OPENED or CLOSED will tell of, or minus errno.
    int64_t connect(const char* host, const char* port) {
        addrinfo* found = resolved(host, port);
        if (!found) return -EADDRNOTAVAIL;
        int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        int failed = fd < 0 || (::connect(fd, found->ai_addr, found->ai_addrlen) && errno != EINPROGRESS) ? errno : 0;
        ::freeaddrinfo(found);
        if (failed) {
            if (fd >= 0) ::close(fd);
            return -failed;
        }
        Lock lock(mutex_);
        return add(fd, true, false).number;
    }

    void give(int64_t slab, char* memory, int64_t size) {
        Lock lock(mutex_);
        slabs_[slab] = {memory, size};
        feed();
    }

    bool set_keys(int64_t number, const uint8_t* sending, const uint8_t* receiving, int64_t heard) {
        Lock lock(mutex_);
        Connection* c = find(number);
        if (!c) return false;
        c->sending.reset(new Gmac(sending)), c->receiving.reset(new Gmac(receiving));
        c->heard = heard, c->said = 0, c->deadline = 0;
        return true;
    }

    // `pieces` are `count` pairs of address and size. Returns the message's number plus one if the owner must keep
    // them until it is SENT, 0 if they were copied, −1 if there is no such connection.
    int64_t send(int64_t number, const uint8_t* header, const int64_t* pieces, int64_t count) {
        Lock lock(mutex_);
        Connection* c = find(number);
        if (!c || c->finishing) return -1;
        std::unique_ptr<Message> made(new Message);
        int64_t length = 0;
        for (int64_t i = 0; i < count; ++i) length += pieces[2 * i + 1];
        std::memcpy(made->prefix.header, header, HEADER);
        if (length <= SMALL) {
            made->copy.resize(length);
            char* to = made->copy.data();
            for (int64_t i = 0; i < count; to += pieces[2 * i + 1], ++i)
                std::memcpy(to, reinterpret_cast<const char*>(pieces[2 * i]), pieces[2 * i + 1]);
            if (length) made->pieces.push_back({made->copy.data(), size_t(length)});
        } else {
            for (int64_t i = 0; i < count; ++i)
                if (pieces[2 * i + 1])
                    made->pieces.push_back({reinterpret_cast<void*>(pieces[2 * i]), size_t(pieces[2 * i + 1])});
        }
        made->size = length;
        queue(*c, std::move(made));
        return length <= SMALL ? 0 : c->kept = c->sent + int64_t(c->out.size());
    }

    // Serves a worker from here on, on its two connections; without a shard it serves it no longer.
    void serve_worker(int64_t main, int64_t aside, std::shared_ptr<Shard> shard, int64_t worker, int64_t epoch,
                      int64_t number, int64_t credit, int64_t slice) {
        Lock lock(mutex_);
        std::shared_ptr<Served> made;
        if (shard) made.reset(new Served{shard, worker, epoch, number, main, aside, Outlet(credit, slice)});
        for (int64_t each : {main, aside})
            if (Connection* c = find(each)) stop_serving(*c), c->served = made;
        if (made && find(main)) served_[{shard.get(), worker}] = made;
    }

    // Takes a server's answers from here on, on the two connections to it.
    void take_answers(int64_t main, std::shared_ptr<Taken> taken) {
        Lock lock(mutex_);
        for (int64_t each : {main, taken->aside})
            if (Connection* c = find(each)) c->taken = taken;
    }

    // Pushes what of these ranges a server's shard holds: `spans` are `count` times task, start, end and address, 0 where
    // there is no gradient. Small ranges share messages; larger ones are sent from where they are, see Note [Places].
    // Returns the bytes that were queued, −1 if there is no such connection.
    int64_t push(int64_t number, int64_t step, int64_t flag, const int64_t* spans, int64_t count) {
        Lock lock(mutex_);
        Connection* c = find(number);
        if (!c || !c->taken || c->finishing) return -1;
        Taken& taken = *c->taken;
        std::vector<Ranged> small;
        int64_t queued = 0, size = 0;
        auto say = [&](std::vector<Ranged>& ranges) {
            Unacknowledged pushed{step, {}};
            for (const Ranged& each : ranges) {
                const InFlight::Part& part = taken.inflight->parts[each.item.part];
                int64_t start = part.offset + each.item.offset;
                pushed.stretches.push_back({part.task, start, start + each.item.size});
            }
            Header header{{'f', 's'}, PUSH, uint8_t(flag), uint32_t(taken.worker), 0, 0, step, 0, 0};
            std::unique_ptr<Message> message = bundle(header, ranges);
            if (message->size <= SMALL) own(*message);
            queued += message->size;
            queue(*c, std::move(message));
            taken.pushed.push_back(std::move(pushed));
            ranges.clear(), size = 0;
        };
        for (const int64_t* span = spans; count--; span += 4) {
            const char* data = reinterpret_cast<const char*>(span[3]);
            taken.inflight->parts_of(span[0], span[1], span[2], [&](int64_t number, int64_t low, int64_t high) {
                const InFlight::Part& part = taken.inflight->parts[number];
                if (part.shard != taken.shard) return;
                const char* from = data ? data + (low - span[1]) : nullptr;
                Ranged one{{number, low - part.offset, high - low, data ? high - low : 0}, from};
                if (high - low > Outlet::SHARED) {
                    std::vector<Ranged> alone{one};
                    return say(alone);
                }
                small.push_back(one);
                if ((size += high - low) > taken.slice - Outlet::SHARED) say(small);
            });
        }
        if (!small.empty()) say(small);
        return queued;
    }

    // Takes a message that the owner has got, as if it had not; returns whether it could.
    bool take_back(int64_t number, const uint8_t* header, const char* payload, int64_t length) {
        Lock lock(mutex_);
        Connection* c = find(number);
        if (c && c->taken) return take_answer(*c, header, payload, length);
        if (!c || !c->served) return false;
        std::shared_ptr<char> copy(new char[length], std::default_delete<char[]>());
        std::memcpy(copy.get(), payload, length);
        return take(*c, header, copy.get(), length, copy);
    }

    // Queues a sum for a served worker; returns false if that is not served.
    bool put(int64_t number, const Value& value) {
        Lock lock(mutex_);
        Connection* c = find(number);
        if (!c || !c->served) return false;
        deliver({{c->served->worker, value}}, *c->served->shard);
        return true;
    }

    // Returns when a served connection's worker was heard last, ns of the monotonic clock; 0 where none is.
    int64_t heard(int64_t number) {
        Lock lock(mutex_);
        Connection* c = find(number);
        return !c ? 0 : c->served ? c->served->heard : c->taken ? c->taken->heard : 0;
    }

    // Gives to the kernel what it takes now.
    void flush() {
        Lock lock(mutex_);
        flush_all();
    }

    void flush_all() {
        pump();
        std::vector<int64_t> dirty;
        dirty.swap(dirty_);
        for (int64_t number : dirty)
            if (Connection* c = find(number)) flush(*c);
    }

    // Closes a connection, now or with `orderly` when all is sent and the peer has closed its end.
    void close(int64_t number, bool orderly) {
        Lock lock(mutex_);
        Connection* c = find(number);
        if (!c) return;
        if (!orderly) return remove(*c);
        finish(*c);
    }

    // Accepts nothing more, and closes all connections in an orderly way; returns how many are still open.
    int64_t finish() {
        Lock lock(mutex_);
        if (listening_ >= 0) ::close(listening_), listening_ = -1;
        std::vector<Connection*> all;
        for (auto& each : connections_) all.push_back(each.second.get());
        for (Connection* c : all) {
            if (c->connecting) {
                remove(*c);
            } else if (!c->finishing) {
                finish(*c);
            }
        }
        return int64_t(connections_.size());
    }

    int64_t poll(int64_t milliseconds, Event* events, int64_t most) {
        {
            Lock lock(mutex_);
            events_ = events, room_ = most, count_ = 0;
            // The owner has seen what it was told of the last time, and set keys.
            shown_strange_.clear();
            for (int64_t number : shown_) {
                Connection* c = find(number);
                if (!c) continue;
                --c->unread;
                if (c->held) c->held = false, interest(*c);
            }
            shown_.clear();
            flush_all();
            hand_over();
            if (count_) return count_;
            sleeping_ = true;
        }
        pollfd what[2] = {{ready_, POLLIN, 0}, {watched_, POLLIN, 0}};
        ::poll(what, 2, int(milliseconds));
        Lock lock(mutex_);
        sleeping_ = false;
        uint64_t count;
        if (what[0].revents && ::read(ready_, &count, sizeof count) < 0) return 0;
        if (what[1].revents) tell(-1, WATCHED);
        hand_over();
        return count_;
    }

  private:
    static constexpr uint64_t LISTEN = ~0ull, STOP = ~1ull;
    using Lock = std::lock_guard<std::mutex>;

    static void wake(int fd) {
        uint64_t one = 1;
        if (::write(fd, &one, sizeof one) < 0) return;  // it is full: the reader wakes anyway
    }

    void work() {
        int64_t wait = 1000;
        for (;;) {
            epoll_event ready[64];
            int found = ::epoll_wait(poll_, ready, 64, int(wait));
            for (int i = 0; i < found; ++i) {
                Lock lock(mutex_);  // for each, so that the owner has its turn
                uint64_t who = ready[i].data.u64;
                if (who == LISTEN) {
                    accept();
                } else if (Connection* c = who == STOP ? nullptr : find(int64_t(who))) {
                    serve(*c, ready[i].events);
                }
            }
            Lock lock(mutex_);
            if (stopping_) return;
            if (!touched_.empty() || !values_of_.empty()) flush_all();
            int64_t now = now_ns();
            judge(now);
            wait = next_deadline_ ? std::min<int64_t>(1000, std::max<int64_t>(0, (next_deadline_ - now) / 1000000 + 1)) : 1000;
            if (!late_.empty() && sleeping_) sleeping_ = false, wake(ready_);
        }
    }

    static addrinfo* resolved(const char* host, const char* port) {
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM, hints.ai_flags = AI_NUMERICSERV;
        return ::getaddrinfo(host, port, &hints, &found) ? nullptr : found;
    }

    // The kernel may choose the very port that is dialled as the local one.
    static bool to_itself(int fd) {
        sockaddr_storage here{}, there{};
        socklen_t size = sizeof here, other = sizeof there;
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &size);
        ::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &other);
        return size == other && std::memcmp(&here, &there, size) == 0;
    }

    void control(int how, int fd, uint32_t events, uint64_t who) {
        epoll_event wanted{};
        wanted.events = events, wanted.data.u64 = who;
        ::epoll_ctl(poll_, how, fd, &wanted);
    }

    Connection& add(int fd, bool connecting, bool accepted) {
        int yes = 1;
        ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        int size = BUFFER;
        if (may_buffer()) ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        std::unique_ptr<Connection> made(new Connection);
        made->number = ++numbers_, made->fd = fd, made->connecting = connecting, made->accepted = accepted;
        Connection& c = *(connections_[made->number] = std::move(made));
        c.interest = connecting ? EPOLLOUT : EPOLLIN;
        control(EPOLL_CTL_ADD, fd, c.interest, uint64_t(c.number));
        return c;
    }

    Connection* find(int64_t number) {
        auto found = connections_.find(number);
        return found == connections_.end() ? nullptr : found->second.get();
    }

    // Waits for what the connection can do now.
    void interest(Connection& c) {
        bool starved = std::find(starved_.begin(), starved_.end(), c.number) != starved_.end();
        uint32_t wanted = 0;
        if (c.connecting || !c.out.empty()) wanted |= EPOLLOUT;
        if (!c.connecting && !starved && !c.held) wanted |= EPOLLIN;
        if (wanted != c.interest) control(EPOLL_CTL_MOD, c.fd, c.interest = wanted, uint64_t(c.number));
    }

    void tell(int64_t connection, int64_t what, int64_t at = 0) {
        Event made{};
        made.connection = connection, made.what = what, made.at = at;
        late_.push_back(made);
    }

    // Events that do not fit are told of in the next turn, in order.
    void hand_over() {
        for (auto& each : connections_) {
            Connection& c = *each.second;
            if (c.sent > c.told && c.kept > c.told) tell(c.number, SENT, c.told = c.sent);
        }
        while (!late_.empty() && count_ < room_) {
            const Event& event = events_[count_++] = late_.front();
            if (event.what == MESSAGE) shown_.push_back(event.connection);
            if (event.slab == STRANGE) {
                shown_strange_.push_back(std::move(strange_.front()));
                strange_.pop_front();
            }
            late_.pop_front();
        }
    }

    // A peer that does not close its end in turn has as long as a stranger.
    void finish(Connection& c) {
        c.finishing = true;
        if (!c.deadline) c.deadline = now_ns() + patience_;
        if (!next_deadline_ || c.deadline < next_deadline_) next_deadline_ = c.deadline;
        flush(c);
    }

    void stop_serving(Connection& c) {
        if (!c.served) return;
        auto found = served_.find({c.served->shard.get(), c.served->worker});
        // Its worker may be served on other connections by now.
        if (found != served_.end() && found->second == c.served) served_.erase(found);
        c.served = nullptr;
    }

    void remove(Connection& c) {
        stop_serving(c);
        if (c.slab >= 0) leave(c.slab);
        ::close(c.fd);
        connections_.erase(c.number);
    }

    void fail(Connection& c, int64_t why) {
        tell(c.number, CLOSED, why);
        remove(c);
    }

    void accept() {
        for (int i = 0; i < 64; ++i) {
            int fd = ::accept4(listening_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (fd < 0) {
                if (errno != EMFILE && errno != ENFILE) return;
                // Without descriptors the oldest stranger makes room. Where there is none, whoever knocks waits: a
                // listener that is ready and not served would wake this thread again at once.
                if (crowd_out()) continue;
                control(EPOLL_CTL_MOD, listening_, 0, LISTEN);
                resting_ = now_ns() + REST;
                if (!next_deadline_ || resting_ < next_deadline_) next_deadline_ = resting_;
                return;
            }
            Connection& c = add(fd, false, true);
            c.deadline = now_ns() + patience_;
            if (!next_deadline_) next_deadline_ = c.deadline;
            int64_t waiting = 0;
            for (auto& each : connections_) waiting += each.second->accepted && !each.second->receiving;
            if (waiting > crowd_) crowd_out();
        }
    }

    bool crowd_out() {
        for (auto& each : connections_) {   // by age
            if (each.second->accepted && !each.second->receiving) return fail(*each.second, CROWDED), true;
        }
        return false;
    }

    void judge(int64_t now) {
        if (!next_deadline_ || now < next_deadline_) return;
        if (resting_ && now >= resting_) {
            resting_ = 0;
            if (listening_ >= 0) control(EPOLL_CTL_MOD, listening_, EPOLLIN, LISTEN);
        }
        next_deadline_ = resting_;
        std::vector<Connection*> late;
        for (auto& each : connections_) {
            Connection& c = *each.second;
            if (!c.deadline) continue;
            if (now >= c.deadline) {
                late.push_back(&c);
            } else if (!next_deadline_ || c.deadline < next_deadline_) {
                next_deadline_ = c.deadline;
            }
        }
        for (Connection* c : late) fail(*c, LATE);
    }

    void serve(Connection& c, uint32_t events) {
        if (c.connecting) {
            int error = 0;
            socklen_t size = sizeof error;
            ::getsockopt(c.fd, SOL_SOCKET, SO_ERROR, &error, &size);
            if (error || to_itself(c.fd)) return fail(c, error ? error : ECONNREFUSED);
            c.connecting = false;
            tell(c.number, OPENED);
            interest(c);
            return;
        }
        int64_t number = c.number;
        if (events & EPOLLOUT) flush(c);
        if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) && find(number)) receive(c);
    }

    // ── serving ──

    // Takes a regular message of a served worker; returns false if it is not. `keep` keeps its payload.
    bool take(Connection& c, const uint8_t* from, const char* payload, int64_t length, std::shared_ptr<void> keep) {
        std::shared_ptr<Served> served = c.served;
        Header header;
        std::memcpy(&header, from, HEADER);
        if (header.kind == RECEIVED) {
            served->outlet.received(header.size);
            touch(served);
        } else if (header.kind == PUSH) {
            if (!push(*served, header, payload, length, keep)) return false;
            ++served->pushes;
            touch(served);
        } else if (header.kind == PULL) {
            std::vector<Delivery> found;
            Range wanted{header.offset, end_of(header.offset, header.size)};
            std::lock_guard<std::mutex> lock(served->shard->mutex);
            if (served->shard->pull(served->worker, header.part, header.step, wanted, found)) return false;
            deliver(found, *served->shard);
        } else if (header.kind != ALIVE) {
            return false;
        }
        served->heard = now_ns();
        return true;
    }

    bool push(Served& served, const Header& header, const char* payload, int64_t length, std::shared_ptr<void>& keep) {
        std::lock_guard<std::mutex> lock(served.shard->mutex);
        std::vector<Delivery> found;
        auto one = [&](int64_t part, int64_t offset, int64_t size, int64_t given) {
            int64_t detail;
            const Pushed pushed{offset, end_of(offset, size), given ? payload : nullptr, keep};
            payload += given, length -= given;
            return (given == 0 || given == size) && size > 0 && offset >= 0 &&
                   !served.shard->push(served.worker, part, header.step, pushed, header.flag & ACCUMULATES,
                                       header.flag & PULL_ONLY, found, detail);
        };
        bool fine = true;
        if (!(header.flag & SEVERAL)) {
            fine = bool(header.flag & ABSENT) != bool(length) && one(header.part, header.offset, header.size, length);
        } else {
            const char* table = payload;
            const int64_t count = header.part, size = count * int64_t(sizeof(Item));
            if (count == 0 || size > length) return false;
            payload += size, length -= size;
            for (int64_t k = 0; k < count && fine; ++k) {
                Item item;
                std::memcpy(&item, table + k * sizeof(Item), sizeof(Item));
                fine = item.length >= 0 && item.length <= length && one(item.part, item.offset, item.size, item.length);
            }
            fine = fine && length == 0;
        }
        deliver(found, *served.shard);
        return fine;
    }

    // Takes an answer; returns false if the owner must.
    bool take_answer(Connection& c, const uint8_t* from, const char* payload, int64_t length) {
        Header header;
        std::memcpy(&header, from, HEADER);
        Taken& taken = *c.taken;
        std::lock_guard<std::mutex> lock(taken.inflight->mutex);
        if (header.kind == RECEIVED) {
            acknowledge(taken, header);
        } else if (header.kind == VALUE) {
            if (taken.inflight->places.empty() || !take_value(c, header, payload, length)) return false;
        } else if (header.kind != ALIVE) {
            return false;
        }
        taken.heard = now_ns();
        return true;
    }

    // The server has so many messages of a declaration; of those of an earlier one nobody asks.
    void acknowledge(Taken& taken, const Header& header) {
        std::vector<int64_t> finished;
        while (header.step == taken.epoch && taken.acknowledged < header.offset && !taken.pushed.empty()) {
            const Unacknowledged& first = taken.pushed.front();
            if (first.step == taken.inflight->step)
                for (const Stretch& each : first.stretches)
                    taken.inflight->acknowledge(each.task, each.start, each.end, finished);
            taken.pushed.pop_front();
            ++taken.acknowledged;
            taken.inflight->moved = now_ns();
        }
        for (int64_t chunk : finished) tell(-1, FINISHED, chunk);
    }

    // Takes sums; returns false if they are not regular. Each byte counts once in a round.
    bool take_value(Connection& c, const Header& header, const char* payload, int64_t length) {
        Taken& taken = *c.taken;
        InFlight& inflight = *taken.inflight;
        std::vector<Item> items;
        if (!(header.flag & SEVERAL)) {
            items.push_back({header.part, header.offset, header.size, length});
        } else {
            int64_t size = int64_t(header.part) * int64_t(sizeof(Item));
            if (size > length) return false;
            items.resize(header.part);
            std::memcpy(items.data(), payload, size);
            payload += size, length -= size;
        }
        int64_t left = length;
        for (const Item& each : items) {
            bool known = each.part >= 0 && each.part < int64_t(inflight.parts.size());
            if (!known || each.offset < 0 || each.size <= 0 || each.offset > inflight.parts[each.part].size - each.size ||
                (each.length && each.length != each.size) || each.length > left)
                return false;
            left -= each.length;
        }
        if (left) return false;
        if (!taken.arrived && length) values_of_.push_back(c.number);
        taken.arrived += length;
        std::vector<int64_t> finished;
        for (const Item& each : items) {
            const char* data = payload;
            payload += each.length;
            if (header.step != inflight.step) continue;
            const InFlight::Part& part = inflight.parts[each.part];
            int64_t task = part.task, start = part.offset + each.offset;
            inflight.together = true;
            inflight.acknowledge(task, start, start + each.size, finished);
            auto arrived = inflight.arrive(task, start, start + each.size, finished);
            if (!each.length) inflight.absent[task] = true;
            for (const InFlight::Span& span : arrived.first)
                if (each.length) std::memcpy(inflight.places[task] + span.start, data + (span.start - start), span.end - span.start);
            if (!arrived.first.empty()) inflight.moved = now_ns();
            for (int64_t chunk : finished) tell(-1, FINISHED, chunk);
            finished.clear();
            if (arrived.second) {
                tell(-1, LANDED, task);
                late_.back().length = !inflight.absent[task];
            }
        }
        return true;
    }

    void touch(const std::shared_ptr<Served>& served) {
        if (!served->touched) touched_.push_back(served);
        served->touched = true;
    }

    // Queues sums for those of their workers that are served.
    void deliver(const std::vector<Delivery>& found, const Shard& shard) {
        for (const Delivery& each : found) {
            auto served = served_.find({&shard, each.worker});
            if (served == served_.end()) continue;
            served->second->outlet.put(shard.part(each.value.part)->urgency, each.value);
            touch(served->second);
        }
    }

    // Queues acknowledgements, and the sums that credit allows.
    void pump() {
        std::vector<int64_t> values;
        values.swap(values_of_);
        for (int64_t number : values) {
            Connection *main = find(number), *aside = main && main->taken ? find(main->taken->aside) : nullptr;
            if (!aside || aside->finishing) continue;
            std::unique_ptr<Message> message(new Message);
            Header header{{'f', 's'}, RECEIVED, 0, 0, 0, 0, 0, 0, main->taken->arrived};
            std::memcpy(message->prefix.header, &header, HEADER);
            main->taken->arrived = 0;
            queue(*aside, std::move(message));
        }
        std::vector<std::shared_ptr<Served>> touched;
        touched.swap(touched_);
        for (auto& served : touched) {
            served->touched = false;
            Connection *main = find(served->main), *aside = find(served->aside);
            if (!main || !aside || main->served != served || main->finishing) continue;
            if (served->acknowledged < served->pushes) {
                served->acknowledged = served->pushes;
                queue(*aside, made(*served, {{'f', 's'}, RECEIVED, 0, 0, 0, 0, served->epoch, served->pushes, 0}));
            }
            for (;;) {
                std::vector<Value> values = served->outlet.take();
                if (values.empty()) break;
                queue_values(*main, *served, values);
            }
        }
    }

    std::unique_ptr<Message> made(const Served& served, Header header) {
        header.sender = uint32_t(served.number);
        std::unique_ptr<Message> message(new Message);
        std::memcpy(message->prefix.header, &header, HEADER);
        return message;
    }

    void queue_values(Connection& c, Served& served, const std::vector<Value>& values) {
        Header header{{'f', 's'}, VALUE, 0, uint32_t(served.number), 0, 0, values[0].step, 0, 0};
        std::vector<Ranged> ranges;
        for (const Value& each : values) {
            const char* data = each.length() ? served.shard->data(each) : nullptr;
            ranges.push_back({{each.part, each.start, each.end - each.start, each.length()}, data});
        }
        std::unique_ptr<Message> message = bundle(header, ranges);
        message->keep = served.shard;
        queue(c, std::move(message));
    }

    // ── sending ──

    struct Ranged {
        Item item;
        const char* data;
    };

    // A message of these ranges, as frames.bundle makes it.
    static std::unique_ptr<Message> bundle(Header header, const std::vector<Ranged>& ranges) {
        std::unique_ptr<Message> message(new Message);
        const Item& first = ranges[0].item;
        if (ranges.size() == 1) {
            header.flag |= first.length ? 0 : ABSENT;
            header.part = uint32_t(first.part), header.offset = first.offset, header.size = first.size;
        } else {
            header.flag |= SEVERAL, header.part = uint32_t(ranges.size());
            header.offset = header.size = 0;
            message->copy.resize(ranges.size() * sizeof(Item));
            message->pieces.push_back({message->copy.data(), message->copy.size()});
        }
        message->size = int64_t(message->copy.size());
        char* entry = message->copy.data();
        for (const Ranged& each : ranges) {
            if (ranges.size() > 1) {
                std::memcpy(entry, &each.item, sizeof(Item));
                entry += sizeof(Item), header.size += each.item.size;
            }
            if (each.item.length) message->pieces.push_back({const_cast<char*>(each.data), size_t(each.item.length)});
            message->size += each.item.length;
        }
        std::memcpy(message->prefix.header, &header, HEADER);
        return message;
    }

    // Lets a message have its bytes itself.
    static void own(Message& message) {
        std::vector<char> whole;
        for (const iovec& each : message.pieces) {
            const char* from = static_cast<const char*>(each.iov_base);
            whole.insert(whole.end(), from, from + each.iov_len);
        }
        message.copy.swap(whole), message.pieces.clear();
        if (!message.copy.empty()) message.pieces.push_back({message.copy.data(), message.copy.size()});
    }

    // Queues a message, whose `size` is its payload's until then.
    void queue(Connection& c, std::unique_ptr<Message> message) {
        message->prefix.length = uint32_t(message->size), message->size += PREFIX;
        std::memset(message->prefix.tag, 0, 16);
        if (c.sending) {
            std::memcpy(message->prefix.header + 8, &c.said, 8);
            ++c.said;
        } else {
            message->sealed = true;     // there is nothing to seal it with
        }
        c.out.push_back(std::move(message));
        dirty_.push_back(c.number);
    }

    void seal(Connection& c, Message& message) {
        uint64_t place;
        std::memcpy(&place, message.prefix.header + 8, 8);
        Gmac::Sum sum(*c.sending);
        sum.add(&message.prefix, PREFIX - 16);
        for (const iovec& each : message.pieces) sum.add(each.iov_base, each.iov_len);
        sum.finish(place, message.prefix.tag);
        message.sealed = true;
    }

    void flush(Connection& c) {
        if (c.connecting) return;
        while (!c.out.empty()) {
            iovec pieces[PIECES];
            int count = 0;
            int64_t gathered = 0;
            for (auto& message : c.out) {
                if (count >= PIECES - 1 || gathered >= (256 << 10)) break;
                if (!message->sealed) seal(c, *message);
                int64_t skip = message->sent;
                auto put = [&](const void* at, int64_t size) {
                    if (skip >= size) return void(skip -= size);
                    if (count == PIECES) return;
                    pieces[count++] = {const_cast<char*>(static_cast<const char*>(at)) + skip, size_t(size - skip)};
                    gathered += size - skip, skip = 0;
                };
                put(&message->prefix, PREFIX);
                for (const iovec& each : message->pieces) put(each.iov_base, int64_t(each.iov_len));
            }
            msghdr what{};
            what.msg_iov = pieces, what.msg_iovlen = size_t(count);
            ssize_t sent = ::sendmsg(c.fd, &what, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent < 0) {
                // What has come before stays to be read; reading then shows the end.
                if (!later()) c.out.clear();
                break;
            }
            while (sent > 0) {
                Message& first = *c.out.front();
                int64_t part = std::min<int64_t>(sent, first.size - first.sent);
                first.sent += part, sent -= part;
                if (first.sent == first.size) c.out.pop_front(), ++c.sent;
            }
        }
        if (c.out.empty() && c.finishing) ::shutdown(c.fd, SHUT_WR);
        interest(c);
    }

    // ── receiving ──

    void leave(int64_t slab) {
        Slab& left = slabs_[slab];
        --left.pending;
        // The last is kept, for what comes next.
        if (left.pending == 0 && slab != current_) retire(slab);
    }

    void retire(int64_t slab) {
        if (!slabs_[slab].seen) {
            slabs_[slab].used = 0;
            return feed();
        }
        slabs_.erase(slab);
        tell(-1, SLAB, slab);
    }

    // Lets connections that lacked a slab look again.
    void feed() {
        std::vector<int64_t> starved;
        starved.swap(starved_);
        for (int64_t number : starved)
            if (Connection* c = find(number)) interest(*c);
    }

    // Returns what keeps the slab of a message for a sum, which may outlive this wire.
    std::shared_ptr<void> kept(int64_t slab) {
        if (slab < 0) return nullptr;
        ++slabs_[slab].pending;
        std::shared_ptr<Released> released = released_;
        return std::shared_ptr<void>(static_cast<void*>(released.get()), [released, slab](void*) {
            std::lock_guard<std::mutex> lock(released->mutex);
            released->slabs.push_back(slab);
        });
    }

    void take_released() {
        std::vector<int64_t> slabs;
        {
            std::lock_guard<std::mutex> lock(released_->mutex);
            slabs.swap(released_->slabs);
        }
        for (int64_t each : slabs) leave(each);
    }

    // Finds room for a payload; returns false if there is none.
    bool reserve(Connection& c, int64_t length) {
        take_released();
        int64_t size = (length + ALIGN - 1) / ALIGN * ALIGN;
        auto fits = [&](int64_t number) {
            auto found = slabs_.find(number);
            return found != slabs_.end() && found->second.size - found->second.used >= size;
        };
        if (!fits(current_)) {
            int64_t before = current_, next = -1;
            for (auto& each : slabs_)
                if (each.first != before && each.second.used == 0 && each.second.size >= size) {
                    next = each.first;
                    break;
                }
            if (next < 0) {
                if (std::find(starved_.begin(), starved_.end(), c.number) == starved_.end()) {
                    starved_.push_back(c.number);
                    tell(-1, WANTED, size);
                }
                interest(c);
                return false;
            }
            current_ = next;
            auto old = slabs_.find(before);
            if (old != slabs_.end() && old->second.pending == 0) retire(before);
        }
        Slab& slab = slabs_[current_];
        c.slab = current_, c.at = slab.used, c.place = slab.memory + slab.used;
        slab.used += size, ++slab.pending;
        return true;
    }

    // Receives as much as there is; the next prefix comes with the payload before it, in one call.
    void receive(Connection& c) {
        if (c.finishing) return discard(c);
        for (int64_t turn = 0; turn < TURN;) {
            int64_t length = c.got >= PREFIX ? int64_t(c.prefix.length) : 0;
            if (length && !c.place && !begin(c)) return;
            iovec pieces[2];
            int count = 0;
            int64_t left = 0;
            Prefix next;
            if (c.got < PREFIX) {
                pieces[count++] = {reinterpret_cast<char*>(&c.prefix) + c.got, size_t(PREFIX - c.got)};
            } else {
                left = PREFIX + length - c.got;
                pieces[count++] = {c.place + (c.got - PREFIX), size_t(left)};
                // A stranger's next message may need a key that its owner is about to set.
                if (c.receiving) pieces[count++] = {&next, PREFIX};
            }
            msghdr what{};
            what.msg_iov = pieces, what.msg_iovlen = size_t(count);
            ssize_t got = ::recvmsg(c.fd, &what, MSG_DONTWAIT);
            if (got < 0) {
                if (later()) return;
                return fail(c, errno);
            }
            if (got == 0) return fail(c, HUNG_UP);
            turn += got;
            int64_t over = length ? std::max<int64_t>(0, got - left) : 0;
            c.got += got - over;
            if (length) {
                if (c.got < PREFIX + length) continue;
                bool known = c.receiving != nullptr;
                if (!complete(c)) return;
                c.prefix = next, c.got = over;
                if (!known) return;
            }
            if (c.got == PREFIX) {
                if (!look(c)) return;
                if (c.prefix.length == 0) {
                    c.got = 0;
                    if (!complete(c) || !c.receiving) return;
                }
            }
        }
    }

    // Its owner wants nothing more of this connection.
    void discard(Connection& c) {
        char nowhere[16 << 10];
        for (int64_t turn = 0; turn < TURN;) {
            ssize_t got = ::recv(c.fd, nowhere, sizeof nowhere, MSG_DONTWAIT);
            if (got < 0 && later()) return;
            if (got <= 0) return fail(c, HUNG_UP);
            turn += got;
        }
    }

    // Looks at a prefix; returns false where the connection is closed.
    bool look(Connection& c) {
        if (std::memcmp(c.prefix.header, "fs", 2) != 0) return fail(c, NO_MESSAGE), false;
        if (int64_t(c.prefix.length) > (c.receiving ? most_ : handshake_)) return fail(c, TOO_LARGE), false;
        return true;
    }

    // Finds a place for a payload whose prefix has come.
    bool begin(Connection& c) {
        if (c.receiving) return reserve(c, c.prefix.length);
        c.strange.resize(c.prefix.length);
        c.place = c.strange.data();
        return true;
    }

    // Takes a whole message; returns false where the connection is closed.
    bool complete(Connection& c) {
        int64_t length = c.prefix.length;
        if (c.receiving) {
            uint64_t place;
            uint8_t tag[16];
            std::memcpy(&place, c.prefix.header + 8, 8);
            Gmac::Sum sum(*c.receiving);
            sum.add(&c.prefix, PREFIX - 16);
            if (length) sum.add(c.place, size_t(length));
            sum.finish(place, tag);
            uint8_t wrong = 0;
            for (int i = 0; i < 16; ++i) wrong |= tag[i] ^ c.prefix.tag[i];
            if (wrong || place != c.heard) return fail(c, FORGED), false;
            ++c.heard;
        }
        if (c.served && !c.unread && take(c, c.prefix.header, c.place, length, kept(c.slab))) {
            drop_place(c);
            return true;
        }
        if (c.taken && !c.unread && take_answer(c, c.prefix.header, c.place, length)) {
            drop_place(c);
            return true;
        }
        if (c.slab >= 0) slabs_[c.slab].seen = true;
        ++c.unread;
        Event made{};
        made.connection = c.number, made.what = MESSAGE;
        made.slab = c.slab, made.at = c.at, made.length = length;
        std::memcpy(made.header, c.prefix.header, HEADER);
        late_.push_back(made);
        if (!c.receiving && length) {
            late_.back().slab = STRANGE, late_.back().at = reinterpret_cast<int64_t>(c.place);
            strange_.push_back(std::move(c.strange));
        }
        if (!c.receiving) {
            c.held = true;
            interest(c);
        }
        drop_place(c);
        return true;
    }

    void drop_place(Connection& c) {
        int64_t slab = c.slab;
        c.slab = -1, c.place = nullptr;
        if (slab >= 0) leave(slab);
    }

    int64_t most_, handshake_;      // bytes of a payload: with a key, and without
    int poll_, listening_ = -1, watched_ = -1;
    int64_t resting_ = 0;           // ns; until then the listener is not looked at
    int64_t patience_ = 5000000000, crowd_ = 0, numbers_ = 0, next_deadline_ = 0, current_ = -1;
    std::map<int64_t, std::unique_ptr<Connection>> connections_;
    std::map<std::pair<const Shard*, int64_t>, std::shared_ptr<Served>> served_;    // by shard and worker
    std::map<int64_t, Slab> slabs_;
    std::vector<int64_t> dirty_, starved_;
    std::deque<Event> late_;
    std::deque<std::vector<char>> strange_;         // payloads of strangers that the owner has yet to see
    std::vector<std::vector<char>> shown_strange_;  // that it is looking at
    std::vector<int64_t> shown_;                    // connections whose messages it is looking at, each once for each
    std::vector<std::shared_ptr<Served>> touched_;  // that may be sent something
    std::vector<int64_t> values_of_;                // connections whose sums are to be acknowledged
    std::shared_ptr<Released> released_ = std::make_shared<Released>();
    std::mutex mutex_;
    std::thread thread_;
    int ready_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);  // something is there for the owner
    int stop_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    bool sleeping_ = false, stopping_ = false;
    Event* events_ = nullptr;
    int64_t room_ = 0, count_ = 0;
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED Wire* foretrain_wire_new(int64_t most, int64_t handshake) { return new Wire(most, handshake); }
EXPORTED void foretrain_wire_delete(Wire* wire) { delete wire; }
EXPORTED void foretrain_wire_watch(Wire* wire, int64_t fd) { wire->watch(int(fd)); }
EXPORTED int64_t foretrain_wire_listen(Wire* wire, const char* host, const char* port, int64_t patience, int64_t crowd) {
    return wire->listen(host, port, patience, crowd);
}
EXPORTED int64_t foretrain_wire_connect(Wire* wire, const char* host, const char* port) {
    return wire->connect(host, port);
}
EXPORTED void foretrain_wire_give(Wire* wire, int64_t slab, char* memory, int64_t size) {
    wire->give(slab, memory, size);
}
EXPORTED int64_t foretrain_wire_finish(Wire* wire) { return wire->finish(); }
EXPORTED void foretrain_wire_flush(Wire* wire) { wire->flush(); }
EXPORTED int64_t foretrain_wire_keys(Wire* wire, int64_t number, const uint8_t* sending, const uint8_t* receiving,
                                     int64_t heard) {
    return wire->set_keys(number, sending, receiving, heard);
}
EXPORTED int64_t foretrain_wire_send(Wire* wire, int64_t number, const uint8_t* header, const int64_t* pieces,
                                     int64_t count) {
    return wire->send(number, header, pieces, count);
}
EXPORTED void foretrain_wire_close(Wire* wire, int64_t number, int64_t orderly) { wire->close(number, orderly); }
EXPORTED int64_t foretrain_wire_poll(Wire* wire, int64_t milliseconds, Event* events, int64_t most) {
    return wire->poll(milliseconds, events, most);
}
// Writes the tag of a message, of 48 bytes before its tag and `size` of payload.
EXPORTED void foretrain_wire_tag(const uint8_t* key, uint64_t place, const uint8_t* prefix, const uint8_t* payload,
                                 int64_t size, uint8_t* tag) {
    Gmac keys(key);
    Gmac::Sum sum(keys);
    sum.add(prefix, PREFIX - 16);
    sum.add(payload, size_t(size));
    sum.finish(place, tag);
}

// A shard for `workers`, of whom `lost` count no more, with parts of four numbers each: number, size, kind, urgency.
EXPORTED std::shared_ptr<Shard>* foretrain_shard_new(int64_t workers, int64_t restarted, const int64_t* lost,
                                                     int64_t lost_count, const int64_t* parts, int64_t part_count) {
    auto made = new std::shared_ptr<Shard>(new Shard(workers, restarted));
    for (int64_t k = 0; k < lost_count; ++k) (*made)->leave_out(lost[k]);
    for (const int64_t* part = parts; part_count--; part += 4) (*made)->add_part(part[0], part[1], part[2], part[3]);
    return made;
}
EXPORTED void foretrain_shard_delete(std::shared_ptr<Shard>* shard) { delete shard; }
// Adds a copy of what was pushed; `detail` is the round that the returned code tells of.
EXPORTED int64_t foretrain_shard_push(std::shared_ptr<Shard>* shard, int64_t worker, int64_t part, int64_t step,
                                      int64_t offset, int64_t size, const char* data, int64_t length, int64_t again,
                                      int64_t held, int64_t* detail) {
    std::lock_guard<std::mutex> lock((*shard)->mutex);
    std::shared_ptr<char> copy;
    if (data) {
        if (length != size) return Shard::NO_SIZE;
        copy.reset(new char[length], std::default_delete<char[]>());
        std::memcpy(copy.get(), data, length);
    }
    return (*shard)->push(worker, part, step, {offset, end_of(offset, size), copy.get(), copy}, again, held, (*shard)->told,
                          *detail);
}
EXPORTED int64_t foretrain_shard_pull(std::shared_ptr<Shard>* shard, int64_t worker, int64_t part, int64_t step,
                                      int64_t offset, int64_t size) {
    std::lock_guard<std::mutex> lock((*shard)->mutex);
    return (*shard)->pull(worker, part, step, {offset, end_of(offset, size)}, (*shard)->told);
}
EXPORTED void foretrain_shard_remove_worker(std::shared_ptr<Shard>* shard, int64_t worker) {
    std::lock_guard<std::mutex> lock((*shard)->mutex);
    (*shard)->remove_worker(worker, (*shard)->told);
}
// Writes up to `most` deliveries of the calls before, which are then forgotten; returns how many.
EXPORTED int64_t foretrain_shard_deliveries(std::shared_ptr<Shard>* shard, Delivery* to, int64_t most) {
    std::lock_guard<std::mutex> lock((*shard)->mutex);
    std::vector<Delivery>& told = (*shard)->told;
    int64_t count = std::min<int64_t>(most, int64_t(told.size()));
    std::copy(told.begin(), told.begin() + count, to);
    told.erase(told.begin(), told.begin() + count);
    return count;
}
// Returns the step of one of a part's two rounds, −1 if there is none, and writes the bytes that each worker lacks.
EXPORTED int64_t foretrain_shard_round(std::shared_ptr<Shard>* shard, int64_t part, int64_t which, int64_t workers,
                                       int64_t* missing) {
    std::lock_guard<std::mutex> lock((*shard)->mutex);
    const Shard::Part::Round* round = (*shard)->part(part)->rounds[which].get();
    if (!round) return -1;
    for (int64_t worker = 0; worker < workers; ++worker) missing[worker] = round->coverage.missing(worker);
    return round->step;
}
// Returns where the sums of a part are, in rounds of that parity.
EXPORTED const char* foretrain_shard_sums(std::shared_ptr<Shard>* shard, int64_t part, int64_t which) {
    return (*shard)->part(part)->sums[which].get();
}
EXPORTED void foretrain_wire_serve(Wire* wire, int64_t main, int64_t aside, std::shared_ptr<Shard>* shard, int64_t worker,
                                   int64_t epoch, int64_t number, int64_t credit, int64_t slice) {
    wire->serve_worker(main, aside, shard ? *shard : nullptr, worker, epoch, number, credit, slice);
}
EXPORTED int64_t foretrain_wire_take_back(Wire* wire, int64_t connection, const uint8_t* header, const char* payload,
                                          int64_t length) {
    return wire->take_back(connection, header, payload, length);
}
EXPORTED int64_t foretrain_wire_put(Wire* wire, int64_t connection, int64_t part, int64_t step, int64_t start, int64_t end,
                                    int64_t absent) {
    return wire->put(connection, {part, step, start, end, absent});
}
EXPORTED int64_t foretrain_wire_heard(Wire* wire, int64_t connection) { return wire->heard(connection); }

EXPORTED std::shared_ptr<InFlight>* foretrain_inflight_new(const int64_t* sizes, int64_t count) {
    return new std::shared_ptr<InFlight>(new InFlight(std::vector<int64_t>(sizes, sizes + count)));
}
EXPORTED void foretrain_inflight_delete(std::shared_ptr<InFlight>* inflight) { delete inflight; }
EXPORTED void foretrain_inflight_add(std::shared_ptr<InFlight>* inflight, int64_t chunk, int64_t task, int64_t start,
                                    int64_t end, int64_t pull) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    (*inflight)->add(chunk, task, start, end, pull);
}
// Returns how many chunks are finished; `foretrain_inflight_finished` says which.
EXPORTED int64_t foretrain_inflight_acknowledge(std::shared_ptr<InFlight>* inflight, int64_t task, int64_t start,
                                               int64_t end) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    (*inflight)->acknowledge(task, start, end, (*inflight)->finished);
    return int64_t((*inflight)->finished.size());
}
// Returns how many ranges are new, `counts` how many chunks are finished and whether the task has landed.
EXPORTED int64_t foretrain_inflight_arrive(std::shared_ptr<InFlight>* inflight, int64_t task, int64_t start, int64_t end,
                                          int64_t* counts) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    auto found = (*inflight)->arrive(task, start, end, (*inflight)->finished);
    (*inflight)->fresh = found.first;
    counts[0] = int64_t((*inflight)->finished.size()), counts[1] = found.second;
    return int64_t(found.first.size());
}
// Writes the finished chunks, which are then forgotten.
EXPORTED void foretrain_inflight_finished(std::shared_ptr<InFlight>* inflight, int64_t* chunks) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    std::copy((*inflight)->finished.begin(), (*inflight)->finished.end(), chunks);
    (*inflight)->finished.clear();
}
// Writes the new ranges of the last arrival, or with `which` 1 and 2 all that was pushed and pulled and has not returned,
// each as task, start, end and chunk; returns how many there are, also where there is no room for them.
EXPORTED int64_t foretrain_inflight_ranges(std::shared_ptr<InFlight>* inflight, int64_t which, int64_t* to, int64_t most) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    int64_t count = 0;
    auto put = [&](int64_t task, const InFlight::Span& span) {
        if (count++ < most) *to++ = task, *to++ = span.start, *to++ = span.end, *to++ = span.chunk;
    };
    if (which == 0) {
        for (const InFlight::Span& each : (*inflight)->fresh) put(-1, each);
    } else {
        const auto& tasks = (*inflight)->out(which == 2);
        for (size_t task = 0; task < tasks.size(); ++task)
            for (const InFlight::Span& each : tasks[task]) put(int64_t(task), each);
    }
    return count;
}
// Says which parts there are: task, offset, size and shard of each, in order of tasks.
EXPORTED void foretrain_inflight_split(std::shared_ptr<InFlight>* inflight, const int64_t* parts, int64_t count) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    for (const int64_t* part = parts; count--; part += 4)
        (*inflight)->parts.push_back({part[0], part[1], part[2], part[3]});
}
// Lets wires write sums: to an address for each task.
EXPORTED void foretrain_inflight_place(std::shared_ptr<InFlight>* inflight, char* const* places, int64_t tasks) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    (*inflight)->places.assign(places, places + tasks);
    (*inflight)->absent.assign(tasks, false);
}
EXPORTED void foretrain_inflight_begin(std::shared_ptr<InFlight>* inflight, int64_t step) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    (*inflight)->step = step, (*inflight)->together = false;
    (*inflight)->absent.assign((*inflight)->absent.size(), false);
}
EXPORTED int64_t foretrain_inflight_together(std::shared_ptr<InFlight>* inflight) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    return (*inflight)->together;
}
// Returns when a wire took an answer last, ns of the monotonic clock.
EXPORTED int64_t foretrain_inflight_moved(std::shared_ptr<InFlight>* inflight) {
    std::lock_guard<std::mutex> lock((*inflight)->mutex);
    return (*inflight)->moved;
}
EXPORTED void foretrain_wire_take_answers(Wire* wire, int64_t main, int64_t aside, std::shared_ptr<InFlight>* inflight,
                                          int64_t shard, int64_t worker, int64_t epoch, int64_t slice) {
    wire->take_answers(main, std::shared_ptr<Taken>(new Taken{*inflight, aside, shard, worker, epoch, slice}));
}
EXPORTED int64_t foretrain_wire_push(Wire* wire, int64_t connection, int64_t step, int64_t flag, const int64_t* spans,
                                     int64_t count) {
    return wire->push(connection, step, flag, spans, count);
}
