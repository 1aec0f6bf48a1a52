#include "memory.hpp"

#include <ATen/core/ATen_fwd.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <unordered_set>
#include <utility>
#include <vector>

#include "device.hpp"
#include "kernels.hpp"

namespace foretrain {

thread_local int Shapes::depth = 0;

namespace {

std::mutex mutex;
Settings settings;
std::atomic<Tag> tag{kActivation};
std::atomic<Address> next_uncharged{Address{1} << 46};  // above what any allocator hands out

// What the environment told, or the script since. `mutex` is held.
AllocatorOptions& options_told() {
  auto text = [](const char* name) { return std::getenv(name); };
  static auto options =
      allocator_options_from_environment(text("PYTORCH_ALLOC_CONF"), text("PYTORCH_CUDA_ALLOC_CONF")).options;
  return options;
}

StreamCallbacks streams_of(int device) {
  // The allocator's lock is held, so the interpreter must be kept as well.
  auto ask = [](wire::Question question, StreamKey stream, std::uint64_t event) {
    return log().ask(question, stream, static_cast<EventId>(event), 0, false);
  };
  StreamCallbacks calls;
  calls.record = [device](Stream stream) {
    return static_cast<std::uint64_t>(log().record(stream_key(device, stream)));
  };
  calls.over = [ask](std::uint64_t event) {
    bool over = ask(wire::QUERY_EVENT, 0, event).value;
    if (over) log().forget(static_cast<EventId>(event));
    return over;
  };
  calls.wait = [ask](std::uint64_t event) {
    ask(wire::EVENT, 0, event);
    log().forget(static_cast<EventId>(event));
  };
  calls.synchronize = [ask, device] { ask(wire::DEVICE, stream_key(device, 0), 0); };
  return calls;
}

// Allocated bytes over a step, thinned as it grows: of neighbours the larger stays, so that no peak is lost.
class Timeline {
 public:
  void add(Time time, std::int64_t bytes) {
    std::lock_guard lock(mutex_);
    if (!now_.empty() && time - began_ - now_.back().first < width_) {
      now_.back().second = std::max(now_.back().second, bytes);
      return;
    }
    now_.emplace_back(time - began_, bytes);
    if (now_.size() < kMost) return;
    for (std::size_t i = 0; i < kMost / 2; ++i)
      now_[i] = {now_[2 * i].first, std::max(now_[2 * i].second, now_[2 * i + 1].second)};
    now_.resize(kMost / 2);
    width_ = std::max<Time>(2 * width_, 1'000'000);
  }
  void end_step(Time time) {
    std::lock_guard lock(mutex_);
    last_ = std::exchange(now_, {});
    began_ = time;
    width_ = 0;
  }
  MemoryTimeline last() {
    std::lock_guard lock(mutex_);
    return last_;
  }

 private:
  static constexpr std::size_t kMost = 1024;
  std::mutex mutex_;
  MemoryTimeline now_, last_;
  Time began_ = 0, width_ = 0;
};

Timeline& timeline_of(int device) {
  static auto* all = new std::array<Timeline, MAX_DEVICES>;
  return (*all)[static_cast<std::size_t>(device)];
}

void note_allocated(int device) {
  timeline_of(device).add(log().kernel_time(), allocator_of(device).allocated());
}

// Blocks of the fused regions that this thread is in, in the order of their making; null where released since.
thread_local std::vector<StorageBlock*> passing;

void release(void* context) {
  auto block = static_cast<StorageBlock*>(context);
  if (!block) return;
  if (!block->charged && !passing.empty()) std::replace(passing.begin(), passing.end(), block, static_cast<StorageBlock*>(nullptr));
  if (block->charged) {
    allocator_of(block->device).release(block->address);
    note_allocated(block->device);
  }
  std::free(block->values);
  delete block;
}

void charge_block(StorageBlock& block, Tag purpose) {
  if (in_fused_region()) {
    if (!block.address) block.address = next_uncharged.fetch_add((block.bytes + 511) / 512 * 512);
    passing.push_back(&block);
    return;
  }
  try {
    block.address = allocator_of(block.device)
                        .allocate(block.bytes, static_cast<Stream>(current_stream(block.device)), purpose);
  } catch (const OutOfMemory& error) {
    C10_THROW_ERROR(OutOfMemoryError, error.message());
  }
  block.charged = true;
  note_allocated(block.device);
}

c10::DataPtr new_block(std::size_t bytes, Tag purpose) {
  c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current_device()));
  if (!bytes) return {nullptr, nullptr, &release, device};
  auto block = std::make_unique<StorageBlock>();
  block->bytes = bytes;
  block->device = static_cast<std::int16_t>(current_device());
  if (Shapes::at_work())
    block->address = next_uncharged.fetch_add((bytes + 511) / 512 * 512);
  else
    charge_block(*block, purpose);
  auto address = reinterpret_cast<void*>(block->address);
  return {address, block.release(), &release, device};
}

c10::CachingAllocator::Stat copied(const Stat& stat) { return {stat.current, stat.peak, stat.allocated, stat.freed}; }

c10::CachingAllocator::StatArray copied(const PoolStat& stats) {
  return {copied(stats.all), copied(stats.small_pool), copied(stats.large_pool)};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override { return new_block(bytes, tag); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < device_count(); ++device) allocator_of(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &release || !data.get_context()) return;
    auto block = static_cast<StorageBlock*>(data.get_context());
    if (block->charged) allocator_of(block->device).record_stream(block->address, static_cast<Stream>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto ours = allocator_of(device).statistics();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocation = copied(ours.allocation);
    stats.segment = copied(ours.segment);
    stats.active = copied(ours.active);
    stats.inactive_split = copied(ours.inactive_split);
    stats.allocated_bytes = copied(ours.allocated_bytes);
    stats.reserved_bytes = copied(ours.reserved_bytes);
    stats.active_bytes = copied(ours.active_bytes);
    stats.inactive_split_bytes = copied(ours.inactive_split_bytes);
    stats.requested_bytes = copied(ours.requested_bytes);
    stats.oversize_allocations = copied(ours.oversize_allocations);
    stats.oversize_segments = copied(ours.oversize_segments);
    stats.num_alloc_retries = ours.num_alloc_retries;
    stats.num_ooms = ours.num_ooms;
    stats.num_sync_all_streams = ours.num_sync_all_streams;
    stats.num_device_alloc = ours.num_device_alloc;
    stats.num_device_free = ours.num_device_free;
    stats.max_split_size = ours.max_split_size;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { allocator_of(device).reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex device) override { allocator_of(device).reset_peak(); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return allocator_of(device).memory_info();
  }
};

std::unordered_set<const void*>& pinned() {
  static auto* pointers = new std::unordered_set<const void*>;
  return *pointers;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    // Zeros, as two runs must read the same where nothing was written; large ones cost no memory until somebody does.
    void* data = std::calloc(std::max<std::size_t>(bytes, 1), 1);
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
void settle(StorageBlock& block) {
  if (auto pending = std::exchange(block.pending, nullptr)) pending->deliver();
}

}  // namespace

MemoryTimeline memory_timeline(int device) { return timeline_of(device).last(); }

void end_memory_step() {
  for (int device = 0; device < device_count(); ++device) {
    timeline_of(device).end_step(log().kernel_time());
    note_allocated(device);
  }
}

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

void set_capacity(std::int64_t bytes, std::int64_t elsewhere) {
  settings.capacity = static_cast<std::uint64_t>(bytes);
  settings.overhead = static_cast<std::uint64_t>(elsewhere);
}

Allocator& allocator_of(int device) {
  static std::atomic<Allocator*> allocators[MAX_DEVICES];
  auto& mine = allocators[device];
  if (auto found = mine.load(std::memory_order_acquire)) return *found;
  std::lock_guard lock(mutex);
  if (!mine.load()) {
    auto own = settings;
    own.device = device;
    own.options = options_told();
    mine.store(new Allocator(own, streams_of(device)), std::memory_order_release);
  }
  return *mine.load();
}

void set_allocator_settings(const std::string& text) {
  AllocatorOptions options;
  {
    std::lock_guard lock(mutex);
    try {
      options = options_told() = parse_allocator_options(text, options_told()).options;
    } catch (const std::invalid_argument& error) {
      TORCH_CHECK(false, error.what());
    }
  }
  for (int device = 0; device < device_count(); ++device) allocator_of(device).set_options(options);
}

void set_tag(Tag purpose) { tag = purpose; }

void retag(const at::Tensor& tensor, Tag purpose) {
  if (auto block = block_of(tensor); block && block->charged) allocator_of(block->device).retag(block->address, purpose);
}

StorageBlock* block_of(const c10::StorageImpl& storage) {
  auto& data = storage.data_ptr();
  return data.get_deleter() == &release ? static_cast<StorageBlock*>(data.get_context()) : nullptr;
}

StorageBlock* block_of(const at::Tensor& tensor) {
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

bool has_values(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  auto block = block_of(tensor);
  if (block) settle(*block);
  return block && block->values;
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
  if (auto block = block_of(tensor)) {
    block->real = real;
    block->ones = block->mean = 0;
    block->choice = {};
  }
}

void lose(const at::Tensor& tensor) {
  if (auto block = block_of(tensor)) {
    block->real = false;
    block->ones = block->mean = 0;
    block->choice = {};
    block->pending = nullptr;
    std::free(std::exchange(block->values, nullptr));
  }
}

void expect(const at::Tensor& tensor, std::shared_ptr<Delivery> delivery) {
  if (auto block = block_of(tensor)) block->pending = std::move(delivery);
}

void charge(const at::Tensor& tensor) {
  if (auto block = block_of(tensor); block && !block->charged) charge_block(*block, tag);
}

void charge_survivors() {
  for (auto block : std::exchange(passing, {}))
    if (block && !block->charged) charge_block(*block, tag);
}

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  if (bytes == storage.nbytes()) return;
  OnDevice here(storage.device().index());
  auto before = block_of(storage);
  if (before) settle(*before);
  bool real = before && before->real;
  std::string values(before && before->values ? before->values : "", before && before->values ? std::min(bytes, before->bytes) : 0);
  storage.set_data_ptr_noswap(new_block(bytes, kParameter));
  storage.set_nbytes(bytes);
  if (values.empty()) return;
  auto block = block_of(storage);
  block->values = static_cast<char*>(std::calloc(1, bytes));
  TORCH_CHECK(block->values, "no memory left for the values of ", bytes, " bytes on the device");
  std::memcpy(block->values, values.data(), values.size());
  block->real = real;
}

}  // namespace foretrain
