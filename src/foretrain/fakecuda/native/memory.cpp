#include "memory.hpp"

#include <ATen/core/ATen_fwd.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

#include "device.hpp"

namespace foretrain {

thread_local int Shapes::depth = 0;

namespace {

std::mutex mutex;
std::int64_t capacity = 80LL << 30;
struct Use { std::int64_t now = 0, peak = 0; } use[MAX_DEVICES];
std::uintptr_t next_address = 0x700000000000ULL;

void release(void* context) {
  auto block = static_cast<Block*>(context);
  if (!block) return;
  {
    std::lock_guard lock(mutex);
    if (block->charged) use[block->device].now -= block->bytes;
  }
  std::free(block->values);
  delete block;
}

void charge_block(Block& block) {
  std::lock_guard lock(mutex);
  auto& mine = use[block.device];
  mine.now += block.bytes;
  mine.peak = std::max(mine.peak, mine.now);
  if (mine.now > capacity) {
    mine.now -= block.bytes;
    C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory.");
  }
  block.charged = true;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current_device()));
    if (!bytes) return {nullptr, nullptr, &release, device};
    auto block = std::make_unique<Block>();
    block->bytes = bytes;
    block->device = static_cast<std::int16_t>(current_device());
    {
      std::lock_guard lock(mutex);
      block->address = next_address;
      next_address += (bytes + 511) / 512 * 512;
    }
    if (!Shapes::at_work()) charge_block(*block);
    auto address = reinterpret_cast<void*>(block->address);
    return {address, block.release(), &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* all : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*all)[0].current = use[device].now;
      (*all)[0].peak = use[device].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { use[device].peak = use[device].now; }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {static_cast<std::size_t>(capacity - use[device].now), static_cast<std::size_t>(capacity)};
  }
};

std::unordered_set<const void*>& pinned() {
  static auto* pointers = new std::unordered_set<const void*>;
  return *pointers;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = std::malloc(std::max<std::size_t>(bytes, 1));
    TORCH_CHECK(data, "no memory left for ", bytes, " pinned bytes");
    std::lock_guard lock(mutex);
    pinned().insert(data);
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  static void unpin(void* data) {
    {
      std::lock_guard lock(mutex);
      pinned().erase(data);
    }
    std::free(data);
  }
};

// What an unknown value is taken to be: nothing divides by it, and no index goes astray.
void make_up(const at::Tensor& tensor) {
  if (at::isFloatingType(tensor.scalar_type()) || (tensor.dim() == 0 && at::isIntegralType(tensor.scalar_type(), false)))
    tensor.fill_(1);
}

// Deliveries write into the same storage, so it is taken out first.
void settle(Block& block) {
  if (auto pending = std::exchange(block.pending, nullptr)) pending->deliver();
}

}  // namespace

c10::DeviceAllocator& device_memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}

c10::Allocator& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

bool is_pinned(const void* pointer) {
  std::lock_guard lock(mutex);
  return pinned().count(pointer) > 0;
}

void set_capacity(std::int64_t bytes, std::int64_t) { capacity = bytes; }
void set_memory_fraction(double, int) {}
double memory_fraction(int) { return 1; }

Block* block_of(const c10::StorageImpl& storage) {
  auto& data = storage.data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage()) return nullptr;
  return block_of(*tensor.storage().unsafeGetStorageImpl());
}

bool can_hold(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  auto block = block_of(tensor);
  return block && (block->bytes <= SMALL || block->values || block->pending);
}

bool is_real(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  auto block = block_of(tensor);
  if (!block) return false;
  settle(*block);
  return block->real;
}

void hold(const at::Tensor& tensor) {
  auto block = block_of(tensor);
  if (!block || block->values) return;
  block->values = static_cast<char*>(std::calloc(1, std::max<std::size_t>(tensor.storage().nbytes(), 1)));
  TORCH_CHECK(block->values, "no memory left for the values of ", tensor.storage().nbytes(), " bytes on the device");
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  auto block = block_of(tensor);
  bool fresh = false;
  if (block) {
    settle(*block);
    fresh = !block->values;
    hold(tensor);
  }
  c10::Device cpu(c10::DeviceType::CPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(tensor.storage().nbytes()),
      at::DataPtr(block ? block->values : nullptr, cpu), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                        c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (fresh && tensor.numel()) {
    // All of the storage, as other views of it must not find zeros.
    auto whole = alias.as_strided({static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.itemsize())}, {1}, 0);
    make_up(tensor.dim() ? whole : alias);
  }
  return alias;
}

void set_real(const at::Tensor& tensor, bool real) {
  if (auto block = block_of(tensor)) block->real = real;
}

void lose(const at::Tensor& tensor) {
  if (auto block = block_of(tensor)) {
    block->real = false;
    block->pending = nullptr;
    std::free(std::exchange(block->values, nullptr));
  }
}

void expect(const at::Tensor& tensor, std::shared_ptr<Delivery> delivery) {
  if (auto block = block_of(tensor)) block->pending = std::move(delivery);
}

void charge(const at::Tensor& tensor) {
  if (auto block = block_of(tensor); block && !block->charged) charge_block(*block);
}

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  if (bytes == storage.nbytes()) return;
  OnDevice here(storage.device().index());
  storage.set_data_ptr_noswap(device_memory().allocate(bytes));
  storage.set_nbytes(bytes);
}

}  // namespace foretrain
