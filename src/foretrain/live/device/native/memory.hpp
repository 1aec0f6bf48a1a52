// Device memory: addresses without bytes behind them, and the values of small tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocator.hpp"
#include "log.hpp"

namespace foretrain {

constexpr int MAX_DEVICES = 64;
constexpr std::size_t SMALL = 16384;  // bytes of storage up to which values are kept

// Collective whose result a storage holds once it is read.
class Delivery {
 public:
  virtual ~Delivery() = default;
  // Waits, in real time only, until all members have contributed, and writes the values.
  virtual void deliver() = 0;
};

// What a router of experts has chosen, where a storage holds that: see Note [Routers].
struct Choice {
  std::int64_t draw = 0;     // of the router; 0 where there is none
  std::int64_t experts = 0;  // that it chooses from
  std::int64_t top = 1;      // that it chooses for each token
  std::int64_t stride = 0;   // of a map: element i is of expert i / stride % experts; 0 where elements are experts' numbers
  std::int64_t ranks = 1;    // whose choices are here, gathered from all
};

// Memory behind a storage. Values, where there are any, are in ordinary memory.
struct StorageBlock {
  Address address = 0;  // the allocator's once `charged`; tensors that a shape function makes on the way are not
  std::size_t bytes = 0;
  std::int16_t device = 0;
  bool charged = false;
  bool real = false;     // the values are what a GPU would have computed
  double ones = 0;       // share of its elements that are 1, if all others are 0 and which they are is not known; else 0
  double mean = 0;       // of its elements, if they are numbers of ones in parts of such a tensor; else 0
  Choice choice;
  char* values = nullptr;
  std::shared_ptr<Delivery> pending;
};

// The block behind a CUDA tensor or storage; null for others, and for empty ones.
StorageBlock* block_of(const at::Tensor& tensor);
StorageBlock* block_of(const c10::StorageImpl& storage);

// # Note [Real values]
// Control flow of training scripts hangs on a few small tensors: bucket indices, loss scales, found_inf, split sizes.
// So a storage of up to SMALL bytes can have values, and an operator whose inputs all can is computed, on the CPU. What
// comes out of a large tensor is not known: it gets a plausible constant and is marked as not real, and so is all that
// is computed with it.

// Whether values could be kept.
bool can_hold(const at::Tensor& tensor);
// Whether the tensor has values that a GPU would have computed; true for empty tensors.
bool is_real(const at::Tensor& tensor);
// Whether the tensor has values now, real or made up.
bool has_values(const at::Tensor& tensor);
// A CPU tensor over the values; they are made up first where there are none.
at::Tensor on_cpu(const at::Tensor& tensor);
// Makes room for values in a storage of any size.
void hold(const at::Tensor& tensor);
void set_real(const at::Tensor& tensor, bool real);
// Its values have been overwritten with unknown ones.
void lose(const at::Tensor& tensor);
// `delivery` will write them.
void expect(const at::Tensor& tensor, std::shared_ptr<Delivery> delivery);

// Counts a tensor that came out of a shape function.
void charge(const at::Tensor& tensor);
// Counts what was made in fused regions that are over and still lives: what is used inside only is kept in registers.
void charge_survivors();

c10::DeviceAllocator& device_memory();
c10::Allocator& pinned_memory();
bool is_pinned(const void* pointer);
// Of every GPU, bytes, and what of it is not PyTorch's: CUDA's context, NCCL's buffers. Before the first allocation.
// Of all devices, from now on; text as in PYTORCH_CUDA_ALLOC_CONF.
void set_allocator_settings(const std::string& text);
void set_capacity(std::int64_t bytes, std::int64_t elsewhere);
// The model of the caching allocator behind `device`.
Allocator& allocator_of(int device);
// Gives the storage another size; values that it has stay. Sharded training frees and remakes whole parameters so.
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);

// The duration of the kernels launched since the step began, ps, and the most bytes allocated from then on until the
// next one: of the last step that ended, at most 1,024 of them.
using MemoryTimeline = std::vector<std::pair<Time, std::int64_t>>;
MemoryTimeline memory_timeline(int device);
// A step has ended.
void end_memory_step();

// Purpose of new memory; the optimizer sets it while it steps.
void set_tag(Tag tag);
// The tensor's memory turns out to be for something else.
void retag(const at::Tensor& tensor, Tag tag);

// While it lives, allocations are not counted and nothing is launched: a shape function is at work.
class Shapes {
 public:
  Shapes() { ++depth; }
  ~Shapes() { --depth; }
  Shapes(const Shapes&) = delete;
  static bool at_work() { return depth > 0; }

 private:
  static thread_local int depth;
};

}  // namespace foretrain
