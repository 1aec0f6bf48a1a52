// What torch.profiler asks of CUDA where it has no tracer of its own (CUPTI): an event before and behind every operator.
#include <torch/csrc/profiler/stubs/base.h>

#include "device.hpp"

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
  void rangePush(const char* name) const override { log().note(wire::ANNOTATION, 1, 0, name); }
  void rangePop() const override { log().note(wire::ANNOTATION, 0, 0, {}); }
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override { call(current_device()); }
  void synchronize() const override { log().ask(wire::DEVICE, stream_key(current_device(), 0)); }
};

}  // namespace

void install_profiler() {
  static Profiler profiler;
  torch::profiler::impl::registerCUDAMethods(&profiler);
}

}  // namespace foretrain
