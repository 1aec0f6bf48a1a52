#include "log.hpp"

#include <Python.h>
#include <c10/util/Exception.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace foretrain {
namespace {

constexpr std::size_t LONG_LOG = 512;  // records after which a rank tells the executor, so that others may go on

// # Note [Polling]
// cudaEventQuery costs the host a microsecond: else a loop that polls would never see time pass. While a loop does
// nothing else, it costs it 1/512 of the time that the loop has taken, if that is longer, so that waiting long takes a
// few thousand queries, not millions, and is over 0.2 % late at most.
constexpr Time POLL = 1'000'000;
constexpr Time POLLS = 512;

// Of all threads of this process, ps.
Time cpu_time() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (static_cast<Time>(now.tv_sec) * 1'000'000'000 + now.tv_nsec) * 1000;
}

// Others need the interpreter while this thread stands still.
class WithoutInterpreter {
 public:
  explicit WithoutInterpreter(bool yielding) : state_(yielding && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutInterpreter() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace

std::int64_t& profiled_function() {
  static thread_local std::int64_t function = -1;
  return function;
}

Log& log() {
  static Log* log = new Log;  // never destroyed: tensors may outlive static objects
  return *log;
}

Log::Run& Log::run_on(StreamKey stream) {
  for (auto run = runs_.rbegin(); run != runs_.rend(); ++run)
    if (run->stream == stream) return *run;
  runs_.push_back(Run{stream});
  return runs_.back();
}

Queue& Log::queue_on(StreamKey stream) {
  for (auto& queue : queues_)
    if (queue.stream == stream) return queue;
  return queues_.emplace_back(Queue{stream});
}

void Log::wait_for_room(StreamKey stream, Time work) {
  std::unique_lock lock(mutex_);
  if (captured_ || !connected()) return;
  Queue& queue = queue_on(stream);
  std::int64_t launch = queue.launched++;
  Time& next = queue.work[(launch + 1) % (Queue::ROOM + 1)];
  Time ended = next;  // of the launches before the one that makes room
  next = queue.work[launch % (Queue::ROOM + 1)] + work;
  if (launch >= Queue::ROOM) spend_until(queue.reached + ended - queue.reached_work);
  if (launch % Queue::MARKED || !launch) return;
  queue.marks.push_back({launch, record(stream)});
  auto mark = queue.marks.front();
  if (mark.launch > launch - Queue::ROOM) return;
  queue.marks.pop_front();
  lock.unlock();
  auto answer = ask(wire::ROOM, stream, mark.event);
  lock.lock();
  forget(mark.event);
  Queue& now = queue_on(stream);  // which may have moved
  now.reached = answer.value;
  now.reached_work = ended;
}

// All that was launched on `stream`, or on all streams of its device, has ended.
void Log::emptied(wire::Question question, StreamKey stream) {
  for (auto& queue : queues_) {
    if (question == wire::STREAM ? queue.stream != stream : queue.stream >> 16 != stream >> 16) continue;
    for (const auto& mark : queue.marks) forget(mark.event);
    queue.marks.clear();
  }
}

void Log::measure_host() { since_ = cpu_time(); }

void Log::spend_on_launch() {
  if (since_ < 0) return spend(launch_);
  Time now = cpu_time();
  if (launch_) spend(now - since_);
  since_ = now;
}

void Log::kernel(StreamKey stream, const Cost& cost, bool recomputing) {
  wait_for_room(stream, cost.duration);
  std::lock_guard lock(mutex_);
  spend_on_launch();
  if (captured_) {
    if (stream == captured_->origin) captured_->work += cost.duration;
    captured_->launches.emplace_back([=, this](Replay& now) { put(now.stream(stream), cost, recomputing); });
  } else {
    put(stream, cost, recomputing);
  }
}

void Log::put(StreamKey stream, const Cost& cost, bool recomputing) {
  Time now = host();
  counts_.kernels += 1;
  counts_.flops += cost.flops;
  counts_.recomputed += recomputing ? cost.flops : 0;
  counts_.times[cost.provenance] += cost.duration;
  kernel_time_.fetch_add(cost.duration, std::memory_order_relaxed);
  if (counts_.spreads.size() <= static_cast<std::size_t>(cost.name)) {
    counts_.by_name.resize(cost.name + 1);
    counts_.spreads.resize(cost.name + 1);
  }
  counts_.by_name[cost.name] += cost.duration;
  counts_.spreads[cost.name] += static_cast<double>(cost.duration) * cost.sigma;
  EventId before = watching_ ? record(stream) : 0;
  Run& run = run_on(stream);
  run.work += cost.duration;
  if (cost.copy_engine) run.copied += cost.duration;
  run.floor = std::max(run.floor, now) + cost.duration;
  run.kernels += 1;
  if (tracing_) {
    wire::Kernel kernel{cost.name, cost.provenance, now, cost.duration};
    run.traced.append(reinterpret_cast<const char*>(&kernel), sizeof kernel);
  }
  if (watching_)
    launches_.push_back({wire::RUN, cost.name, stream, now, before, record(stream), 0, 0, profiled_function()});
}

Counts Log::counts() {
  std::lock_guard lock(mutex_);
  return counts_;
}

void Log::close(Run& run) {
  if (!run.kernels) return;
  auto& record = write(wire::RUN, run.stream, run.traced);
  record.a = run.work;
  record.b = run.floor;
  record.c = run.copied;
  record.extra = run.kernels;
  run = Run{run.stream};
}

void Log::close_all() {
  for (auto& run : runs_) close(run);
}

wire::Record& Log::write(wire::Kind kind, StreamKey stream, std::string_view payload) {
  wire::Record record{};
  record.kind = kind;
  record.stream = stream;
  record.host = host();
  record.payload = static_cast<std::uint32_t>(payload.size());
  payload_.append(payload);
  records_.push_back(record);
  return records_.back();
}

EventId Log::record(StreamKey stream) {
  std::lock_guard lock(mutex_);
  if (captured_) return capture([=, this](Replay& now) { return record(now.stream(stream)); });
  close(run_on(stream));
  write(wire::RECORD, stream).a = ++events_;
  send_if_long();
  return events_;
}

void Log::wait(StreamKey stream, EventId event) {
  if (!event) return;
  std::lock_guard lock(mutex_);
  if (event < 0) {
    if (captured_) captured_->launches.emplace_back([=, this](Replay& now) { wait(now.stream(stream), now.event(event)); });
    return;
  }
  if (captured_) return;  // for what was before the graph, which whoever replays it is behind
  close(run_on(stream));
  write(wire::WAIT, stream).a = event;
}

EventId Log::collective(StreamKey stream, wire::Operation operation, std::int64_t group, std::int64_t bytes, int root,
                        std::string_view contribution) {
  std::lock_guard lock(mutex_);
  if (captured_) {
    return capture([=, this](Replay& now) { return collective(now.stream(stream), operation, group, bytes, root, {}); });
  }
  EventId before = watching_ ? this->record(stream) : 0;
  close(run_on(stream));
  auto& record = write(wire::COLLECTIVE, stream, contribution);
  record.code = operation;
  record.a = ++events_;
  record.b = group;
  record.c = bytes;
  record.extra = static_cast<std::uint32_t>(root);
  if (watching_)
    launches_.push_back(
        {wire::COLLECTIVE, operation, stream, host(), before, events_, group, bytes, profiled_function()});
  send_if_long();
  return events_;
}

EventId Log::message(StreamKey stream, bool receive, std::int64_t group, int peer, std::int64_t bytes, bool more,
                     std::string_view contribution) {
  std::lock_guard lock(mutex_);
  if (captured_) {
    return capture(
        [=, this](Replay& now) { return message(now.stream(stream), receive, group, peer, bytes, more, {}); });
  }
  EventId before = watching_ ? this->record(stream) : 0;
  close(run_on(stream));
  auto& record = write(wire::MESSAGE, stream, contribution);
  record.flag = more;
  record.code = receive;
  record.a = ++events_;
  record.b = group;
  record.c = bytes;
  record.extra = static_cast<std::uint32_t>(peer);
  if (watching_)
    launches_.push_back({wire::MESSAGE, receive, stream, host(), before, events_, group, bytes, profiled_function()});
  if (!more) send_running();  // the peer waits for it
  return events_;
}

void Log::splits(const std::vector<std::int64_t>& bytes) {
  std::lock_guard lock(mutex_);
  if (captured_) {
    captured_->launches.emplace_back([=, this](Replay&) { splits(bytes); });
    return;
  }
  write(wire::SPLITS, 0, {reinterpret_cast<const char*>(bytes.data()), bytes.size() * sizeof bytes[0]});
}

void Log::group(std::int64_t number, std::int64_t family, const std::vector<std::int32_t>& ranks) {
  std::lock_guard lock(mutex_);
  auto& record = write(wire::GROUP, 0, {reinterpret_cast<const char*>(ranks.data()), ranks.size() * sizeof ranks[0]});
  record.a = number;
  record.b = family;
}

void Log::forget(EventId event) {
  if (event <= 0) return;
  std::lock_guard lock(mutex_);
  (watching_ ? held_ : forgotten_).push_back(event);
}

void Log::watch() {
  std::lock_guard lock(mutex_);
  watching_ = true;
  launches_.clear();
}

std::vector<Launch> Log::watched() {
  std::lock_guard lock(mutex_);
  watching_ = false;
  return std::exchange(launches_, {});
}

void Log::release(const std::vector<Launch>& launches) {
  std::lock_guard lock(mutex_);
  forgotten_.insert(forgotten_.end(), held_.begin(), held_.end());
  held_.clear();
  for (const auto& launch : launches) {
    forgotten_.push_back(launch.before);
    if (launch.kind == wire::RUN) forgotten_.push_back(launch.after);  // others have owners
  }
}

void Log::tasks(std::int64_t number, StreamKey lane, std::string_view announcement) {
  std::lock_guard lock(mutex_);
  write(wire::TASKS, lane, announcement).a = number;
}

void Log::begin(StreamKey stream, std::int64_t number) {
  std::lock_guard lock(mutex_);
  close(run_on(stream));
  write(wire::BEGIN, stream).b = number;
}

EventId Log::ready(StreamKey stream, std::int64_t number, std::uint32_t task) {
  std::lock_guard lock(mutex_);
  close(run_on(stream));
  auto& record = write(wire::READY, stream);
  record.a = ++events_;
  record.b = number;
  record.extra = task;
  send_if_long();
  return events_;
}

void Log::note(wire::Note code, std::int64_t a, std::int64_t b, std::string_view payload) {
  std::lock_guard lock(mutex_);
  auto& record = write(wire::NOTE, 0, payload);
  record.code = code;
  record.a = a;
  record.b = b;
}

void Log::begin_capture(StreamKey origin) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!captured_, "a CUDA graph is being captured already");
  captured_ = std::make_shared<Graph>();
  captured_->origin = origin;
}

std::shared_ptr<Graph> Log::end_capture() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(captured_, "no CUDA graph is being captured");
  return std::exchange(captured_, nullptr);
}

// Keeps what records an event; returns the event's number in the graph.
EventId Log::capture(std::function<EventId(Replay&)> launch) {
  EventId event = --captured_events_;
  captured_->launches.emplace_back([event, launch = std::move(launch)](Replay& now) { now.events[event] = launch(now); });
  return event;
}

void Log::replay(const Graph& graph, StreamKey stream) {
  wait_for_room(stream, graph.work);
  std::lock_guard lock(mutex_);
  spend(launch_);
  Replay now{graph.origin, stream};
  for (const auto& launch : graph.launches) launch(now);
  for (auto [captured, event] : now.events) forget(event);
}

Time Log::poll() {
  std::int64_t launched = counts_.kernels + events_;
  if (std::exchange(polled_, launched) != launched) polling_since_ = host();
  return std::max(POLL, (host() - polling_since_) / POLLS);
}

Answer Log::ask(wire::Question question, StreamKey stream, std::int64_t a, std::int64_t b, bool yielding) {
  WithoutInterpreter others_may_run(yielding);
  std::lock_guard lock(mutex_);
  bool of_graph = (question == wire::EVENT || question == wire::QUERY_EVENT) && a < 0;
  if (of_graph) return {host(), 1, {}};
  bool allowed = question == wire::EVENT || question == wire::QUERY_EVENT || question == wire::VALUES;
  TORCH_CHECK(!captured_ || allowed, "CUDA error: operation not permitted when stream is capturing");
  check_owner();
  TORCH_CHECK(connected(), "the simulated GPU has no executor to ask; start the script with `foretrain simulate`");
  close_all();
  if (question == wire::QUERY_STREAM || question == wire::QUERY_EVENT) spend(poll());
  auto& record = write(wire::ASK, stream);
  record.code = question;
  record.a = a;
  record.b = b;
  send(wire::ASKING);
  wire::Answer head;
  receive_all(&head, sizeof head);
  Answer answer{head.time, head.value, std::string(head.payload, '\0')};
  receive_all(answer.payload.data(), answer.payload.size());
  TORCH_CHECK_WITH(DistBackendError, head.status == 0, answer.payload);
  spend_until(head.time);
  if (question == wire::STREAM || question == wire::DEVICE) emptied(question, stream);
  return answer;
}

void Log::send_if_long() {
  if (records_.size() >= LONG_LOG) send_running();
}

// The frame says that nothing to come is launched before the clock now, so the runs that are open go with it.
void Log::send_running() {
  close_all();
  send(wire::RUNNING);
}

void Log::send(wire::State state) {
  if (!connected()) {
    // Before the fork nobody listens, and what happens there belongs to no rank.
    records_.clear();
    payload_.clear();
    forgotten_.clear();
    return;
  }
  if (!forgotten_.empty()) {
    wire::Record record{};
    record.kind = wire::FORGET;
    record.payload = static_cast<std::uint32_t>(forgotten_.size() * sizeof forgotten_[0]);
    // Behind all records that may still name these events, but a question stays last; it has no payload.
    payload_.append(reinterpret_cast<const char*>(forgotten_.data()), record.payload);
    records_.insert(records_.end() - (state == wire::ASKING), record);
    forgotten_.clear();
  }
  wire::Header header{static_cast<std::uint32_t>(records_.size()), static_cast<std::uint32_t>(payload_.size()), host(),
                      state, 0};
  std::string frame(reinterpret_cast<const char*>(&header), sizeof header);
  frame.append(reinterpret_cast<const char*>(records_.data()), records_.size() * sizeof records_[0]);
  frame.append(payload_);
  records_.clear();
  payload_.clear();
  send_all(frame.data(), frame.size());
}

void Log::send_all(const void* data, std::size_t size) {
  for (auto at = static_cast<const char*>(data); size;) {
    ssize_t sent = ::send(socket_, at, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    TORCH_CHECK_WITH(DistBackendError, sent > 0, "the simulation has ended: ", std::strerror(errno));
    at += sent;
    size -= static_cast<std::size_t>(sent);
  }
}

void Log::receive_all(void* data, std::size_t size) {
  for (auto at = static_cast<char*>(data); size;) {
    ssize_t got = ::recv(socket_, at, size, 0);
    if (got < 0 && errno == EINTR) continue;
    TORCH_CHECK_WITH(DistBackendError, got > 0, "the simulation has ended");
    at += got;
    size -= static_cast<std::size_t>(got);
  }
}

}  // namespace foretrain
