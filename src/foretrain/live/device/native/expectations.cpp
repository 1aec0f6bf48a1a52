#include "expectations.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/WrapDimUtilsMulti.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

#include "kernels.hpp"
#include "memory.hpp"

namespace foretrain {
namespace {

using at::Tensor;
using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;
using Results = std::vector<IValue>;
using Loads = std::vector<std::int64_t>;

std::function<std::int64_t()> draw_of_router;
std::function<Loads(std::int64_t, std::int64_t, std::int64_t, std::int64_t)> loads_of_draw;

// Part of a map of choices that a view shows: the dimension of experts, -1 where it shows one of them; the first; how many.
struct Portion {
  std::int64_t dim, first, count;
};

std::optional<Portion> portion_of(const Tensor& map, const Choice& choice) {
  if (!choice.draw || !choice.stride || !map.numel()) return std::nullopt;
  Portion portion{-1, map.storage_offset() / choice.stride % choice.experts, 1};
  for (std::int64_t dim = 0; dim < map.dim(); ++dim) {
    auto stride = map.stride(dim), size = map.size(dim);
    if (size == 1 || stride % (choice.stride * choice.experts) == 0) continue;
    if (stride == choice.stride && portion.dim < 0 && portion.first + size <= choice.experts)
      portion = {dim, portion.first, size};
    else if (stride * size > choice.stride)
      return std::nullopt;
  }
  return portion;
}

// How often each expert is among `total` choices: those of each rank are the same, and so are rounded.
Loads loads_of(const Choice& choice, std::int64_t total) {
  auto ranks = total % choice.ranks ? 1 : choice.ranks;
  auto loads = loads_of_draw(choice.draw, choice.experts, total / ranks, choice.top);
  for (auto& load : loads) load *= ranks;
  return loads;
}

// How many ones each expert has in a map of which `map` shows a portion.
Loads loads_in(const Tensor& map, const StorageBlock& block, const Portion& portion) {
  auto tokens = map.numel() / portion.count;
  auto total = std::llround(block.ones * static_cast<double>(tokens * block.choice.experts));
  return loads_of(block.choice, total);
}

Tensor unknown(c10::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_generic(sizes, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA), type,
                                   std::nullopt);
}

// `total` things in as many bins as `shape` has elements, as evenly as whole numbers can.
Tensor balanced(std::int64_t total, c10::IntArrayRef shape, at::ScalarType type) {
  auto counts = unknown(shape, type);
  auto bins = counts.numel();
  if (!bins) return counts;
  at::AutoDispatchBelowADInplaceOrView below;
  hold(counts);
  auto values = on_cpu(counts).view(-1);
  values.fill_(total / bins);
  values.narrow(0, 0, total % bins).add_(1);
  set_real(counts, false);
  return counts;
}

// Whether a router of `experts` experts, whose loads are given, has chosen each of the elements.
bool has_loads(const Tensor& chosen, std::int64_t experts) {
  auto block = block_of(chosen);
  return block && block->choice.draw && !block->choice.stride && experts == block->choice.experts;
}

// As many of each expert as its router has chosen; as evenly as whole numbers can, where its loads are not given.
Tensor counted(const Tensor& chosen, std::int64_t experts, at::ScalarType type) {
  auto total = chosen.numel();
  auto counts = balanced(total, {experts}, type);
  if (!has_loads(chosen, experts)) return counts;
  const auto& choice = block_of(chosen)->choice;
  auto loads = loads_of(choice, total);
  at::AutoDispatchBelowADInplaceOrView below;
  on_cpu(counts).copy_(at::tensor(loads, at::kLong));
  return counts;
}

void tell(const char* what, const Tensor& values, const char* taken) {
  unreal_read(c10::str(what, " ", values.numel(), " ", values.scalar_type(), " values (taken to be ", taken, ")"));
}

void tell_histogram(const Tensor& values, std::int64_t bins) {
  tell("the histogram of", values, has_loads(values, bins) ? "of the given loads" : "balanced");
}

Results bincount(Arguments arguments) {
  const Tensor& values = arguments[0].toTensor();
  auto bins = arguments[2].toInt();
  TORCH_CHECK(bins > 0, "aten::bincount of values that no GPU has computed: how many bins there are cannot be known; "
              "give it minlength");
  tell_histogram(values, bins);
  if (!arguments[1].isTensor()) return {counted(values, bins, at::kLong)};
  bool single = arguments[1].toTensor().scalar_type() == at::kFloat;
  return {unknown({bins}, single ? at::kFloat : at::kDouble)};
}

Results histc(Arguments arguments) {
  const Tensor& values = arguments[0].toTensor();
  auto bins = arguments[1].toInt();
  tell_histogram(values, bins);
  return {counted(values, bins, values.scalar_type())};
}

// Elements of `mask` that are not zero; see Note [Expectations].
std::int64_t chosen(const Tensor& mask) {
  auto block = block_of(mask);
  bool scattered = block && block->ones > 0;
  tell("the number of non-zeros among", mask, scattered ? "as many as were scattered" : "all");
  auto portion = block ? portion_of(mask, block->choice) : std::nullopt;
  if (scattered && portion) {
    auto loads = loads_in(mask, *block, *portion);
    return std::accumulate(loads.begin() + portion->first, loads.begin() + portion->first + portion->count, std::int64_t{0});
  }
  return scattered ? std::llround(block->ones * static_cast<double>(mask.numel())) : mask.numel();
}

Results nonzero(Arguments arguments) {
  const Tensor& values = arguments[0].toTensor();
  return {unknown({chosen(values), values.dim()}, at::kLong)};
}

Results masked_select(Arguments arguments) {
  const Tensor &values = arguments[0].toTensor(), &mask = arguments[1].toTensor();
  auto whole = c10::multiply_integers(at::infer_size(values.sizes(), mask.sizes()));
  return {unknown({mask.numel() ? whole / mask.numel() * chosen(mask) : 0}, values.scalar_type())};
}

// (where to, dim, index, what).
Results scatter_one(Arguments arguments, bool in_place) {
  const Tensor &target = arguments[0].toTensor(), &index = arguments[2].toTensor();
  bool counts = at::isIntegralType(target.scalar_type(), true) && arguments[3].toScalar().toDouble() == 1;
  if (!counts || !target.numel()) return {};
  auto result = in_place ? target : unknown(target.sizes(), target.scalar_type());
  lose(result);
  auto from = block_of(index);
  Choice choice = from ? from->choice : Choice{};
  auto dim = target.dim() ? at::maybe_wrap_dim(arguments[1].toInt(), target.dim()) : 0;
  if (auto block = block_of(result); block && block->bytes == result.nbytes()) {
    if (choice.draw && !choice.stride && target.dim() && target.size(dim) == choice.experts) {
      choice.stride = result.stride(dim);
      block->choice = choice;
    }
    block->ones = std::min(1.0, static_cast<double>(index.numel()) / static_cast<double>(target.numel()));
  }
  return {result};
}

Results scatter(Arguments arguments) { return scatter_one(arguments, false); }

Results scatter_(Arguments arguments) { return scatter_one(arguments, true); }

// (target, indices of all dimensions, the number 1, accumulate).
Results index_put_(Arguments arguments) {
  const Tensor &target = arguments[0].toTensor(), &value = arguments[2].toTensor();
  auto indices = arguments[1].toListRef();
  bool whole = static_cast<std::int64_t>(indices.size()) == target.dim() && !arguments[3].toBool() && target.numel() &&
               std::all_of(indices.begin(), indices.end(), [](const IValue& index) {
                 return index.isTensor() && index.toTensor().defined() && index.toTensor().scalar_type() == at::kLong;
               });
  if (!whole || !at::isIntegralType(target.scalar_type(), true) || value.numel() != 1) return {};
  at::AutoDispatchBelowADInplaceOrView below;
  if (!value.is_cpu() && !has_values(value)) return {};
  if ((value.is_cpu() ? value : on_cpu(value)).item().toDouble() != 1) return {};
  lose(target);
  if (auto block = block_of(target); block && block->bytes == target.nbytes())
    block->ones = std::min(1.0, static_cast<double>(indices[0].toTensor().numel()) / static_cast<double>(target.numel()));
  return {target};
}

// (values, number): of a tensor of which some elements are known to have been set, and are not `number`, 0 or -1.
Results is_not(Arguments arguments) {
  const Tensor& values = arguments[0].toTensor();
  auto block = block_of(values);
  auto number = arguments[1].toScalar().toDouble();
  if (!block || block->ones == 0 || (number != 0 && number != -1)) return {};
  auto mask = unknown(values.sizes(), at::kBool);
  if (auto made = block_of(mask)) made->ones = block->ones;
  return {mask};
}

// (repeats, output_size).
Results repeat_interleave(Arguments arguments) {
  const Tensor& repeats = arguments[0].toTensor();
  auto block = block_of(repeats);
  if (!block || block->mean == 0 || !arguments[1].isNone()) return {};
  return {unknown({std::llround(block->mean * static_cast<double>(repeats.numel()))}, repeats.scalar_type())};
}

// (values, dims, keepdim, dtype).
Results sum(Arguments arguments) {
  const Tensor& values = arguments[0].toTensor();
  auto block = block_of(values);
  if (!block || block->ones == 0) return {};
  auto dims = arguments[1].isNone() ? std::vector<std::int64_t>{} : arguments[1].toIntVector();
  auto summed = at::dim_list_to_bitset(dims, values.dim());
  if (dims.empty()) summed.set();
  std::vector<std::int64_t> shape;
  for (std::int64_t dim = 0; dim < values.dim(); ++dim) {
    if (!summed[static_cast<std::size_t>(dim)])
      shape.push_back(values.size(dim));
    else if (arguments[2].toBool())
      shape.push_back(1);
  }
  auto type = at::isIntegralType(values.scalar_type(), true) ? at::kLong : values.scalar_type();
  if (!arguments[3].isNone()) type = arguments[3].toScalarType();
  if (c10::multiply_integers(shape) * c10::elementSize(type) > static_cast<std::int64_t>(SMALL)) {
    auto counts = unknown(shape, type);
    if (auto made = block_of(counts))
      made->mean = static_cast<double>(chosen(values)) / static_cast<double>(counts.numel());
    return {counts};
  }
  auto counts = balanced(chosen(values), shape, type);
  auto portion = portion_of(values, block->choice);
  if (!portion || portion->dim < 0 || summed[static_cast<std::size_t>(portion->dim)]) return {counts};
  auto loads = loads_in(values, *block, *portion);
  at::AutoDispatchBelowADInplaceOrView below;
  auto dim = portion->dim;
  for (std::int64_t before = 0; before < portion->dim; ++before)
    dim -= summed[static_cast<std::size_t>(before)] && !arguments[2].toBool();
  auto target = on_cpu(counts);
  for (std::int64_t expert = 0; expert < portion->count; ++expert) {
    auto own = target.select(dim, expert);
    auto load = loads[static_cast<std::size_t>(portion->first + expert)];
    auto parts = at::full({own.numel()}, load / own.numel(), at::kLong);
    parts.narrow(0, 0, load % own.numel()).add_(1);
    own.copy_(parts.view(own.sizes()));
  }
  return {counts};
}

// (indices, expert): a mask of where a router has chosen one expert.
Results is_expert(Arguments arguments) {
  const Tensor& values = arguments[0].toTensor();
  auto block = block_of(values);
  if (!block || !block->choice.draw || block->choice.stride || !arguments[1].toScalar().isIntegral(false)) return {};
  auto expert = arguments[1].toScalar().toLong();
  const auto& choice = block->choice;
  if (expert < 0 || expert >= choice.experts) return {};
  auto loads = loads_of(choice, values.numel());
  auto mask = unknown(values.sizes(), at::kBool);
  if (auto made = block_of(mask))
    made->ones = static_cast<double>(loads[static_cast<std::size_t>(expert)]) / static_cast<double>(values.numel());
  return {mask};
}

Results sum_of_all(Arguments arguments) { return sum({arguments[0], IValue(), false, arguments[1]}); }

Results distinct(const Tensor& values, c10::IntArrayRef found, c10::IntArrayRef inverse, std::int64_t count) {
  tell("the number of distinct ones among", values, "all");
  return {unknown(found, values.scalar_type()), unknown(inverse, at::kLong), balanced(count, {count}, at::kLong)};
}

// Of all elements: (values, sorted, return_inverse, return_counts) and (values, return_inverse, return_counts, dim).
Results unique(Arguments arguments) {
  const Tensor& values = arguments[0].toTensor();
  return distinct(values, {values.numel()}, values.sizes(), values.numel());
}

Results unique_dim(Arguments arguments) {
  const Tensor& values = arguments[0].toTensor();
  auto rows = values.size(arguments[1].toInt());
  return distinct(values, values.sizes(), {rows}, rows);
}

// (log_probs (time, batch, classes), targets, input_lengths, target_lengths), lengths as numbers or tensors: shapes hang on
// the longest target, which is taken to be as long as there is room for.
Results ctc_loss(Arguments arguments) {
  const Tensor &scores = arguments[0].toTensor(), &targets = arguments[1].toTensor();
  std::int64_t longest = targets.dim() > 1 ? targets.size(1) : targets.numel();
  if (arguments[3].isIntList()) {
    longest = 0;
    for (auto length : arguments[3].toIntVector()) longest = std::max(longest, length);
  }
  auto batch = scores.size(1);
  return {unknown({batch}, scores.scalar_type()), unknown({batch, scores.size(0), 2 * longest + 1}, scores.scalar_type())};
}

// Has no shape function either; the gradient is of the scores.
Results ctc_loss_backward(Arguments arguments) {
  const Tensor& scores = arguments[1].toTensor();
  return {unknown(scores.sizes(), scores.scalar_type())};
}

// Checks that all is well, e.g. finite, find so.
Results all(Arguments arguments) {
  auto result = unknown({}, arguments[0].toTensor().scalar_type() == at::kByte ? at::kByte : at::kBool);
  at::AutoDispatchBelowADInplaceOrView below;
  hold(result);
  on_cpu(result).fill_(1);
  return {result};
}

// (matrix, right-hand sides, rcond, driver). As CUDA's only driver, which asks for neither rank nor singular values.
Results least_squares(Arguments arguments) {
  const Tensor &matrix = arguments[0].toTensor(), &sides = arguments[1].toTensor();
  auto rows = matrix.size(-2), columns = matrix.size(-1);
  bool vector = sides.dim() == 1 || (sides.dim() + 1 == matrix.dim() && sides.sizes() == matrix.sizes().slice(0, sides.dim()));
  auto shape = at::infer_size(matrix.sizes().slice(0, matrix.dim() - 2),
                              sides.sizes().slice(0, sides.dim() - (vector ? 1 : 2)));
  auto residuals = shape;
  residuals.push_back(vector ? 1 : sides.size(-1));
  if (rows <= columns) residuals = {0};
  shape.push_back(columns);
  if (!vector) shape.push_back(sides.size(-1));
  auto type = matrix.scalar_type();
  return {unknown(shape, type), unknown(residuals, c10::toRealValueType(type)), unknown({0}, at::kLong),
          unknown({0}, c10::toRealValueType(type))};
}

Results unique_consecutive(Arguments arguments) {
  if (arguments[3].isNone()) return unique(arguments);
  const Tensor& values = arguments[0].toTensor();
  auto rows = values.size(arguments[3].toInt());
  return distinct(values, values.sizes(), {rows}, rows);
}

}  // namespace

Expectation expectation_of(const std::string& name, const std::string& overload) {
  static const std::unordered_map<std::string, Expectation> known = {
      {"aten::bincount", &bincount},
      {"aten::histc", &histc},
      {"aten::nonzero", &nonzero},
      {"aten::masked_select", &masked_select},
      {"aten::eq.Scalar", &is_expert},
      {"aten::scatter.value", &scatter},
      {"aten::scatter_.value", &scatter_},
      {"aten::ne.Scalar", &is_not},
      {"aten::_index_put_impl_", &index_put_},
      {"aten::index_put_", &index_put_},
      {"aten::repeat_interleave.Tensor", &repeat_interleave},
      {"aten::sum", &sum_of_all},
      {"aten::sum.dim_IntList", &sum},
      {"aten::_unique2", &unique},
      {"aten::unique_dim", &unique_dim},
      {"aten::unique_dim_consecutive", &unique_dim},
      {"aten::unique_consecutive", &unique_consecutive},
      {"aten::all", &all},
      {"aten::linalg_lstsq", &least_squares},
      {"aten::_ctc_loss", &ctc_loss},
      {"aten::_ctc_loss.Tensor", &ctc_loss},
      {"aten::_ctc_loss_backward", &ctc_loss_backward},
      {"aten::_ctc_loss_backward.Tensor", &ctc_loss_backward},
  };
  auto found = known.find(overload.empty() ? name : name + "." + overload);
  return found == known.end() ? nullptr : found->second;
}

void set_routers(std::function<std::int64_t()> draw,
                 std::function<Loads(std::int64_t, std::int64_t, std::int64_t, std::int64_t)> counts) {
  draw_of_router = std::move(draw);
  loads_of_draw = std::move(counts);
}

bool routers_draw() { return static_cast<bool>(draw_of_router); }

Choice choice_of(const std::string& name, c10::ArrayRef<IValue> arguments) {
  bool top = name == "aten::topk", argmax = name == "aten::argmax";
  if (top || argmax || name == "aten::max") {
    int at = top ? 2 : 1;
    if (static_cast<int>(arguments.size()) <= at || !arguments[at].isInt() || !arguments[0].isTensor()) return {};
    const Tensor& scores = arguments[0].toTensor();
    if (!scores.dim()) return {};
    auto experts = scores.size(at::maybe_wrap_dim(arguments[at].toInt(), scores.dim()));
    return {draw_of_router(), experts, top ? arguments[1].toInt() : 1, 0};
  }
  for (const auto& argument : arguments) {
    if (!argument.isTensor()) continue;
    if (auto block = block_of(argument.toTensor()); block && block->choice.draw && !block->choice.stride)
      return block->choice;
  }
  return {};
}

Choice copied_choice(const Tensor& target, const Tensor& source) {
  auto block = block_of(source);
  if (!block || !block->choice.draw) return {};
  Choice choice = block->choice;
  if (!choice.stride) return choice;
  auto portion = portion_of(source, choice);
  if (!portion || portion->dim < 0 || portion->count != choice.experts) return {};
  choice.stride = target.stride(portion->dim);
  return choice;
}

void keep_choices(const Tensor& gathered, const Tensor& part) {
  auto from = block_of(part), to = block_of(gathered);
  if (!from || !to || to->real || to->pending || !part.is_contiguous() || !gathered.is_contiguous()) return;
  if (from->bytes != part.nbytes() || to->bytes != gathered.nbytes()) return;
  to->ones = from->ones;
  to->choice = from->choice;
  to->choice.ranks *= std::max<std::int64_t>(gathered.numel() / std::max<std::int64_t>(part.numel(), 1), 1);
}

void expand_masks(const std::string& name, c10::IValue* arguments) {
  if (!arguments[1].isList()) return;
  auto is_mask = [](const IValue& index) {
    if (!index.isTensor() || !index.toTensor().defined()) return false;
    auto type = index.toTensor().scalar_type();
    return type == at::kBool || type == at::kByte;
  };
  auto indices = arguments[1].toListRef();
  if (std::none_of(indices.begin(), indices.end(), is_mask)) return;
  if (name != "aten::index" && arguments[2].toTensor().numel() == 1 && !arguments[3].toBool()) return;
  c10::List<std::optional<Tensor>> expanded;
  for (const auto& index : indices) {
    if (is_mask(index)) {
      for (auto& places : at::nonzero(index.toTensor()).unbind(1)) expanded.push_back(std::move(places));
    } else if (index.isTensor()) {
      expanded.push_back(index.toTensor());
    } else {
      expanded.push_back(std::nullopt);
    }
  }
  arguments[1] = std::move(expanded);
}

}  // namespace foretrain
