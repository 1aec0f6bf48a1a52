// Operators that have kernels of their own: those that make, view, move and read tensors.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <torch/library.h>

#include "device.hpp"
#include "expectations.hpp"
#include "kernels.hpp"
#include "memory.hpp"

namespace foretrain {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

constexpr std::size_t FRESH = 32ULL << 20;        // bytes from which the host's memory comes as zeros (glibc's mmap)
constexpr std::int64_t MOST_BYTES = 256LL << 20;  // of pickled objects sent by way of the device
constexpr double STAGING = 12e9;                  // bytes/s at which a driver copies pageable memory aside
const c10::DispatchKeySet CUDA(c10::DispatchKey::CUDA);

int device_in(const std::optional<c10::Device>& device) {
  return device && device->has_index() ? device->index() : current_device();
}

void synchronize() { log().ask(wire::STREAM, current_key(current_device())); }

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice here(device_in(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory(), CUDA, c10::dtype_or_default(type),
                                   format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice here(device_in(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_memory(), CUDA, c10::dtype_or_default(type));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> offset) {
  auto at = offset ? std::optional<std::int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

Tensor view(const Tensor& self, SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor unfold(const Tensor& self, std::int64_t dimension, std::int64_t size, std::int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() == sizes) return self;
  tensor->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  auto needed = static_cast<std::size_t>(tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(*storage, needed);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !sizes.empty())
    tensor->set_sizes_and_strides(sizes, c10::contiguous_strides(sizes), offset.expect_int());
  else
    tensor->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  SymInt elements(static_cast<std::int64_t>(source.nbytes() / self.itemsize()));
  return set_storage(self, std::move(source), SymInt(0), SymIntArrayRef(&elements, 1), {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
  OnDevice here(self.device().index());
  SymInt none(0);
  at::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                            device_memory().allocate(0), &device_memory(), true));
  return set_storage(self, std::move(storage), SymInt(0), SymIntArrayRef(&none, 1), {});
}

// Copies between host and device.

// Copies the values if there are any; tells whether there were.
bool copy_values(const Tensor& self, const Tensor& source) {
  bool small = self.numel() <= static_cast<std::int64_t>(SMALL);
  // Objects travel pickled, as bytes, and are needed whole whatever their size.
  bool bytes = self.scalar_type() == at::kByte && source.scalar_type() == at::kByte && self.numel() <= MOST_BYTES;
  bool known = source.is_cuda() ? has_values(source) || (self.is_cpu() && can_hold(source))
                                : source.is_cpu() && (small || bytes);
  if (!known) return false;
  if (self.is_cuda()) {
    if (!can_hold(self) && !bytes) return false;
    hold(self);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto target = self.is_cuda() ? on_cpu(self) : self;
  target.copy_(source.is_cuda() ? on_cpu(source) : source);
  return true;
}

// Pinned memory and large pieces are zeros that nobody has paid for, and stay so: a checkpoint would fill the machine.
void make_up(const Tensor& self) {
  if (self.nbytes() >= FRESH || (self.nbytes() > SMALL && is_pinned(self.storage().data()))) return;
  if (self.is_floating_point())
    self.fill_(1.0);
  else
    self.zero_();
}

void copy_in(const Tensor& self, const Tensor& source, bool non_blocking) {
  bool pinned = is_pinned(source.storage().data());
  launch(cost_of(pinned ? "Memcpy HtoD (Pinned -> Device)" : "Memcpy HtoD (Pageable -> Device)", {self, source}));
  if (!non_blocking)
    synchronize();
  else if (!pinned)
    log().spend(static_cast<Time>(static_cast<double>(self.nbytes()) / STAGING * 1e12));
}

void copy_out(const Tensor& self, const Tensor& source, bool non_blocking) {
  bool pinned = is_pinned(self.storage().data());
  launch(cost_of(pinned ? "Memcpy DtoH (Device -> Pinned)" : "Memcpy DtoH (Device -> Pageable)", {self, source}));
  if (!(non_blocking && pinned)) synchronize();
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  if (self.sizes() != source.sizes()) {
    auto spread = source.expand(self.sizes());
    return copy_(self, spread, non_blocking);
  }
  bool copied = copy_values(self, source);
  bool real = copied && (source.is_cpu() || is_real(source));
  if (self.is_cuda()) {
    if (copied)
      set_real(self, real);
    else
      lose(self);
    auto from = block_of(source), to = block_of(self);
    if (from && to && to->bytes == self.nbytes()) {
      to->ones = from->ones;
      to->choice = copied_choice(self, source);
    }
  }
  if (Shapes::at_work()) return self;
  OnDevice here(self.is_cuda() ? self.device().index() : source.device().index());
  if (self.is_cuda() && source.is_cuda())
    launch(cost_of("aten::copy_", {self, source}));
  else if (self.is_cuda())
    copy_in(self, source, non_blocking);
  else
    copy_out(self, source, non_blocking);
  if (!real && self.is_cpu())
    unreal_read(c10::str("a copy of ", self.numel(), " ", self.scalar_type(), " values to the host"));
  if (!copied && self.is_cpu()) make_up(self);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor copy = target;
  return copy_(copy, self, non_blocking);
}

// What the host reads.

at::Scalar local_scalar(const Tensor& self) {
  OnDevice here(self.device().index());
  launch(cost_of("Memcpy DtoH (Device -> Pageable)", {self, self}));
  synchronize();
  if (!is_real(self)) unreal_read(c10::str("a ", self.scalar_type(), " value on the host"));
  if (can_hold(self)) return on_cpu(self).item();
  if (self.is_floating_point()) return at::Scalar(1.0);
  if (self.scalar_type() == at::kBool) return at::Scalar(false);
  return at::Scalar(static_cast<std::int64_t>(1));
}

bool equal(const Tensor& self, const Tensor& other) {
  OnDevice here(self.device().index());
  launch(cost_of("aten::equal", {self, other}));
  synchronize();
  if (is_real(self) && is_real(other)) return on_cpu(self).equal(on_cpu(other));
  unreal_read("whether two tensors are equal");
  return self.sizes() == other.sizes();
}

// As `sdp::select_sdp_backend` of a GPU since Ampere: the first kernel, in the order of preference, that can.
std::int64_t attention_backend(const Tensor& query, const Tensor& key, const Tensor& value,
                               const std::optional<Tensor>& mask, double, bool, std::optional<double>, bool grouped) {
  auto& context = at::globalContext();
  auto width = query.size(-1);
  bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  bool masked = mask && mask->defined();
  bool alike = query.dim() == 4 && key.size(-1) == width && value.size(-1) == width;
  for (auto backend : context.sDPPriorityOrder()) switch (backend) {
      case at::SDPBackend::flash_attention:
        if (context.userEnabledFlashSDP() && half && !masked && alike && width <= 256) return static_cast<int>(backend);
        break;
      case at::SDPBackend::efficient_attention:
        if (context.userEnabledMemEfficientSDP() && query.dim() == 4 && !grouped && width % (half ? 8 : 4) == 0 &&
            value.size(-1) % (half ? 8 : 4) == 0)
          return static_cast<int>(backend);
        break;
      case at::SDPBackend::cudnn_attention:
        if (context.userEnabledCuDNNSDP() && half && alike && width % 8 == 0 && width <= 256)
          return static_cast<int>(backend);
        break;
      case at::SDPBackend::math:
        if (context.userEnabledMathSDP()) return static_cast<int>(backend);
        break;
      default:
        break;
    }
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}

bool no_other_ctc(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, std::int64_t) { return false; }
bool no_other_ctc_tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::int64_t) { return false; }

// nn.TransformerEncoder asks it whether to leave padding out, by nested tensors, whose sizes hang on values.
bool not_left_aligned(const Tensor&, const Tensor&) { return false; }

void record_stream(Tensor& self, at::Stream stream) { device_memory().recordStream(self.storage().data_ptr(), stream); }

}  // namespace

const std::vector<std::string>& native_operators() {
  static const std::vector<std::string> names = {"empty.memory_format",
                                                 "empty_strided",
                                                 "as_strided",
                                                 "view",
                                                 "_reshape_alias",
                                                 "unfold",
                                                 "resize_",
                                                 "set_",
                                                 "set_.source_Storage",
                                                 "set_.source_Storage_storage_offset",
                                                 "set_.source_Tensor",
                                                 "copy_",
                                                 "_copy_from",
                                                 "_local_scalar_dense",
                                                 "equal",
                                                 "_fused_sdp_choice",
                                                 "_nested_tensor_from_mask_left_aligned",
                                                 "_use_cudnn_ctc_loss",
                                                 "_use_miopen_ctc_loss",
                                                 "_use_miopen_ctc_loss.Tensor",
                                                 "_use_cudnn_ctc_loss.Tensor",
                                                 "record_stream"};
  return names;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("equal", TORCH_FN(equal));
  m.impl("_fused_sdp_choice", TORCH_FN(attention_backend));
  m.impl("_nested_tensor_from_mask_left_aligned", TORCH_FN(not_left_aligned));
  m.impl("_use_cudnn_ctc_loss", TORCH_FN(no_other_ctc));
  m.impl("_use_miopen_ctc_loss", TORCH_FN(no_other_ctc));
  m.impl("_use_miopen_ctc_loss.Tensor", TORCH_FN(no_other_ctc_tensor));
  m.impl("_use_cudnn_ctc_loss.Tensor", TORCH_FN(no_other_ctc_tensor));
  m.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace foretrain

namespace at::native {
// Asked instead of the operator.
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &foretrain::attention_backend)
}  // namespace at::native
