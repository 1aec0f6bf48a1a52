#include "kernels.hpp"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "device.hpp"
#include "expectations.hpp"
#include "memory.hpp"

namespace torch::autograd {
// Of graph_task.h, which brings the whole engine along.
TORCH_API int get_current_graph_task_id();
}  // namespace torch::autograd

namespace torch::jit::tracer {
// Of tracer.h, likewise.
struct TracingState;
TORCH_API const std::shared_ptr<TracingState>& getTracingState();
TORCH_API void setTracingState(std::shared_ptr<TracingState> state);
}  // namespace torch::jit::tracer

namespace foretrain {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

constexpr std::int64_t MOST_REAL = 8192;  // elements of all inputs up to which an operator is computed

Price price;
std::function<void(const std::string&)> on_unreal_read;
thread_local int fused = 0;
thread_local bool computed_again = false;
int capability = 90;
std::atomic<std::int64_t> priced{0}, computed{0};

// Checks of a GPU's kernel before it runs, as of torchgen or of `at::TensorIterator`.
enum class Alike { ANY, GENERATED, ITERATOR };

std::unordered_map<std::string, Alike>& checks() {
  static auto* all = new std::unordered_map<std::string, Alike>;
  return *all;
}

// Properties of an operator that are the same in all calls.
struct Operator {
  std::string name;
  std::vector<int> sources;    // of each result: the argument it is, or -1 for a new tensor
  std::vector<int> written;    // arguments that are written to
  int generator = -1;          // argument, if there is one
  bool in_place = false;       // all results are arguments, whose shapes do not change
  bool view = false;           // a result shares storage with an argument
  bool heavy = false;          // never worth computing
  bool writes_all = false;     // what it writes it does not read
  bool dynamic = false;        // the shape of its result depends on values
  bool has_meta = false;
  bool indexes = false;        // takes indices, of which masks are some
  Alike alike = Alike::ANY;    // what a GPU demands of the devices of its tensors
  std::vector<int> failures;   // results that are 0 where all went well
  Expectation expectation = nullptr;
};

const std::unordered_set<std::string> HEAVY = {"aten::mm",          "aten::addmm",      "aten::bmm",
                                               "aten::baddbmm",     "aten::convolution", "aten::convolution_backward",
                                               "aten::_scaled_mm"};
const std::unordered_set<std::string> INDEX = {"aten::index", "aten::index_put", "aten::index_put_",
                                               "aten::_index_put_impl_"};
const std::unordered_set<std::string> WRITE_ALL = {"aten::fill_",    "aten::zero_",   "aten::random_",
                                                   "aten::uniform_", "aten::normal_", "aten::bernoulli_",
                                                   "aten::exponential_"};

Operator* describe(const OperatorHandle& handle) {
  auto op = new Operator{handle.schema().name()};
  const auto& schema = handle.schema();
  const auto& arguments = schema.arguments();
  bool out = false;
  for (int k = 0; k < static_cast<int>(arguments.size()); ++k) {
    auto* alias = arguments[k].alias_info();
    if (alias && alias->isWrite()) op->written.push_back(k);
    out |= arguments[k].is_out();
    if (arguments[k].name() == "generator") op->generator = k;
  }
  bool all_written = true;
  for (const auto& result : schema.returns()) {
    auto* alias = result.alias_info();
    int source = -1;
    if (alias && alias->isWrite()) {
      for (int k : op->written)
        if (arguments[k].alias_info()->beforeSets() == alias->beforeSets()) source = k;
    } else if (alias) {
      op->view = true;
    }
    all_written &= source >= 0;
    if (result.name() == "info" || result.name() == "infos") op->failures.push_back(static_cast<int>(op->sources.size()));
    op->sources.push_back(source);
  }
  op->in_place = !op->written.empty() && all_written && !out;
  op->heavy = HEAVY.count(op->name) || op->name.find("attention") != std::string::npos;
  op->writes_all = out || WRITE_ALL.count(op->name);
  op->has_meta = handle.hasComputedKernelForDispatchKey(DispatchKey::Meta);
  for (auto tag : handle.getTags()) op->dynamic |= tag == at::Tag::dynamic_output_shape;
  op->indexes = INDEX.count(op->name);
  // Without masks; and the one driver that CUDA has for it takes the rank to be full.
  if (op->indexes || op->name == "aten::linalg_lstsq") op->dynamic = false;
  op->expectation = expectation_of(op->name, handle.schema().overload_name());
  const auto& overload = schema.overload_name();
  auto check = checks().find(op->name.substr(op->name.rfind(':') + 1) + (overload.empty() ? "" : "." + overload));
  // Their indices may be on the host.
  if (check != checks().end() && !op->indexes) op->alike = check->second;
  return op;
}

Operator& operator_of(const OperatorHandle& handle) {
  static thread_local std::unordered_map<const void*, Operator*> known;
  auto& op = known[&handle.operator_name()];
  if (!op) op = describe(handle);
  return *op;
}

// # Note [Cache of shapes and costs]
// An iteration calls ten thousand operators, and the next one calls the same with the same shapes. So the shapes of the
// results and the cost are computed once, in Python, and found by a key of all that they can depend on.

using Key = std::vector<std::int64_t>;

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    std::uint64_t hash = 1469598103934665603ULL;
    for (auto word : key) {
      hash ^= static_cast<std::uint64_t>(word);
      hash *= 1099511628211ULL;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

enum Mark : std::int64_t { NONE = -20, UNDEFINED, INT, BOOL, DOUBLE, TENSORS, LIST, DEVICE, STRING, GENERATOR, STREAM };

void append(Key& key, const at::Tensor& tensor) {
  if (!tensor.defined()) return key.push_back(UNDEFINED);
  key.push_back(static_cast<std::int64_t>(tensor.scalar_type()) << 24 |
                static_cast<std::int64_t>(tensor.device().type()) << 16 |
                static_cast<std::int64_t>(tensor.device().index() & 0xff) << 8 | tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

bool append(Key& key, const IValue& value) {
  auto number = [&](Mark mark, std::int64_t word) {
    key.push_back(mark);
    key.push_back(word);
    return true;
  };
  if (value.isTensor()) return append(key, value.toTensor()), true;
  if (value.isNone()) return key.push_back(NONE), true;
  if (value.isInt()) return number(INT, value.toInt());
  if (value.isBool()) return number(BOOL, value.toBool());
  if (value.isDouble()) return number(DOUBLE, std::bit_cast<std::int64_t>(value.toDouble()));
  if (value.isTensorList()) {
    auto tensors = value.toTensorList();
    number(TENSORS, static_cast<std::int64_t>(tensors.size()));
    for (const at::Tensor& tensor : tensors) append(key, tensor);
    return true;
  }
  if (value.isDevice()) return number(DEVICE, value.toDevice().index());
  if (value.isString()) return number(STRING, static_cast<std::int64_t>(std::hash<std::string>()(value.toStringRef())));
  if (value.isGenerator()) return key.push_back(GENERATOR), true;
  if (value.isStream()) return key.push_back(STREAM), true;
  if (value.isList()) {
    auto list = value.toListRef();
    number(LIST, static_cast<std::int64_t>(list.size()));
    for (const auto& element : list)
      if (!append(key, element)) return false;
    return true;
  }
  return false;
}

struct Shape {
  bool defined = true;
  c10::DimVector sizes, strides;
  at::ScalarType type = at::kFloat;
};

struct Result {
  bool list = false;
  std::vector<Shape> shapes;
  std::optional<std::int64_t> number;  // in place of tensors, e.g. the longest sequence that attention was given
};

struct Entry {
  std::vector<Result> results;  // of the new tensors, in order; none for in-place operators
  bool keeps_shapes = false;    // tensors given for results have the right shape
  bool too_large = false;       // no result can hold values, and nothing is written: computing would be in vain
  Cost cost;
};

std::mutex cache_mutex;
std::unordered_map<Key, Entry, KeyHash>& cache() {
  static auto* entries = new std::unordered_map<Key, Entry, KeyHash>;
  return *entries;
}

const Entry* find(const Key& key) {
  std::lock_guard lock(cache_mutex);
  auto found = cache().find(key);
  return found == cache().end() ? nullptr : &found->second;  // stays where it is when others are added
}

template <typename F>
void for_each_tensor(const IValue& value, F&& call) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) call(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) call(tensor);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef())
      if (element.isTensor() && element.toTensor().defined()) call(element.toTensor());
  }
}

// Replaces every tensor in `value` by what `change` makes of it.
template <typename F>
void map_tensors(IValue& value, F&& change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorList()) changed.push_back(tensor.defined() ? change(tensor) : tensor);
    value = std::move(changed);
  } else if (value.isList() && !value.toListRef().empty()) {
    auto list = value.toListRef();
    for (const auto& element : list)
      if (!element.isTensor() && !element.isNone()) return;
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& element : list) {
      if (element.isTensor() && element.toTensor().defined())
        changed.push_back(change(element.toTensor()));
      else
        changed.push_back(std::nullopt);
    }
    value = std::move(changed);
  }
}

at::Tensor new_tensor(const Shape& shape) {
  if (!shape.defined) return {};
  return at::detail::empty_strided_generic(shape.sizes, shape.strides, &device_memory(),
                                           DispatchKeySet(DispatchKey::CUDA), shape.type);
}

int device_of(c10::ArrayRef<IValue> arguments) {
  int device = -1;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (device < 0 && tensor.is_cuda()) device = tensor.device().index();
    });
    if (device >= 0) return device;
    if (argument.isDevice() && argument.toDevice().is_cuda() && argument.toDevice().has_index())
      return argument.toDevice().index();
  }
  return current_device();
}

// What a script may change midway, and an operator's cost depends on: whether FP32 is multiplied in TF32.
std::int64_t arithmetic() {
  auto in_tf32 = [](at::Float32Op op) {
    return at::globalContext().float32Precision(at::Float32Backend::CUDA, op) == at::Float32Precision::TF32;
  };
  return in_tf32(at::Float32Op::MATMUL) | in_tf32(at::Float32Op::CONV) << 1;
}

// While it lives, torch.jit.trace sees nothing: shape functions in Python would get sizes that are tensors.
class Untraced {
 public:
  Untraced() : state_(torch::jit::tracer::getTracingState()) {
    if (state_) torch::jit::tracer::setTracingState(nullptr);
  }
  ~Untraced() {
    if (state_) torch::jit::tracer::setTracingState(std::move(state_));
  }
  Untraced(const Untraced&) = delete;

 private:
  std::shared_ptr<torch::jit::tracer::TracingState> state_;
};

// The call under way: its operator and what is on the stack.
class Call {
 public:
  Call(const OperatorHandle& handle, Stack& stack)
      : handle_(handle),
        op_(operator_of(handle)),
        stack_(stack),
        count_(handle.schema().arguments().size()),
        base_(stack.size() - count_) {}

  void run() {
    OnDevice here(device_of(arguments()));
    Choice choice;
    if (routers_draw() && !op_.view && !op_.heavy && !op_.expectation && !Shapes::at_work())
      choice = choice_of(op_.name, arguments());
    if (op_.indexes && !Shapes::at_work()) expand_masks(op_.name, &argument(0));
    key_.reserve(64);
    key_.push_back(reinterpret_cast<std::int64_t>(&op_));
    key_.push_back(arithmetic());
    bool cacheable = !op_.view;
    for (const auto& argument : arguments()) cacheable = cacheable && append(key_, argument);
    const Entry* entry = cacheable ? find(key_) : nullptr;
    Entry fresh;
    if (!entry) {
      check_devices();
      check_types();
      check_capability();
      std::vector<IValue> before(arguments().begin(), arguments().end());
      for (int k : op_.written) written_.push_back(argument(k));
      written_sizes_ = sizes_of_written();
      bool found = expect() || compute();
      if (!found && !(op_.in_place && return_arguments())) infer();
      if (!found) succeed();
      fresh = summarise(before);
      if (cacheable) remember(fresh);
      entry = &fresh;
    } else if (!expect() && (entry->too_large || !compute())) {
      if (op_.in_place || entry->keeps_shapes)
        return_arguments_and(*entry);
      else
        infer();
      succeed();
    }
    if (choice.draw) remember_choice(choice);
    if (!op_.view) launch(entry->cost);
    if (op_.dynamic && op_.expectation && !Shapes::at_work()) log().ask(wire::STREAM, current_key(current_device()));
  }

 private:
  // Not with braces: those would make a list of two values.
  c10::ArrayRef<IValue> arguments() const { return c10::ArrayRef<IValue>(stack_.data() + base_, count_); }
  c10::ArrayRef<IValue> results() const { return c10::ArrayRef<IValue>(stack_.data() + base_, stack_.size() - base_); }
  IValue& argument(int k) { return stack_[base_ + k]; }

  // PyTorch's own words. Kernels on the GPU read scalars of the host as well.
  void check_devices() {
    if (op_.alike == Alike::ANY || Shapes::at_work()) return;
    std::optional<c10::Device> common;
    for (const auto& argument : arguments())
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (!common && tensor.is_cuda()) common = tensor.device();
      });
    const auto& schema = handle_.schema();
    for (std::size_t k = 0; common && k < count_; ++k)
      for_each_tensor(stack_[base_ + k], [&](const at::Tensor& tensor) {
        if (tensor.device() == *common || !(tensor.is_cuda() || tensor.is_cpu()) || (tensor.is_cpu() && !tensor.dim())) return;
        TORCH_CHECK(op_.alike == Alike::GENERATED, "Expected all tensors to be on the same device, but found at least two "
                    "devices, ", *common, " and ", tensor.device(), "!");
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", schema.arguments()[k].name(), " is on ",
                    tensor.device(), ", different from other tensors on ", *common, " (when checking argument in method "
                    "wrapper_CUDA_", schema.overload_name(), "_", op_.name.substr(op_.name.rfind(':') + 1), ")");
      });
  }

  // The same of products and convolutions, whose shape functions do not ask.
  void check_types() {
    if (!op_.heavy || Shapes::at_work()) return;
    auto tensor = [&](int k) { return argument(k).isTensor() ? argument(k).toTensor() : at::Tensor(); };
    if (op_.name == "aten::mm" || op_.name == "aten::addmm") {
      int first = op_.name == "aten::mm" ? 0 : 1;
      auto left = tensor(first), right = tensor(first + 1);
      TORCH_CHECK(left.dtype() == right.dtype(), "expected mat1 and mat2 to have the same dtype, but got: ", left.dtype(),
                  " != ", right.dtype());
    } else if (op_.name == "aten::bmm" || op_.name == "aten::baddbmm") {
      int first = op_.name == "aten::bmm" ? 0 : 1;
      auto left = tensor(first), right = tensor(first + 1);
      TORCH_CHECK(left.dtype() == right.dtype(), "expected scalar type ", left.scalar_type(), " but found ",
                  right.scalar_type());
    } else if (op_.name == "aten::convolution") {
      auto source = tensor(0);
      for (int k : {1, 2}) {
        auto other = tensor(k);
        TORCH_CHECK(!other.defined() || source.options().type_equal(other.options()), "Input type (", source.toString(),
                    ") and ", k == 1 ? "weight" : "bias", " type (", other.toString(), ") should be the same");
      }
    }
  }

  // In PyTorch's words as well.
  void check_capability() {
    if (Shapes::at_work() || capability >= 90) return;
    bool scaled = op_.name == "aten::_scaled_mm" || op_.name == "aten::_scaled_mm_v2";
    TORCH_CHECK(!scaled || capability == 89, "torch._scaled_mm is only supported on CUDA devices with compute capability "
                ">= 9.0 or 8.9, or ROCm MI300+");
    bool grouped = op_.name == "aten::_scaled_grouped_mm" || op_.name == "aten::_scaled_grouped_mm_v2";
    TORCH_CHECK(!grouped, "torch._scaled_grouped_mm is only supported on CUDA devices with compute capability = [9.0, 10.0], "
                "or ROCm MI300+");
  }

  // A factorization whose matrix is not known finds nothing wrong with it.
  void succeed() {
    if (Shapes::at_work()) return;
    for (int k : op_.failures) {
      const auto& info = stack_[base_ + k].toTensor();
      if (!info.is_cuda()) continue;
      at::AutoDispatchBelowADInplaceOrView below;
      hold(info);
      on_cpu(info).zero_();
      set_real(info, true);
    }
  }

  void replace(std::vector<IValue> results) {
    torch::jit::drop(stack_, count_);
    for (auto& result : results) stack_.push_back(std::move(result));
  }

  bool return_arguments() {
    lose_written();
    std::vector<IValue> results;
    for (int source : op_.sources) results.push_back(argument(source));
    replace(std::move(results));
    return true;
  }

  void return_arguments_and(const Entry& entry) {
    lose_written();
    std::vector<IValue> results;
    auto next = entry.results.begin();
    for (int source : op_.sources) {
      if (source >= 0) {
        results.push_back(argument(source));
        continue;
      }
      const Result& result = *next++;
      if (result.number) {
        results.emplace_back(*result.number);
        continue;
      }
      if (!result.list) {
        results.emplace_back(new_tensor(result.shapes[0]));
        continue;
      }
      c10::List<at::Tensor> tensors;
      for (const auto& shape : result.shapes) tensors.push_back(new_tensor(shape));
      results.emplace_back(std::move(tensors));
    }
    replace(std::move(results));
  }

  void lose_written() {
    // The check for overflow writes only if it finds one, and what is not there overflows nowhere.
    if (op_.name == "aten::_amp_foreach_non_finite_check_and_unscale_") return;
    for (int k : op_.written) for_each_tensor(argument(k), [](const at::Tensor& tensor) { lose(tensor); });
  }

  // See Note [Routers]. What was computed from a choice is taken for one where it is of integers.
  void remember_choice(const Choice& choice) {
    for (const auto& result : results())
      for_each_tensor(result, [&](const at::Tensor& tensor) {
        auto block = block_of(tensor);
        if (block && !block->real && at::isIntegralType(tensor.scalar_type(), false)) block->choice = choice;
      });
  }

  // See Note [Expectations].
  bool expect() {
    if (!op_.expectation || Shapes::at_work()) return false;
    bool real = true;
    for (const auto& argument : arguments())
      for_each_tensor(argument, [&](const at::Tensor& tensor) { real = real && (!tensor.is_cuda() || is_real(tensor)); });
    if (real) return false;
    auto expected = op_.expectation(arguments());
    if (expected.empty()) return false;
    replace(std::move(expected));
    return true;
  }

  // See Note [Real values]. False, with the stack as it was, where that cannot be.
  bool compute() {
    if (op_.heavy || op_.view || Shapes::at_work() || !all_hold()) return false;
    Stack inputs(arguments().begin(), arguments().end());
    std::vector<std::pair<at::Tensor, at::Tensor>> aliases;  // on the CPU, and whose it is
    bool real = true;
    auto alias_of = [&](const at::Tensor& tensor) -> at::Tensor {
      if (!tensor.is_cuda()) return tensor;
      for (auto& [alias, owner] : aliases)
        if (owner.is_same(tensor)) return alias;
      // An empty tensor given for the result will get its size from the operator.
      aliases.emplace_back(tensor.numel() ? on_cpu(tensor) : at::empty_like(tensor, at::kCPU), tensor);
      return aliases.back().first;
    };
    for (std::size_t k = 0; k < count_; ++k) {
      bool overwritten = op_.writes_all && is_written(static_cast<int>(k));
      for_each_tensor(inputs[k], [&](const at::Tensor& tensor) {
        if (tensor.is_cuda() && !overwritten) real = real && is_real(tensor);
      });
      map_tensors(inputs[k], alias_of);
      if (inputs[k].isDevice() && inputs[k].toDevice().is_cuda()) inputs[k] = c10::Device(c10::DeviceType::CPU);
    }
    if (!real && !op_.failures.empty()) return false;  // a matrix of ones has no inverse
    if (op_.generator >= 0) inputs[op_.generator] = generator_of_values();
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      handle_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &inputs);
    } catch (const std::exception&) {
      return false;  // no such kernel on the CPU, or values made up that do not fit, e.g. as an index
    }
    auto give_back = [&](const at::Tensor& result) -> at::Tensor {
      for (auto& [alias, owner] : aliases) {
        if (!alias.is_same(result)) continue;
        if (owner.sizes() != result.sizes()) return adopt(result, real, owner);
        set_real(owner, real);
        return owner;
      }
      return adopt(result, real, {});
    };
    for (auto& result : inputs) map_tensors(result, give_back);
    for (int k : op_.written)
      for_each_tensor(argument(k), [&](const at::Tensor& tensor) { set_real(tensor, real); });
    replace({inputs.begin(), inputs.end()});
    computed.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  bool is_written(int k) const { return std::find(op_.written.begin(), op_.written.end(), k) != op_.written.end(); }

  bool all_hold() const {
    bool all = true, any = false;
    std::int64_t elements = 0;
    for (const auto& argument : arguments())
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        any = true;
        elements += tensor.numel();
        all = all && (tensor.is_cuda() ? can_hold(tensor) : tensor.is_cpu());
      });
    return all && any && elements <= MOST_REAL;
  }

  // A result of the CPU on the device; in `owner`'s place if it was given for that, but with another shape.
  static at::Tensor adopt(const at::Tensor& result, bool real, at::Tensor owner) {
    if (!result.is_cpu()) return result;
    if (owner.defined()) {
      owner.resize_(result.sizes());
    } else {
      owner = new_tensor({true, c10::DimVector(result.sizes()), c10::DimVector(result.strides()), result.scalar_type()});
    }
    if (can_hold(owner) && owner.numel()) {
      hold(owner);
      on_cpu(owner).copy_(result);
      set_real(owner, real);
    }
    return owner;
  }

  void check_shape_function(bool has) const {
    TORCH_CHECK_NOT_IMPLEMENTED(has, op_.name, " has no shape function (\"Meta\" kernel), so it cannot run on a simulated GPU; ",
                                op_.name.rfind("aten::", 0) == 0 ? "compute it on the host, e.g. of tensor.cpu()"
                                                                 : "register one with torch.library.register_fake");
  }

  // Asks the operator's shape function, with tensors of device "meta" in place of ours.
  void infer() {
    check_shape_function(op_.has_meta);
    std::vector<IValue> given(arguments().begin(), arguments().end());
    std::vector<std::pair<at::Tensor, at::Tensor>> metas;
    auto meta_of = [&](const at::Tensor& tensor) -> at::Tensor {
      if (!tensor.is_cuda()) return tensor;
      for (auto& [meta, owner] : metas)
        if (owner.is_same(tensor)) return meta;
      metas.emplace_back(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()), tensor);
      return metas.back().first;
    };
    {
      Shapes at_work;
      Untraced untraced;
      for (std::size_t k = base_; k < stack_.size(); ++k) {
        map_tensors(stack_[k], meta_of);
        if (stack_[k].isDevice() && stack_[k].toDevice().is_cuda()) stack_[k] = c10::Device(c10::DeviceType::Meta);
      }
      try {
        handle_.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &stack_);
      } catch (const std::exception& error) {
        TORCH_CHECK(!op_.dynamic, op_.name, " needs the values of a tensor on the GPU to know the size of its result, and "
                    "a simulated GPU computes only with small tensors; give it its size where it takes one, e.g. "
                    "output_size, or compute it on the host");
        // An operator that Python defines has a kernel that says so.
        check_shape_function(std::string_view(error.what()).find("no fake impl or Meta kernel") == std::string_view::npos);
        throw;
      }
    }
    auto real_of = [&](const at::Tensor& result) -> at::Tensor {
      for (auto& [meta, owner] : metas) {
        if (!meta.is_same(result)) continue;
        if (owner.sizes() != meta.sizes()) owner.resize_(meta.sizes());
        return owner;
      }
      if (result.is_meta()) return new_tensor(shape_of(result));
      charge(result);
      return result;
    };
    for (std::size_t k = base_; k < stack_.size(); ++k) map_tensors(stack_[k], real_of);
    for (int k : op_.written) for_each_tensor(given[k], [](const at::Tensor& tensor) { lose(tensor); });
  }

  static Shape shape_of(const at::Tensor& tensor) {
    if (!tensor.defined()) return {false, {}, {}, at::kFloat};
    return {true, c10::DimVector(tensor.sizes()), c10::DimVector(tensor.strides()), tensor.scalar_type()};
  }

  Entry summarise(const std::vector<IValue>& before) {
    Entry entry;
    entry.keeps_shapes = true;
    auto outcome = results();
    for (std::size_t r = 0; r < outcome.size(); ++r) {
      if (op_.sources[r] >= 0) continue;
      Result result;
      if (outcome[r].isTensor()) {
        result.shapes.push_back(shape_of(outcome[r].toTensor()));
      } else if (outcome[r].isTensorList()) {
        result.list = true;
        for (const at::Tensor& tensor : outcome[r].toTensorList()) result.shapes.push_back(shape_of(tensor));
      } else if (outcome[r].isInt() && !op_.dynamic) {
        result.number = outcome[r].toInt();
      } else {
        entry.keeps_shapes = false;
      }
      entry.results.push_back(std::move(result));
    }
    entry.too_large = all_too_large(outcome);
    if (!Shapes::at_work()) {
      entry.cost = price_of(op_.name, before, outcome);
      priced.fetch_add(1, std::memory_order_relaxed);
    }
    return entry;
  }

  bool all_too_large(c10::ArrayRef<IValue> outcome) const {
    if (!op_.written.empty() || outcome.empty()) return false;
    for (const auto& result : outcome)
      if (!result.isTensor() || !result.toTensor().is_cuda() || can_hold(result.toTensor())) return false;
    return true;
  }

  void remember(const Entry& entry) {
    // An operator that gave a tensor of ours another shape would do so again, and then shapes must be inferred again.
    if (op_.dynamic || Shapes::at_work() || written_sizes_ != sizes_of_written()) return;
    std::lock_guard lock(cache_mutex);
    cache().emplace(std::move(key_), entry);
  }

  Key sizes_of_written() const {
    Key sizes;
    for (const auto& value : written_) append(sizes, value);
    return sizes;
  }

  const OperatorHandle& handle_;
  Operator& op_;
  Stack& stack_;
  std::size_t count_, base_;
  Key key_;
  std::vector<IValue> written_;
  Key written_sizes_;
};

void boxed(const OperatorHandle& handle, DispatchKeySet, Stack* stack) { Call(handle, *stack).run(); }

void refuse_sparse(const OperatorHandle& handle, DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, handle.schema().name(), ": a simulated GPU has no sparse tensors, whose sizes hang on "
                              "values; use dense tensors, e.g. an embedding with sparse=False");
}

torch::Library& library(bool fallback) {
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  static auto* all = new torch::Library(torch::Library::IMPL, "_", DispatchKey::CUDA, __FILE__, __LINE__);
  return fallback ? *all : *aten;
}

}  // namespace

void set_capability(int of) { capability = of; }

void set_price(Price call) { price = std::move(call); }

Cost price_of(const std::string& name, c10::ArrayRef<IValue> arguments, c10::ArrayRef<IValue> results) {
  return price ? price(name, arguments, results) : Cost{};
}

namespace {
std::mutex names_mutex;
std::vector<std::string>& names() {
  static auto* all = new std::vector<std::string>;
  return *all;
}

// Whether a forward pass runs within a backward pass: a compiled graph says so, autograd records it, or autograd calls
// forward of a Function written in Python, with both of its modes disabled. In backward of such a Function, only the mode
// of gradients is.
bool recomputing() {
  const auto& state = c10::AutogradState::get_tls_state();
  bool again = state.get_grad_mode() || !state.get_fw_grad_mode();
  return computed_again || (again && torch::autograd::get_current_graph_task_id() != -1);
}
}  // namespace

std::int32_t number_of(const std::string& name) {
  static auto* numbers = new std::unordered_map<std::string, std::int32_t>;
  std::lock_guard lock(names_mutex);
  auto [found, made] = numbers->emplace(name, static_cast<std::int32_t>(names().size()));
  if (made) {
    names().push_back(name);
    log().note(wire::NAME, found->second, 0, name);
  }
  return found->second;
}

const std::vector<std::string>& kernel_names() { return names(); }

void launch(const Cost& cost) {
  if (Shapes::at_work() || fused) return;
  log().check_owner();
  log().kernel(current_key(current_device()), cost, recomputing());
}

void begin_fused() { ++fused; }
void end_fused() {
  if (--fused == 0) charge_survivors();
}
void abandon_fused() {
  fused = 0;
  charge_survivors();
}
bool in_fused_region() { return fused > 0; }
void set_recomputing(bool again) { computed_again = again; }

void set_on_unreal_read(std::function<void(const std::string&)> call) { on_unreal_read = std::move(call); }
void unreal_read(const std::string& what) {
  if (on_unreal_read) on_unreal_read(what);
}

const Cost& cost_of(const std::string& name, c10::ArrayRef<IValue> arguments) {
  static auto* costs = new std::unordered_map<Key, Cost, KeyHash>;
  static std::mutex mutex;
  Key key{static_cast<std::int64_t>(std::hash<std::string>()(name))};
  for (const auto& argument : arguments) append(key, argument);
  {
    std::lock_guard lock(mutex);
    if (auto found = costs->find(key); found != costs->end()) return found->second;
  }
  Cost cost = price_of(name, arguments, {});
  cost.copy_engine = name.rfind("Memcpy ", 0) == 0;
  std::lock_guard lock(mutex);
  return costs->emplace(std::move(key), cost).first->second;
}

std::pair<std::int64_t, std::int64_t> priced_and_computed() { return {priced.load(), computed.load()}; }

void install_kernels(const std::vector<std::string>& operators, const std::vector<std::string>& generated,
                     const std::vector<std::string>& iterated) {
  for (const auto& name : generated) checks()[name] = Alike::GENERATED;
  for (const auto& name : iterated) checks()[name] = Alike::ITERATOR;
  auto kernel = [] { return torch::CppFunction::makeFromBoxedFunction<&boxed>(); };
  // Some operators have kernels for CUDA that are of no use here, and PyTorch would warn that they are replaced.
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silence;
  c10::WarningUtils::WarningHandlerGuard quiet(&silence);
  library(true).fallback(kernel());
  static torch::Library sparse(torch::Library::IMPL, "_", DispatchKey::SparseCUDA, __FILE__, __LINE__);
  auto refusal = [] { return torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>(); };
  sparse.fallback(refusal());
  for (const auto& name : operators)
    library(false).impl(name.c_str(), name.rfind("_to_sparse", 0) == 0 ? refusal() : kernel());
}

}  // namespace foretrain
