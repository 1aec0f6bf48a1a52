// The kernel behind every operator on the fake device: shapes, values where they are kept, and a line in the log.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>
#include <vector>

#include "log.hpp"

namespace foretrain {

// Cost function of operators. Called once per operator and shapes; arguments and results as on the stack.
using Price = std::function<Cost(const std::string& name, c10::ArrayRef<c10::IValue> arguments,
                                 c10::ArrayRef<c10::IValue> results)>;
void set_price(Price price);
Cost price_of(const std::string& name, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results);

// The cost of an operator, remembered by name and arguments.
const Cost& cost_of(const std::string& name, c10::ArrayRef<c10::IValue> arguments);

// The GPU's compute capability, ten times the major number and the minor: some operators need one.
void set_capability(int capability);

// The number of a kernel's name in traces.
std::int32_t number_of(const std::string& name);
const std::vector<std::string>& kernel_names();

// Puts one kernel on the current stream of the current device, unless a shape function is at work.
void launch(const Cost& cost);

// # Note [Fused regions]
// What a compiler would fuse runs operator by operator here, and is charged as one kernel: inside a region nothing is
// launched, and whoever opened it launches one kernel in the end. Memory is taken for what is left of its results when
// the region ends: what is used inside only never leaves the registers.
void begin_fused();
void end_fused();
// Ends all regions of this thread: an error has left them.
void abandon_fused();
bool in_fused_region();

// Whether what this thread launches next was computed before: what a compiled graph's backward pass repeats.
void set_recomputing(bool again);

// Called when the host reads a value that is not real; may throw.
void set_on_unreal_read(std::function<void(const std::string& what)> call);
void unreal_read(const std::string& what);

// Operators priced and operators computed, so far.
std::pair<std::int64_t, std::int64_t> priced_and_computed();

// Registers the kernel for `operators` (of namespace aten, with overload) and as fallback for all others. Those `generated`
// refuse tensors on different devices, and so do those `iterated`, in other words.
void install_kernels(const std::vector<std::string>& operators, const std::vector<std::string>& generated,
                     const std::vector<std::string>& iterated);
// Operators with kernels of their own (natives.cpp).
const std::vector<std::string>& native_operators();

}  // namespace foretrain
