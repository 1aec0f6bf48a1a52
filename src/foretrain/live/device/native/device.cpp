// Guard, streams, events, generator and hooks of device type "cuda".
#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <vector>

#include "memory.hpp"

namespace foretrain {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

int devices = 8;
thread_local int device_now = 0;
thread_local StreamId stream_now[MAX_DEVICES];
std::atomic<StreamId> streams[MAX_DEVICES];

Device cuda(int device) { return Device(DeviceType::CUDA, static_cast<DeviceIndex>(device)); }
Stream stream_of(int device, StreamId id) { return Stream(Stream::UNSAFE, cuda(device), id); }
int index_of(Device device) { return device.has_index() ? device.index() : device_now; }
StreamKey key_of(const Stream& stream) { return stream_key(stream.device_index(), stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = cuda(device_now);
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override { return cuda(device_now); }
  void setDevice(Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = index_of(device); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(devices); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device device) const override { return stream_of(index_of(device), stream_now[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    return stream_of(index_of(device), new_stream(index_of(device)));
  }
  Stream exchangeStream(Stream stream) const override {
    int device = stream.device_index();
    return stream_of(device, std::exchange(stream_now[device], stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override { return log().ask(wire::QUERY_STREAM, key_of(stream)).value; }
  void synchronizeStream(const Stream& stream) const override { log().ask(wire::STREAM, key_of(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override {
    log().ask(wire::DEVICE, stream_key(device < 0 ? device_now : device, 0));
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    EventId& id = static_cast<Event*>(*event)->id;
    log().forget(id);
    id = log().record(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) log().wait(key_of(stream), static_cast<Event*>(event)->id);
  }
  bool queryEvent(void* event) const override {
    EventId id = event ? static_cast<Event*>(event)->id : 0;
    return !id || log().ask(wire::QUERY_EVENT, 0, id).value;
  }
  void synchronizeEvent(void* event) const override {
    EventId id = event ? static_cast<Event*>(event)->id : 0;
    if (id) log().ask(wire::EVENT, 0, id);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    auto id = [](void* event) { return static_cast<Event*>(event)->id; };
    return static_cast<double>(log().ask(wire::ELAPSED, 0, id(begin), id(end)).value) / 1e9;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }
};

// Counts as CUDA's does: a seed and an offset. What it would draw is never needed but for small tensors.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device) : GeneratorImpl(cuda(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
    generator_of_values().set_current_seed(seed);
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::default_rng_seed_val);
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() >= 16, "RNG state is wrong size");
    auto words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto words = reinterpret_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  // CUDA graphs share a generator's state instead of copying it; a copy that is set at once does the same here.
  void graphsafe_set_state(const c10::intrusive_ptr<GeneratorImpl>& state) override {
    auto* other = static_cast<const Generator*>(state.get());
    seed_ = other->seed_;
    offset_ = other->offset_;
  }
  c10::intrusive_ptr<GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<GeneratorImpl>::reclaim(clone_impl());
  }
  Generator* clone_impl() const override {
    auto copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(devices); }
  int getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(device_now); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    int before = device_now;
    if (device >= 0) device_now = device;
    return static_cast<DeviceIndex>(before);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  Device getDeviceFromPtr(void*) const override { return cuda(device_now); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? device_now : device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory(); }
  void deviceSynchronize(DeviceIndex device) const override { log().ask(wire::DEVICE, stream_key(device, 0)); }
  std::string showConfig() const override { return "CUDA simulated by foretrain"; }
};

}  // namespace

int device_count() { return devices; }
void set_device_count(int count) { devices = count; }
int current_device() { return device_now; }
void set_current_device(int device) {
  TORCH_CHECK(device < devices, "CUDA error: invalid device ordinal; the simulated server has ", devices, " GPUs");
  if (device >= 0) device_now = device;
}
StreamId current_stream(int device) { return stream_now[device]; }
void set_current_stream(int device, StreamId stream) { stream_now[device] = stream; }
StreamId new_stream(int device) { return ++streams[device]; }

const at::Generator& default_generator(int device) {
  static const auto* generators = [] {
    auto made = new std::vector<at::Generator>;
    for (int device = 0; device < MAX_DEVICES; ++device) made->push_back(at::make_generator<Generator>(device));
    return made;
  }();
  return generators->at(device < 0 ? device_now : device);
}

at::Generator& generator_of_values() {
  static auto* generator = new at::Generator(at::make_generator<at::CPUGeneratorImpl>());
  return *generator;
}

void install_device() {
  static Guard guard;
  static Hooks hooks;
  c10::impl::registerDeviceGuard(DeviceType::CUDA, &guard);
  c10::SetAllocator(DeviceType::CUDA, &device_memory());
  // PyTorch keeps the hooks that it found when it was imported, the empty ones of a build without CUDA. They have no
  // members, so exchanging the table of virtual functions makes them ours.
  *reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) =
      *reinterpret_cast<void**>(&hooks);
}

}  // namespace foretrain
