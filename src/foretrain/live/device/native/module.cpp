// What Python sees of the device: module `foretrain_simulated_gpu`.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include "device.hpp"
#include "expectations.hpp"
#include "group.hpp"
#include "kernels.hpp"
#include "memory.hpp"
#include "profiler.hpp"

namespace py = pybind11;
using namespace foretrain;

namespace {

py::object described(const at::Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  auto numbers = [](c10::IntArrayRef values) {
    py::tuple all(values.size());
    for (std::size_t k = 0; k < values.size(); ++k) all[k] = values[k];
    return all;
  };
  std::string type = c10::toString(tensor.scalar_type());
  return py::make_tuple(numbers(tensor.sizes()), numbers(tensor.strides()), type, tensor.device().str());
}

// An argument as Python's cost model sees it: tensors as (shape, stride, dtype, device), dtype with
// C++'s name, lists as tuples.
py::object described(const c10::IValue& value) {
  if (value.isTensor()) return described(value.toTensor());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isTensorList()) {
    auto list = value.toTensorList();
    py::tuple all(list.size());
    for (std::size_t k = 0; k < list.size(); ++k) all[k] = described(at::Tensor(list.get(k)));
    return all;
  }
  if (value.isList()) {
    auto list = value.toListRef();
    py::tuple all(list.size());
    for (std::size_t k = 0; k < list.size(); ++k) all[k] = described(list[k]);
    return all;
  }
  return py::none();
}

py::tuple described(c10::ArrayRef<c10::IValue> values) {
  py::tuple all(values.size());
  for (std::size_t k = 0; k < values.size(); ++k) all[k] = described(values[k]);
  return all;
}

// Keeps a Python callable for as long as the process lives, and calls it with the interpreter's lock.
std::shared_ptr<py::function> kept(py::function function) {
  return {new py::function(std::move(function)), [](py::function*) {}};
}

void take_price(py::function function) {
  set_price([call = kept(std::move(function))](const std::string& name, c10::ArrayRef<c10::IValue> arguments,
                                               c10::ArrayRef<c10::IValue> results) {
    py::gil_scoped_acquire lock;
    py::tuple answer = (*call)(name, described(arguments), described(results));
    return Cost{answer[0].cast<Time>(), number_of(answer[1].cast<std::string>()), answer[2].cast<std::uint32_t>(),
                answer[3].cast<double>(), answer[4].cast<double>()};
  });
}

void take_on_unreal_read(py::function function) {
  set_on_unreal_read([call = kept(std::move(function))](const std::string& what) {
    py::gil_scoped_acquire lock;
    (*call)(what);
  });
}

void take_routers(py::function draw, py::function counts) {
  set_routers(
      [call = kept(std::move(draw))] {
        py::gil_scoped_acquire lock;
        return (*call)().cast<std::int64_t>();
      },
      [call = kept(std::move(counts))](std::int64_t draw, std::int64_t experts, std::int64_t total, std::int64_t top) {
        py::gil_scoped_acquire lock;
        return (*call)(draw, experts, total, top).cast<std::vector<std::int64_t>>();
      });
}

// DDP's reducer times itself with one.
struct ReducerTimer final : c10d::Timer {
  explicit ReducerTimer(c10::Device) {}
  void record(Event event) override { getTimeRef(event) = log().host() / 1000; }
  std::optional<int64_t> measureDifference(Event begin, Event end) override {
    auto from = getTimeRef(begin), to = getTimeRef(end);
    return from < 0 || to < 0 ? std::nullopt : std::optional(to - from);
  }
};

py::dict described(const c10::CachingAllocator::Stat& stat) {
  py::dict all;
  all["current"] = stat.current;
  all["peak"] = stat.peak;
  all["allocated"] = stat.allocated;
  all["freed"] = stat.freed;
  return all;
}

py::dict described(const c10::CachingAllocator::StatArray& stats) {
  py::dict all;
  const char* names[] = {"all", "small_pool", "large_pool"};
  for (std::size_t k = 0; k < stats.size(); ++k) all[names[k]] = described(stats[k]);
  return all;
}

// As `torch._C._cuda_memoryStats` names them.
py::dict described(const c10::CachingDeviceAllocator::DeviceStats& stats) {
  py::dict all;
  all["allocation"] = described(stats.allocation);
  all["segment"] = described(stats.segment);
  all["active"] = described(stats.active);
  all["inactive_split"] = described(stats.inactive_split);
  all["allocated_bytes"] = described(stats.allocated_bytes);
  all["reserved_bytes"] = described(stats.reserved_bytes);
  all["active_bytes"] = described(stats.active_bytes);
  all["inactive_split_bytes"] = described(stats.inactive_split_bytes);
  all["requested_bytes"] = described(stats.requested_bytes);
  all["reserved_bytes_by_private_pools"] = py::dict();
  all["oversize_allocations"] = described(stats.oversize_allocations);
  all["oversize_segments"] = described(stats.oversize_segments);
  all["num_alloc_retries"] = stats.num_alloc_retries;
  all["num_ooms"] = stats.num_ooms;
  all["num_sync_all_streams"] = stats.num_sync_all_streams;
  all["num_device_alloc"] = stats.num_device_alloc;
  all["num_device_free"] = stats.num_device_free;
  all["max_split_size"] = stats.max_split_size;
  return all;
}

// As `torch.cuda.memory_snapshot` shows segments and their blocks.
py::list described(const std::vector<SegmentInfo>& segments, int device) {
  py::list all;
  for (const auto& segment : segments) {
    py::list blocks;
    for (const auto& block : segment.blocks) {
      py::dict one;
      one["address"] = block.address;
      one["size"] = block.size;
      one["requested_size"] = block.requested_size;
      one["state"] = block.state();
      one["frames"] = py::list();
      blocks.append(one);
    }
    py::dict one;
    one["device"] = device;
    one["address"] = segment.address;
    one["total_size"] = segment.total_size;
    one["allocated_size"] = segment.allocated_size;
    one["active_size"] = segment.active_size;
    one["requested_size"] = segment.requested_size;
    one["stream"] = segment.stream;
    one["segment_type"] = segment.is_large ? "large" : "small";
    one["segment_pool_id"] = py::make_tuple(0, 0);
    one["is_expandable"] = segment.is_expandable;
    one["frames"] = py::list();
    one["blocks"] = blocks;
    all.append(one);
  }
  return all;
}

// For `foretrain.live.device.profiler`.
py::tuple described(const Profile& profile) {
  py::list functions, launches;
  for (const auto& one : profile.functions)
    functions.append(py::make_tuple(one.thread, one.begin, one.end, one.real_begin, one.real_end));
  for (const auto& [one, begin, end] : profile.launches)
    launches.append(py::make_tuple(name_of(one), one.stream, one.host, begin, end, one.bytes, one.function));
  return py::make_tuple(functions, launches);
}

int device_or_current(int device) { return device < 0 ? current_device() : device; }

}  // namespace

namespace c10d {
// A build for CUDA has one already.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, ReducerTimer)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The fake CUDA device of foretrain; see foretrain.live.device.";

  m.def("install", [](const std::vector<std::string>& operators, const std::vector<std::string>& generated,
                      const std::vector<std::string>& iterated) {
    install_device();
    install_kernels(operators, generated, iterated);
    install_profiler();
  });
  m.def("native_operators", &native_operators);
  m.def("set_price", &take_price);
  m.def("set_on_unreal_read", &take_on_unreal_read);
  m.def("set_routers", &take_routers);

  m.def("set_capability", [](int major, int minor) { set_capability(10 * major + minor); });
  m.def("set_device_count", &set_device_count);
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("exchange_device", [](int device) {
    int before = current_device();
    if (device >= 0) set_current_device(device);
    return before;
  });
  m.def("current_stream", [](int device) { return current_stream(device_or_current(device)); });
  m.def("set_stream", [](std::int64_t stream, int device) { set_current_stream(device, stream); });
  m.def("synchronize", [](int device) { log().ask(wire::DEVICE, stream_key(device_or_current(device), 0)); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("elapsed", [](std::int64_t begin, std::int64_t end) {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    auto id = [](std::int64_t event) { return reinterpret_cast<Event*>(event)->id; };
    return static_cast<double>(log().ask(wire::ELAPSED, 0, id(begin), id(end)).value) / 1e9;
  });

  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph").def("replay", [](const Graph& graph) {
    log().replay(graph, current_key(current_device()));
  });
  m.def("begin_capture", [] { log().begin_capture(current_key(current_device())); });
  m.def("end_capture", [] { return log().end_capture(); });
  m.def("capturing", [] { return log().capturing(); });

  m.def("set_capacity", &set_capacity);
  m.def("set_allocator_settings", &set_allocator_settings);
  m.def("memory_info", [](int device) { return device_memory().getMemoryInfo(device_or_current(device)); });
  m.def("reset_peak", [](int device) { device_memory().resetPeakStats(device_or_current(device)); });
  m.def("reset_accumulated", [](int device) { device_memory().resetAccumulatedStats(device_or_current(device)); });
  m.def("empty_cache", [](py::args) { device_memory().emptyCache({0, 0}); });
  m.def("memory_stats", [](int device) { return described(device_memory().getDeviceStats(device_or_current(device))); });
  m.def("set_memory_fraction", [](double fraction, int device) {
    allocator_of(device_or_current(device)).set_memory_fraction(fraction);
  });
  m.def("memory_fraction", [](int device) { return allocator_of(device_or_current(device)).memory_fraction(); });
  m.def("memory_needed", [](int device) {
    auto statistics = allocator_of(device).statistics();
    py::dict all, breakdown;
    const char* names[] = {"parameters", "gradients", "optimizer", "activations", "workspace", "other"};
    for (std::size_t tag = 0; tag <= kOther; ++tag) breakdown[names[tag]] = statistics.bytes_per_tag_at_most[tag];
    all["allocated"] = statistics.most_allocated;
    all["reserved"] = statistics.most_reserved;
    all["retries"] = statistics.all_retries;
    all["breakdown"] = breakdown;
    all["timeline"] = memory_timeline(device);
    return all;
  });
  m.def("end_memory_step", &end_memory_step);
  m.def("memory_snapshot", [](int device) { return described(allocator_of(device_or_current(device)).snapshot(), device); });
  m.def("set_tag", [](int tag) { set_tag(static_cast<Tag>(tag)); });
  m.def("retag", [](const std::vector<at::Tensor>& tensors, int tag) {
    for (const auto& tensor : tensors) retag(tensor, static_cast<Tag>(tag));
  });
  m.attr("PARAMETER") = static_cast<int>(kParameter);
  m.attr("GRADIENT") = static_cast<int>(kGradient);
  m.attr("OPTIMIZER") = static_cast<int>(kOptimizer);
  m.attr("ACTIVATION") = static_cast<int>(kActivation);
  m.def("has_values", [](const at::Tensor& tensor) { return can_hold(tensor) && is_real(tensor); });
  m.def("resize_storage", [](py::object storage, std::int64_t bytes) {
    resize_storage(*torch::createStorage(storage.ptr()).unsafeGetStorageImpl(), bytes);
  });

  m.def("connect", [](int fd) { log().connect(fd); });
  m.def("host", [] { return log().host(); });
  m.def("spend", [](Time time) { log().spend(time); });
  m.def("set_launch", [](Time time) { log().set_launch(time); });
  m.def("measure_host", [] { log().measure_host(); });
  m.def("launch", [] { return log().launch(); });
  m.def("set_tracing", [](bool on) { log().set_tracing(on); });
  m.def("kernel_names", &kernel_names);
  m.def("note", [](int code, std::int64_t a, std::int64_t b, py::bytes payload) {
    log().note(static_cast<wire::Note>(code), a, b, std::string_view(payload));
  });
  m.attr("STEP") = static_cast<int>(wire::STEP);
  m.attr("MEMORY") = static_cast<int>(wire::MEMORY);
  m.attr("WARNING") = static_cast<int>(wire::WARNING);
  m.attr("COST") = static_cast<int>(wire::COST);
  m.attr("RANK") = static_cast<int>(wire::RANK);
  m.def("annotate", [](const std::string& name) { annotate(name); });
  m.def("annotate_end", &annotate_end);
  m.def("begin_profile", &begin_profile);
  m.def("end_profile", [](bool launches) { return described(end_profile(launches)); });
  m.def("record", [] { return log().record(current_key(current_device())); });
  m.def("new_stream", [] { return new_stream(current_device()); });
  m.def("wait", [](EventId event) { log().wait(current_key(current_device()), event); });
  m.def("forget", [](EventId event) { log().forget(event); });
  m.def("tasks", [](std::int64_t number, std::int64_t lane, py::bytes announcement) {
    log().tasks(number, stream_key(current_device(), lane), std::string_view(announcement));
  });
  m.def("begin", [](std::int64_t number) { log().begin(current_key(current_device()), number); });
  m.def("ready", [](std::int64_t number, std::uint32_t task) {
    return log().ready(current_key(current_device()), number, task);
  });
  m.def("leave", [](int status) { log().ask(wire::LEAVE, 0, status); });
  m.def("group", &make_group);
  m.def("announce_group", &announce_group);
  m.def("begin_fused", [](const py::args&) { begin_fused(); });  // of what the region reads, which may be freed then
  m.def("end_fused", &end_fused);
  m.def("abandon_fused", &abandon_fused);
  m.def("set_recomputing", &set_recomputing);
  m.def("launch_fused", [](const std::string& name, Time duration, std::uint32_t provenance) {
    launch(Cost{duration, number_of(name), provenance});
  });
  m.def("counts", [] {
    auto all = log().counts();
    auto [priced, computed] = priced_and_computed();
    py::dict told;
    told["kernels"] = all.kernels;
    told["flops"] = all.flops;
    told["recomputed"] = all.recomputed;
    told["times"] = std::vector<Time>(all.times, all.times + PROVENANCES);
    told["by_name"] = all.by_name;
    told["spreads"] = all.spreads;
    told["priced"] = priced;
    told["computed"] = computed;
    return told;
  });
}
