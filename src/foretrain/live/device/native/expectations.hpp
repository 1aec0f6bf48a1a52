// Results of operators that depend on values that do not exist.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "memory.hpp"

namespace foretrain {

// # Note [Expectations]
// Some operators count. Of values that no GPU has computed, the count is taken to be what capacity is planned for:
// histograms are balanced, with the right sum; masks select everything; all values are distinct, and what must hold for
// all of them does. The first is what a router of experts is trained for, the others are the most that can be. Ones that
// are scattered, as into a map from tokens to the experts that a router has chosen, do not meet: there are as many as
// indices, and as many in one part of the map as in another. The result is marked as not real, and the script's line is
// warned of. Where nothing can be expected, e.g. of how many bins, the error says what to give.

// The results, given the arguments; none where nothing is to be expected of these.
using Expectation = std::vector<c10::IValue> (*)(c10::ArrayRef<c10::IValue> arguments);

// As on a GPU, masks among the indices of `index` and `index_put` are replaced by where they are true, for which the host
// waits; but not where one value is put, which is a masked fill. `arguments` are the operator's, on the stack.
void expand_masks(const std::string& name, c10::IValue* arguments);

// # Note [Routers]
// Where loads of experts are given, indices that `topk`, `argmax` or `max` return are taken to be a router's choice. Its
// storage remembers the draw, and so do copies, sorted and scattered ones: then histograms, sums of maps, and masks of one
// expert hold the loads of that draw, which Python knows. Without loads nothing is remembered, and all are balanced.
void set_routers(std::function<std::int64_t()> draw,
                 std::function<std::vector<std::int64_t>(std::int64_t draw, std::int64_t experts, std::int64_t total,
                                                         std::int64_t top)> counts);
bool routers_draw();
// What is chosen by an operator of these arguments, or what they hold that was; before it runs.
Choice choice_of(const std::string& name, c10::ArrayRef<c10::IValue> arguments);
// What `target` holds that `source` is copied to.
Choice copied_choice(const at::Tensor& target, const at::Tensor& source);

// Remember in `gathered`, which is not computed, what a router has chosen in `part`: members choose alike.
void keep_choices(const at::Tensor& gathered, const at::Tensor& part);

// Null for operators that need none. `name` is with namespace and overload.
Expectation expectation_of(const std::string& name, const std::string& overload);

}  // namespace foretrain
