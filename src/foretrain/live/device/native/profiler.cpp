// What torch.profiler is told: which functions the host was in, by its virtual clock, and what they launched; for its
// legacy state, events before and behind every operator. And the ranges that a script names, for traces.
#include "profiler.hpp"

#include <ATen/record_function.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <mutex>

#include "device.hpp"
#include "kernels.hpp"

namespace foretrain {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

struct Profiler final : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event, std::int64_t* cpu_ns) const override {
    if (device) *device = static_cast<c10::DeviceIndex>(current_device());
    auto made = std::make_shared<Event>();
    made->id = log().record(current_key(current_device()));
    *event = std::move(made);
    if (cpu_ns) *cpu_ns = log().host() / 1000;
  }
  float elapsed(const ProfilerVoidEventStub* begin, const ProfilerVoidEventStub* end) const override {  // us
    auto id = [](const ProfilerVoidEventStub* event) { return static_cast<Event*>(event->get())->id; };
    return static_cast<float>(static_cast<double>(log().ask(wire::ELAPSED, 0, id(begin), id(end)).value) / 1e6);
  }
  void mark(const char*) const override {}
  void rangePush(const char* name) const override { annotate(name); }
  void rangePop() const override { annotate_end(); }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override { call(current_device()); }
  void synchronize() const override { log().ask(wire::DEVICE, stream_key(current_device(), 0)); }
};

// Threads of the host that name ranges: 0 is the script's, others by when they first did.
std::int64_t this_thread() {
  static std::atomic<std::int64_t> threads{0};
  static thread_local std::int64_t number = threads++;
  return number;
}

// Whoever ends a range may be another thread.
struct Named final : at::ObserverContext {
  std::int64_t thread = this_thread();
};

std::unique_ptr<at::ObserverContext> range_begins(const at::RecordFunction& function) {
  if (!log().tracing()) return nullptr;
  annotate(function.name());
  return std::make_unique<Named>();
}

void range_ends(const at::RecordFunction&, at::ObserverContext* named) {
  if (named) log().note(wire::ANNOTATION, 0, static_cast<Named*>(named)->thread, {});
}

// # Note [Profiled functions]
// PyTorch's profiler takes down when functions begin and end by the real clock. This observer takes down the same
// functions by the virtual one. Both are observers of the thread that profiles and of those that work for it, so that
// on each thread they see the same functions in the same order: the n-th of one is the n-th of the other.
std::mutex profiling;
std::vector<Function> functions;
std::int64_t session = 0;
at::CallbackHandle observer = at::INVALID_CALLBACK_HANDLE;

struct Inside final : at::ObserverContext {
  std::int64_t session, function, outer;
  std::uint64_t thread;
};

std::unique_ptr<at::ObserverContext> function_begins(const at::RecordFunction& function) {
  auto inside = std::make_unique<Inside>();
  inside->thread = at::RecordFunction::currentThreadId();
  std::lock_guard lock(profiling);
  inside->session = session;
  inside->function = static_cast<std::int64_t>(functions.size());
  inside->outer = std::exchange(profiled_function(), inside->function);
  functions.push_back({function.threadId(), log().host(), -1, c10::getTimeSinceEpoch(), -1});
  return inside;
}

void function_ends(const at::RecordFunction&, at::ObserverContext* context) {
  auto* inside = static_cast<Inside*>(context);
  if (!inside) return;
  std::lock_guard lock(profiling);
  if (inside->thread == at::RecordFunction::currentThreadId())
    profiled_function() = inside->session == session ? inside->outer : -1;
  if (inside->session == session) {
    functions[inside->function].end = log().host();
    functions[inside->function].real_end = c10::getTimeSinceEpoch();
  }
}

}  // namespace

void install_profiler() {
  static Profiler profiler;
  torch::profiler::impl::registerCUDAMethods(&profiler);
  this_thread();
  at::addGlobalCallback(at::RecordFunctionCallback(range_begins, range_ends).scopes({at::RecordScope::USER_SCOPE}));
}

void annotate(std::string_view name) { log().note(wire::ANNOTATION, 1, this_thread(), name); }
void annotate_end() { log().note(wire::ANNOTATION, 0, this_thread(), {}); }

void begin_profile() {
  std::lock_guard lock(profiling);
  ++session;
  functions.clear();
  log().watch();
  observer = at::addThreadLocalCallback(at::RecordFunctionCallback(function_begins, function_ends));
}

Profile end_profile(bool launches) {
  at::removeCallback(std::exchange(observer, at::INVALID_CALLBACK_HANDLE));
  Profile profile;
  {
    std::lock_guard lock(profiling);
    ++session;
    profile.functions = std::exchange(functions, {});
    profiled_function() = -1;
  }
  auto watched = log().watched();
  if (launches) {
    log().ask(wire::DEVICE, stream_key(current_device(), 0));
    EventId now = log().record(current_key(current_device()));
    Time end = log().host();
    auto since_end = [=](EventId event) { return log().ask(wire::ELAPSED, 0, now, event).value; };
    for (const auto& launch : watched) {
      Time begin = std::max(launch.host, end + since_end(launch.before));
      profile.launches.push_back({launch, begin, end + since_end(launch.after)});
    }
    log().forget(now);
  }
  log().release(watched);
  return profile;
}

std::string name_of(const Launch& launch) {
  constexpr const char* OPERATIONS[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
                                        "all_to_all", "gather",     "scatter",        "barrier"};
  if (launch.kind == wire::RUN) return kernel_names().at(launch.code);
  if (launch.kind == wire::MESSAGE) return launch.code ? "nccl:recv" : "nccl:send";
  return std::string("nccl:") + OPERATIONS[launch.code];
}

}  // namespace foretrain
