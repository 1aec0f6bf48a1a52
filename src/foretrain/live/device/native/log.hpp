// Log of the rank: host clock, work on each stream, and queries of the executor. See foretrain/live/__init__.py.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "wire.hpp"

namespace foretrain {

using Time = std::int64_t;       // picoseconds since the rank began
using EventId = std::int64_t;    // from 1; 0 is the event that has always happened
using StreamKey = std::int32_t;  // device << 16 | stream of the device

inline StreamKey stream_key(int device, std::int64_t stream) { return device << 16 | static_cast<int>(stream); }

// Cost of an operator: time on the device, kernel name, and how well the time is known.
struct Cost {
  Time duration = 0;
  std::int32_t name = 0;
  std::uint32_t provenance = 0;
  double flops = 0;
  double sigma = 0;  // of the duration, relative
  bool copy_engine = false;  // it needs no multiprocessor
};

constexpr int PROVENANCES = 4;

// Totals of the work launched so far.
struct Counts {
  std::int64_t kernels = 0;
  double flops = 0;
  double recomputed = 0;  // of them: by forward operators that activation checkpointing runs again in backward passes
  Time times[PROVENANCES] = {};  // durations by provenance
  std::vector<Time> by_name;     // durations
  std::vector<double> spreads;   // by name: standard deviations of durations, ps, taken to err all alike
};

struct Answer {
  Time time = 0;
  std::int64_t value = 0;
  std::string payload;
};

// One launch, for a profiler in the script. It ran from the later of `before` and `host` to `after`.
struct Launch {
  wire::Kind kind;     // RUN of a single kernel, COLLECTIVE or MESSAGE
  std::int32_t code;   // number of the kernel's name, the operation, or 1 of a message that is received
  StreamKey stream;
  Time host;           // when it had been launched
  EventId before, after;
  std::int64_t group, bytes;
  std::int64_t function;  // in which it was launched, see Note [Profiled functions]; -1 if in none
};

// # Note [CUDA graphs]
// While a graph is captured, what is launched does not reach the executor but is kept, with events that are negative:
// they happen in no world, so that waiting for one outside of the graph is nothing. Replaying launches all of it again,
// with events of its own, from the stream that replays in place of the one that captured; the host pays for one launch.
struct Replay {
  StreamKey origin, here;
  std::unordered_map<EventId, EventId> events = {};  // captured, and what they are now

  StreamKey stream(StreamKey captured) const { return captured == origin ? here : captured; }
  EventId event(EventId captured) const {
    auto found = events.find(captured);
    return found == events.end() ? 0 : found->second;
  }
};

struct Graph {
  StreamKey origin = 0;
  Time work = 0;  // on `origin`
  std::vector<std::function<void(Replay&)>> launches;
};

// # Note [Launch queue]
// CUDA blocks the host that launches on a stream of which about 1,024 launches have not ended: "the buffer size is about
// 1000 kernels", and three streams have room for as many each (https://forums.developer.nvidia.com/t/68937). The host
// learns when launches have ended from marks, events on the stream at every 256th, of which it waits for the one 1,024
// launches ago. From one mark to the next it takes kernels to run one behind the other, which is the least that they
// take. So it never waits where it would not with CUDA: what it waits for ends without its help.
// Departs from CUDA in that events need no room, and that a GPU that waits for others is noticed at marks alone.
struct Queue {
  static constexpr int ROOM = 1024, MARKED = 256;
  struct Mark {
    std::int64_t launch;
    EventId event;
  };

  StreamKey stream;
  std::int64_t launched = 0;
  std::deque<Mark> marks = {};
  std::vector<Time> work = std::vector<Time>(ROOM + 1);  // of all launches before the n-th, at n % (ROOM + 1)
  Time reached = 0, reached_work = 0;                    // of a mark: when, and the work before it
};

// Thread-safe. All members lock, but for the host's clock, which one reads without.
class Log {
 public:
  // Sends frames to and takes answers from the socket `fd`, which it does not own.
  // Without a socket, as in a child of the rank, it is cut off: what the process does on a GPU is nobody's.
  void connect(int fd) {
    cut_off_ = connected() && fd < 0;
    socket_ = fd;
  }
  bool connected() const { return socket_ >= 0; }
  void check_owner() const {
    TORCH_CHECK(!cut_off_, "Cannot re-initialize CUDA in forked subprocess: a simulated rank is one process, and those that "
                "it forks have no GPU; keep their work on the host, or let foretrain simulate start a process for each GPU");
  }

  Time host() const { return host_.load(std::memory_order_relaxed); }
  // Duration of all kernels launched so far.
  Time kernel_time() const { return kernel_time_.load(std::memory_order_relaxed); }
  // The host computes, or is taken to compute, for `time`.
  void spend(Time time) { host_.fetch_add(time, std::memory_order_relaxed); }
  void spend_until(Time time) {
    if (time > host()) host_.store(time, std::memory_order_relaxed);
  }
  // Host time to launch one kernel.
  void set_launch(Time launch) { launch_ = launch; }
  // From now on a launch that is not free takes the CPU time of this process since the one before.
  void measure_host();
  Time launch() const { return launch_; }
  // Sends every kernel of a run along with it.
  void set_tracing(bool tracing) { tracing_ = tracing; }
  bool tracing() const { return tracing_; }

  // Remembers launches from here on, with events before and behind them. Changes no time: recording costs none.
  void watch();
  // Ends that; the launches since, whose events live until `release`.
  std::vector<Launch> watched();
  void release(const std::vector<Launch>& launches);

  // Whoever launches something but a kernel on `stream`, which takes `work` at least, calls this before; see Note
  // [Launch queue]. As `ask`.
  void wait_for_room(StreamKey stream, Time work = 0);
  // One kernel behind what is on `stream`.
  void kernel(StreamKey stream, const Cost& cost, bool recomputing = false);
  EventId record(StreamKey stream);
  void wait(StreamKey stream, EventId event);
  EventId collective(StreamKey stream, wire::Operation operation, std::int64_t group, std::int64_t bytes, int root,
                     std::string_view contribution);
  EventId message(StreamKey stream, bool receive, std::int64_t group, int peer, std::int64_t bytes, bool more,
                  std::string_view contribution);
  void splits(const std::vector<std::int64_t>& bytes);
  void group(std::int64_t number, std::int64_t family, const std::vector<std::int32_t>& ranks);
  void forget(EventId event);
  // Exchanges by a policy: what there is to exchange, that another round of it begins on `stream`, and that a gradient is
  // there. The event that `ready` returns is made to happen by the executor, when the sum has come back.
  void tasks(std::int64_t number, StreamKey lane, std::string_view announcement);
  void begin(StreamKey stream, std::int64_t number);
  EventId ready(StreamKey stream, std::int64_t number, std::uint32_t task);
  void note(wire::Note code, std::int64_t a, std::int64_t b, std::string_view payload);

  // Stops the thread until the executor answers; the host's clock then is the answer's time, if that is later.
  // Throws DistBackendError, as NCCL where peers are gone, with the executor's words if it says no, or if it is gone
  // itself. Who holds a lock that Python code may wait for must keep the interpreter as well: `yielding` false.
  Answer ask(wire::Question question, StreamKey stream, std::int64_t a = 0, std::int64_t b = 0, bool yielding = true);

  void begin_capture(StreamKey origin);
  std::shared_ptr<Graph> end_capture();
  bool capturing() const { return captured_ != nullptr; }
  void replay(const Graph& graph, StreamKey stream);

  Counts counts();

 private:
  struct Run {  // kernels on one stream that have not been written yet
    StreamKey stream = 0;
    Time work = 0, floor = 0, copied = 0;
    std::uint32_t kernels = 0;
    std::string traced;
  };

  Run& run_on(StreamKey stream);
  Queue& queue_on(StreamKey stream);
  void emptied(wire::Question question, StreamKey stream);
  void put(StreamKey stream, const Cost& cost, bool recomputing);
  EventId capture(std::function<EventId(Replay&)> launch);
  void close(Run& run);
  void close_all();
  wire::Record& write(wire::Kind kind, StreamKey stream, std::string_view payload = {});
  void send(wire::State state);
  void spend_on_launch();
  void send_if_long();
  void send_running();
  void send_all(const void* data, std::size_t size);
  void receive_all(void* data, std::size_t size);
  // Host time of one more query; see Note [Polling].
  Time poll();

  std::recursive_mutex mutex_;
  std::atomic<Time> host_{0};
  Counts counts_;
  std::atomic<Time> kernel_time_{0};
  Time launch_ = 6'000'000;
  Time since_ = -1;  // CPU time of this process at the last launch; negative where it is not measured
  bool tracing_ = false;
  bool cut_off_ = false;
  int socket_ = -1;
  EventId events_ = 0, captured_events_ = 0;
  std::shared_ptr<Graph> captured_;
  std::vector<wire::Record> records_;
  std::string payload_;
  std::vector<Run> runs_;  // a handful of streams at most: searched from the last used
  std::vector<Queue> queues_;
  std::vector<EventId> forgotten_;
  std::int64_t polled_ = -1;  // launches and events when the host last asked whether something has happened
  Time polling_since_ = 0;
  bool watching_ = false;
  std::vector<Launch> launches_;
  std::vector<EventId> held_;  // forgotten while they were watched
};

// The function that this thread is in, of those that a profiler observes; -1 if in none.
std::int64_t& profiled_function();

// The one log of this process.
Log& log();

}  // namespace foretrain
