#include "group.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>

#include "device.hpp"
#include "expectations.hpp"
#include "memory.hpp"

namespace foretrain {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int LAUNCHES = 2;  // a collective's way through c10d and NCCL takes the host about as long as two kernels'

// A number that all members find alike: of the ranks, and of how many groups of just these ranks there were before.
std::int64_t number_of_group(const std::vector<std::int32_t>& ranks, int occurrence) {
  std::uint64_t hash = 1469598103934665603ULL;
  auto mix = [&hash](std::int64_t word) {  // the last step of splitmix64
    hash ^= static_cast<std::uint64_t>(word) + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2);
    hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9ULL;
    hash = (hash ^ hash >> 27) * 0x94d049bb133111ebULL;
    hash ^= hash >> 31;
  };
  mix(occurrence);
  for (auto rank : ranks) mix(rank);
  return static_cast<std::int64_t>(hash >> 1) | 1;  // never 0, which is the world
}

// End of a collective, forgotten when no object refers to it.
struct End {
  EventId id;
  explicit End(EventId event) : id(event) {}
  ~End() { log().forget(id); }
  End(const End&) = delete;
};
using EndPtr = std::shared_ptr<End>;

// Contribution of a live member, and the number of members that it represents.
struct Share {
  int rank, members;
  std::string bytes;
};

// Contributions of all members, in the group's order. `real` if no contribution was made up.
struct Shares {
  std::vector<Share> all;
  std::vector<std::int32_t> stand_ins;  // by rank in the group; empty if each share is also of the members behind it
  bool real = true;

  // Contribution of `rank`, or of the rank that represents it.
  const Share& of(int rank) const {
    int giver = stand_ins.empty() ? rank : stand_ins[rank];
    auto behind = std::upper_bound(all.begin(), all.end(), giver, [](int r, const Share& share) { return r < share.rank; });
    return behind == all.begin() ? all.front() : *std::prev(behind);
  }
};

Shares contributions_to(EventId end) {
  auto answer = log().ask(wire::VALUES, 0, end);
  Shares shares;
  std::string_view rest = answer.payload;
  while (rest.size() >= sizeof(wire::Contribution)) {
    wire::Contribution head;
    std::memcpy(&head, rest.data(), sizeof head);
    auto bytes = rest.substr(sizeof head, head.bytes);
    rest.remove_prefix(sizeof head + head.bytes);
    if (!head.members) {
      shares.stand_ins.resize(bytes.size() / sizeof(std::int32_t));
      std::memcpy(shares.stand_ins.data(), bytes.data(), bytes.size());
      continue;
    }
    if (bytes.empty()) continue;
    shares.real = shares.real && bytes.back();
    bytes.remove_suffix(1);
    shares.all.push_back({static_cast<int>(head.rank), static_cast<int>(head.members), std::string(bytes)});
  }
  return shares;
}

Tensor as_tensor(std::string_view bytes, at::ScalarType type) {
  auto size = static_cast<std::int64_t>(bytes.size() / c10::elementSize(type));
  return at::from_blob(const_cast<char*>(bytes.data()), {size}, at::TensorOptions().dtype(type));
}

Tensor reduced(const std::vector<Share>& shares, const ReduceOp& op, int size, at::ScalarType type) {
  Tensor total;
  for (const auto& share : shares) {
    auto value = as_tensor(share.bytes, type);
    switch (static_cast<ReduceOp::RedOpType>(op)) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
      case ReduceOp::PREMUL_SUM:
        value = value * share.members;
        total = total.defined() ? total + value : value;
        break;
      case ReduceOp::PRODUCT:
        value = value.pow(share.members);
        total = total.defined() ? total * value : value;
        break;
      case ReduceOp::MIN:
        total = total.defined() ? at::minimum(total, value) : value.clone();
        break;
      case ReduceOp::MAX:
        total = total.defined() ? at::maximum(total, value) : value.clone();
        break;
      case ReduceOp::BAND:
        total = total.defined() ? total.bitwise_and(value) : value.clone();
        break;
      case ReduceOp::BOR:
        total = total.defined() ? total.bitwise_or(value) : value.clone();
        break;
      default:
        if (share.members % 2) total = total.defined() ? total.bitwise_xor(value) : value.clone();
        if (!total.defined()) total = at::zeros_like(value);
    }
  }
  if (static_cast<ReduceOp::RedOpType>(op) == ReduceOp::AVG) total = (total / size).to(type);
  if (static_cast<ReduceOp::RedOpType>(op) == ReduceOp::PREMUL_SUM) {
    auto factor = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    if (factor) total = (total * (factor->tensor_factor.defined() ? 1.0 : factor->double_factor)).to(type);
  }
  return total.to(type);
}

// Contents of each output, given the members' contributions.
using Outcome = std::function<Tensors(const Shares&)>;

// A tensor without its storage's life: outputs wait for values that would otherwise keep them alive in a circle.
struct Target {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::DimVector sizes, strides;
  std::int64_t offset;
  caffe2::TypeMeta type;

  explicit Target(const Tensor& tensor)
      : storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl())),
        sizes(tensor.sizes()),
        strides(tensor.strides()),
        offset(tensor.storage_offset()),
        type(tensor.dtype()) {}

  Tensor tensor() const {
    auto held = storage.lock();
    if (!held) return {};
    auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(held)),
                                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
    result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return result;
  }
};

class Arrival final : public Delivery {
 public:
  Arrival(EndPtr end, const Tensors& outputs, Outcome outcome) : end_(std::move(end)), outcome_(std::move(outcome)) {
    for (const auto& output : outputs) targets_.emplace_back(output);
  }

  void deliver() override {
    if (delivered_) return;
    delivered_ = true;
    auto shares = contributions_to(end_->id);
    at::AutoDispatchBelowADInplaceOrView below;
    auto values = shares.all.empty() ? Tensors(targets_.size()) : outcome_(shares);
    for (std::size_t k = 0; k < targets_.size(); ++k) {
      auto target = targets_[k].tensor();
      if (target.defined()) write(target, values[k], shares.real);
    }
  }

 private:
  static void write(const Tensor& target, const Tensor& value, bool real) {
    if (auto block = block_of(target)) block->pending = nullptr;  // this one
    if (!value.defined() || value.numel() != target.numel()) return lose(target);
    hold(target);
    on_cpu(target).copy_(value.view(target.sizes()));
    set_real(target, real);
  }

  EndPtr end_;
  std::vector<Target> targets_;
  Outcome outcome_;
  bool delivered_ = false;
};

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, EndPtr end, int device, c10::StreamId stream, Tensors outputs)
      : c10d::Work(rank, type),
        end_(std::move(end)),
        device_(device),
        stream_(stream),
        outputs_(std::move(outputs)) {}

  // For CPU tensors, whose values must be there when the script goes on.
  void block_host(std::shared_ptr<Delivery> delivery) {
    blocks_ = true;
    delivery_ = std::move(delivery);
  }

  bool wait(std::chrono::milliseconds) override {
    if (blocks_) {
      log().ask(wire::EVENT, 0, end_->id);
      if (auto delivery = std::exchange(delivery_, nullptr)) delivery->deliver();
    } else {
      log().wait(current_key(device_), end_->id);
    }
    return true;
  }
  void synchronize() override { wait(c10d::kUnsetTimeout); }
  void blockCurrentStream() override { log().wait(current_key(device_), end_->id); }
  bool isCompleted() override { return log().ask(wire::QUERY_EVENT, 0, end_->id).value; }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_) return future_;
    std::vector<c10::Device> devices;
    bool cuda = outputs_.empty() || outputs_[0].is_cuda();
    if (cuda) devices.emplace_back(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device_));
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    if (blocks_) wait(c10d::kUnsetTimeout);
    auto before = current_stream(device_);
    set_current_stream(device_, stream_);
    future_->markCompleted(c10::IValue(outputs_));
    set_current_stream(device_, before);
    return future_;
  }
  float getDuration() const override { return 0; }

 private:
  EndPtr end_;
  int device_;
  c10::StreamId stream_;
  Tensors outputs_;
  bool blocks_ = false;
  std::shared_ptr<Delivery> delivery_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::int64_t bytes_of(const Tensors& tensors) {
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

// Undefined tensors where they do not fit, which only those of a rank that another stands for do not.
Tensors slices(const Tensor& values, const Tensors& like) {
  Tensors parts;
  std::int64_t all = 0;
  for (const auto& tensor : like) all += tensor.numel();
  if (all != values.numel()) return Tensors(like.size());
  std::int64_t at = 0;
  for (const auto& tensor : like) {
    parts.push_back(values.narrow(0, at, tensor.numel()));
    at += tensor.numel();
  }
  return parts;
}

// Whether others are told its values. Made-up ones matter where they are counts, of what is sent to whom.
bool tells(const Tensor& tensor) {
  if (is_real(tensor)) return true;
  return at::isIntegralType(tensor.scalar_type(), false) && has_values(tensor);
}

// The values of all `tensors`, if all are known and few, or bytes, or on the CPU; and in a last byte, whether all are
// real.
std::optional<std::string> contribution(const Tensors& tensors) {
  std::string bytes;
  bool real = true;
  for (const auto& tensor : tensors) {
    if (tensor.is_cuda() && !tells(tensor)) return std::nullopt;
    if (tensor.is_cuda() && tensor.scalar_type() != at::kByte && bytes.size() + tensor.nbytes() > SMALL) return std::nullopt;
    real = real && (!tensor.is_cuda() || is_real(tensor));
    at::AutoDispatchBelowADInplaceOrView below;
    auto flat = (tensor.is_cuda() ? on_cpu(tensor) : tensor).contiguous();
    bytes.append(static_cast<const char*>(flat.data_ptr()), flat.nbytes());
  }
  bytes.push_back(static_cast<char>(real));
  return bytes;
}

// The same of a rank that may stand for the root: what the tensors hold before they are written. Values that are still on
// their way are not waited for, and large ones, pickled objects aside, are not worth sending from everywhere.
std::optional<std::string> deputised(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.scalar_type() != at::kByte && tensor.nbytes() > SMALL) return std::nullopt;
    if (auto block = block_of(tensor); block && block->pending) return std::nullopt;
  }
  return contribution(tensors);
}

// Numbers of elements, one for each member. In front of what is contributed to an all-to-all: how many go to each.
using Splits = std::vector<std::int64_t>;

Splits counts_of(const Tensors& tensors) {
  Splits counts;
  for (const auto& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

std::string with_counts(const Splits& counts, const std::string& bytes) {
  return std::string(reinterpret_cast<const char*>(counts.data()), counts.size() * sizeof(std::int64_t)) + bytes;
}

// The part of `share` for the member `rank` of so many.
std::string_view sent_to(int rank, int size, std::string_view share, at::ScalarType type) {
  Splits counts(size);
  auto head = counts.size() * sizeof(std::int64_t), each = c10::elementSize(type);
  std::memcpy(counts.data(), share.data(), head);
  std::size_t before = 0;
  for (int k = 0; k < rank; ++k) before += counts[k] * each;
  return share.substr(head + before, counts[rank] * each);
}

class Group final : public c10d::Backend {
 public:
  Group(std::string name, int rank, std::vector<std::int32_t> ranks, c10::intrusive_ptr<Options> options)
      : Backend(rank, static_cast<int>(ranks.size())),
        name_(std::move(name)),
        ranks_(std::move(ranks)),
        number_(announce_group(ranks_, -1)),
        options_(std::move(options)) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return as_nccl(); }
  bool supportsSplitting() const override { return as_nccl(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void eagerConnectSingleDevice(at::Device) override {}
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override {}
  void shutdown() override {}

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    int mine = -1;
    std::vector<std::int32_t> world;
    for (int rank : ranks) {
      if (rank == rank_) mine = static_cast<int>(world.size());
      world.push_back(ranks_.at(rank));
    }
    if (mine < 0) return nullptr;
    return c10::make_intrusive<Group>(name_, mine, std::move(world), options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    int root = static_cast<int>(options.rootRank);
    auto type = tensors[0].scalar_type();
    Outcome outcome = [root, type, like = shapes(tensors)](const auto& shares) {
      return slices(as_tensor(shares.of(root).bytes, type), like);
    };
    bool sends = root == rank_;
    return post(OpType::BROADCAST, wire::BROADCAST, bytes_of(tensors), sends ? tensors : Tensors{}, tensors,
                sends ? Outcome{} : outcome, options.asyncOp, root, sends ? std::nullopt : deputised(tensors));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return post(OpType::ALLREDUCE, wire::ALL_REDUCE, bytes_of(tensors), tensors, tensors,
                reduction(tensors, options.reduceOp), options.asyncOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    int root = static_cast<int>(options.rootRank);
    bool receives = root == rank_;
    return post(OpType::REDUCE, wire::REDUCE, bytes_of(tensors), tensors, receives ? tensors : Tensors{},
                reduction(tensors, options.reduceOp), options.asyncOp, root);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gather_all(OpType::ALLGATHER, outputs[0], inputs, options.asyncOp);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors whole{output};
    return gather_all(OpType::_ALLGATHER_BASE, whole, {input}, options.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return each(outputs.size(), [&](std::size_t k) {
      Tensors whole{outputs[k]};
      return gather_all(OpType::COALESCED, whole, {inputs[k]}, options.asyncOp);
    });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return each(inputs.size(), [&](std::size_t k) {
      Tensors parts;
      for (auto& output : outputs) parts.push_back(output[k]);
      return gather_all(OpType::COALESCED, parts, {inputs[k]}, options.asyncOp);
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return scatter_sums(OpType::REDUCE_SCATTER, outputs[0], inputs[0], options);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return scatter_sums(OpType::_REDUCE_SCATTER_BASE, output, {input}, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return each(outputs.size(),
                [&](std::size_t k) { return scatter_sums(OpType::COALESCED, outputs[k], {inputs[k]}, options); });
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    auto sent = shared_out(input, input_splits), received = shared_out(output, output_splits);
    if (!input_splits.empty()) announce_splits(sent, input.element_size());
    Outcome outcome = [this, received, type = output.scalar_type()](const Shares& shares) {
      auto parts = exchanged(shares, received, type);
      for (const auto& part : parts)
        if (!part.defined()) return Tensors(1);
      return Tensors{at::cat(parts)};
    };
    return post(OpType::ALLTOALL_BASE, wire::ALL_TO_ALL, static_cast<std::int64_t>(input.nbytes()), {input}, {output}, outcome,
                options.asyncOp, 0, std::nullopt, sent);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto sent = counts_of(inputs), received = counts_of(outputs);
    auto as_first = [&](std::int64_t count) { return count == sent[0]; };
    bool even = std::all_of(sent.begin(), sent.end(), as_first) && std::all_of(received.begin(), received.end(), as_first);
    if (!even) announce_splits(sent, inputs[0].element_size());
    Outcome outcome = [this, received, type = outputs[0].scalar_type()](const Shares& shares) {
      return exchanged(shares, received, type);
    };
    return post(OpType::ALLTOALL, wire::ALL_TO_ALL, bytes_of(inputs), inputs, outputs, outcome, options.asyncOp, 0,
                std::nullopt, sent);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    int root = static_cast<int>(options.rootRank);
    bool receives = root == rank_;
    Tensors none;
    return post(OpType::GATHER, wire::GATHER, bytes_of(inputs) * size_, inputs, receives ? outputs[0] : none,
                concatenation(receives ? outputs[0] : none, inputs), options.asyncOp, root);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    int root = static_cast<int>(options.rootRank);
    auto type = outputs[0].scalar_type();
    Outcome outcome = [this, root, type](const Shares& shares) {
      return Tensors{as_tensor(shares.of(root).bytes, type).chunk(size_)[rank_]};
    };
    return post(OpType::SCATTER, wire::SCATTER, bytes_of(outputs) * size_, root == rank_ ? inputs[0] : Tensors{}, outputs,
                outcome, options.asyncOp, root);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = post(OpType::BARRIER, wire::BARRIER, 4, {}, {}, {}, true);
    static_cast<Work&>(*work).block_host(nullptr);
    return work;
  }

  void monitoredBarrier(const c10d::BarrierOptions& options, bool) override { barrier(options)->wait(); }

  WorkPtr send(Tensors& tensors, int peer, int) override { return exchange(tensors[0], peer, false); }
  WorkPtr recv(Tensors& tensors, int peer, int) override { return exchange(tensors[0], peer, true); }

  void startCoalescing() override {
    coalescing_ = true;
    used_.reset();
  }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    Tensors outputs;
    int device = current_device();
    c10::StreamId stream = used_ ? *used_ : stream_of(device);
    if (as_nccl()) log().wait_for_room(stream_key(device, stream));  // all of it is one launch
    if (!messages_.empty()) {
      stream = stream_of(device);
      follow(device, stream, messages_[0].tensor.is_cuda());
      auto messages = std::exchange(messages_, {});
      for (std::size_t k = 0; k < messages.size(); ++k) {
        auto& message = messages[k];
        emit(message, device, stream, k + 1 < messages.size());
        if (message.receive) outputs.push_back(message.tensor);
      }
    }
    auto end = std::make_shared<End>(log().record(stream_key(device, stream)));
    last_ = end;
    return c10::make_intrusive<Work>(rank_, OpType::COALESCED, end, device, stream, outputs);
  }

 private:
  struct Message {
    Tensor tensor;
    int peer;
    bool receive;
  };

  static Tensors shapes(const Tensors& tensors) {
    Tensors like;
    for (const auto& tensor : tensors) like.push_back(at::empty({tensor.numel()}, at::TensorOptions().device(at::kMeta)));
    return like;
  }

  Outcome reduction(const Tensors& tensors, const ReduceOp& op) {
    return [this, op, type = tensors[0].scalar_type(), like = shapes(tensors)](const Shares& shares) {
      return slices(reduced(shares.all, op, size_, type), like);
    };
  }

  // Elements that go to each member, or come from it: `rows` of the first dimension, or as many of all.
  Splits shared_out(const Tensor& tensor, const std::vector<std::int64_t>& rows) const {
    if (rows.empty()) return Splits(size_, tensor.numel() / size_);
    auto row = tensor.dim() && tensor.size(0) ? tensor.numel() / tensor.size(0) : 0;
    Splits counts;
    for (auto count : rows) counts.push_back(count * row);
    return counts;
  }

  static void announce_splits(Splits counts, std::int64_t each) {
    for (auto& count : counts) count *= each;
    log().splits(counts);
  }

  // Parts that each member sends here. Undefined where the size is not `expected`: another represents that member.
  Tensors exchanged(const Shares& shares, const Splits& expected, at::ScalarType type) const {
    Tensors parts;
    for (int rank = 0; rank < size_; ++rank) {
      auto part = as_tensor(sent_to(rank_, size_, shares.of(rank).bytes, type), type);
      parts.push_back(part.numel() == expected[rank] ? part : Tensor());
    }
    return parts;
  }

  // Parts of each member: one output for each, or one for all.
  Outcome concatenation(const Tensors& outputs, const Tensors& inputs) {
    auto given = counts_of(outputs);
    bool apart = static_cast<int>(outputs.size()) == size_;
    if (!apart && !outputs.empty()) given = shared_out(outputs[0], {});
    return [this, given, apart, type = inputs[0].scalar_type()](const Shares& shares) {
      if (given.empty()) return Tensors();
      Tensors parts;
      bool all = true;
      for (int rank = 0; rank < size_; ++rank) {
        auto part = as_tensor(shares.of(rank).bytes, type);
        bool fits = part.numel() == given[rank];
        all = all && fits;
        parts.push_back(fits ? part : Tensor());
      }
      if (apart) return parts;
      return all ? Tensors{at::cat(parts)} : Tensors(1);
    };
  }

  // Members may give tensors of different sizes, which NCCL then broadcasts one by one: all have room for all.
  WorkPtr gather_all(OpType type, const Tensors& outputs, const Tensors& inputs, bool async) {
    auto work = post(type, wire::ALL_GATHER, bytes_of(outputs), inputs, outputs, concatenation(outputs, inputs), async);
    for (const auto& output : outputs) keep_choices(output, inputs[0]);
    return work;
  }

  // `inputs` are one for each member, of whatever sizes, or one for all.
  WorkPtr scatter_sums(OpType type, const Tensor& output, const Tensors& inputs,
                       const c10d::ReduceScatterOptions& options) {
    auto counts = static_cast<int>(inputs.size()) == size_ ? counts_of(inputs) : shared_out(inputs[0], {});
    Outcome outcome = [this, counts, op = options.reduceOp, dtype = output.scalar_type()](const Shares& shares) {
      auto sums = reduced(shares.all, op, size_, dtype);
      auto first = std::accumulate(counts.begin(), counts.begin() + rank_, std::int64_t{0});
      if (first + counts[rank_] > sums.numel()) return Tensors(1);
      return Tensors{sums.narrow(0, first, counts[rank_])};
    };
    return post(type, wire::REDUCE_SCATTER, bytes_of(inputs), inputs, {output}, outcome, options.asyncOp);
  }

  template <typename F>
  WorkPtr each(std::size_t count, F&& call) {
    WorkPtr last;
    for (std::size_t k = 0; k < count; ++k) last = call(k);
    return last;
  }

  // The stream of this group's collectives on `device`.
  c10::StreamId stream_of(int device) {
    auto [found, made] = streams_.emplace(device, 0);
    if (made) found->second = new_stream(device);
    return found->second;
  }

  // `stream` goes on behind this group's last operation: one communicator does one thing at a time, on whatever streams.
  // And with tensors on the GPU behind what is on the current one; those on the host are there already.
  void follow(int device, c10::StreamId stream, bool cuda) {
    if (cuda && stream != current_stream(device)) {
      EventId here = log().record(current_key(device));
      log().wait(stream_key(device, stream), here);
      log().forget(here);
    }
    if (last_) log().wait(stream_key(device, stream), last_->id);
  }

  // NCCL wants a GPU for each rank. A member that is on the first GPU of its server, though not the first rank there, is
  // taken to share it with that one, unless each sees a GPU of its own.
  void refuse_shared_gpu(int device) const {
    if (name_ != "nccl" || device != 0) return;
    int world = ranks_[rank_], first = world - world % device_count();
    if (world == first || std::find(ranks_.begin(), ranks_.end(), first) == ranks_.end()) return;
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    TORCH_CHECK(visible && *visible, "NCCL error: invalid usage, ncclInvalidUsage: This usually reflects invalid usage of NCCL "
                "library. Last error: Duplicate GPU detected : rank ", world, " and rank ", first, " both on CUDA device ",
                device, "; call torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"])) before the first collective");
  }

  WorkPtr post(OpType type, wire::Operation operation, std::int64_t bytes, const Tensors& inputs, const Tensors& outputs,
               Outcome outcome, bool async, int root = 0, std::optional<std::string> deputy = std::nullopt,
               const Splits& counts = {}) {
    const Tensors& any = inputs.empty() ? outputs : inputs;
    bool cuda = any.empty() ? as_nccl() : any[0].is_cuda();
    int device = cuda && !any.empty() ? any[0].device().index() : current_device();
    if (cuda && !any.empty()) refuse_shared_gpu(device);
    auto given = inputs.empty() ? std::optional<std::string>("") : contribution(inputs);
    if (given && !counts.empty()) given = with_counts(counts, *given);
    bool known = given && outcome && !log().capturing();
    // As NCCL since PyTorch 2.7: synchronous operations run on the caller's stream.
    c10::StreamId stream = async || coalescing_ || !cuda ? stream_of(device) : current_stream(device);
    if (cuda && !coalescing_) log().wait_for_room(stream_key(device, stream));
    log().spend(LAUNCHES * log().launch());
    follow(device, stream, cuda);
    EventId id = log().collective(stream_key(device, stream), operation, number_, bytes, root,
                                  given && !inputs.empty() ? *given : deputy ? *deputy : std::string_view{});
    auto end = std::make_shared<End>(id);
    last_ = end;
    used_ = stream;
    ++sequence_;
    auto work = c10::make_intrusive<Work>(rank_, type, end, device, stream, outputs);
    std::shared_ptr<Delivery> delivery;
    if (cuda) {
      deliver_later(outputs, known ? end : nullptr, outcome);
    } else {
      work->block_host(outcome ? std::make_shared<HostArrival>(end, outputs, outcome) : nullptr);
    }
    return work;
  }

  // CPU tensors get their values when the script waits for them.
  class HostArrival final : public Delivery {
   public:
    HostArrival(EndPtr end, Tensors outputs, Outcome outcome)
        : end_(std::move(end)), outputs_(std::move(outputs)), outcome_(std::move(outcome)) {}
    void deliver() override {
      auto shares = contributions_to(end_->id);
      if (shares.all.empty()) return;
      at::AutoDispatchBelowADInplaceOrView below;
      auto values = outcome_(shares);
      for (std::size_t k = 0; k < outputs_.size(); ++k) {
        TORCH_CHECK(values[k].defined(), "a collective of CPU tensors whose sizes differ from rank to rank needs the values "
                    "of a rank that another stands for; simulate with --live all");
        outputs_[k].copy_(values[k].view(outputs_[k].sizes()));
      }
    }

   private:
    EndPtr end_;
    Tensors outputs_;
    Outcome outcome_;
  };

  static void deliver_later(const Tensors& outputs, EndPtr end, const Outcome& outcome) {
    if (outputs.empty()) return;
    bool wanted = end != nullptr;
    for (const auto& output : outputs)
      wanted = wanted && (can_hold(output) || output.scalar_type() == at::kByte);
    if (!wanted) {
      if (end || outcome)
        for (const auto& output : outputs) lose(output);
      return;
    }
    auto arrival = std::make_shared<Arrival>(std::move(end), outputs, outcome);
    for (const auto& output : outputs) expect(output, arrival);
  }

  WorkPtr exchange(const Tensor& tensor, int peer, bool receive) {
    Message message{tensor, peer, receive};
    int device = tensor.is_cuda() ? tensor.device().index() : current_device();
    if (coalescing_) {
      messages_.push_back(message);
      return c10::make_intrusive<Work>(rank_, receive ? OpType::RECV : OpType::SEND, std::make_shared<End>(0), device, 0,
                                       Tensors{});
    }
    // Each pair of ranks has a communicator of its own for messages outside of a group.
    auto [found, made] = pairs_.emplace(std::pair(device, peer), 0);
    if (made) found->second = new_stream(device);
    c10::StreamId stream = found->second;
    if (tensor.is_cuda()) {
      log().wait_for_room(stream_key(device, stream));
      EventId here = log().record(current_key(device));
      log().wait(stream_key(device, stream), here);
      log().forget(here);
    }
    return emit(message, device, stream, false);
  }

  WorkPtr emit(const Message& message, int device, c10::StreamId stream, bool more) {
    log().spend(LAUNCHES * log().launch());
    auto given = message.receive ? std::nullopt : contribution({message.tensor});
    EventId id = log().message(stream_key(device, stream), message.receive, number_, message.peer,
                               static_cast<std::int64_t>(message.tensor.nbytes()), more, given ? *given : std::string_view{});
    auto end = std::make_shared<End>(id);
    Tensors outputs = message.receive ? Tensors{message.tensor} : Tensors{};
    auto work = c10::make_intrusive<Work>(rank_, message.receive ? OpType::RECV : OpType::SEND, end, device, stream, outputs);
    Outcome outcome = [type = message.tensor.scalar_type()](const Shares& shares) {
      return Tensors{as_tensor(shares.all.front().bytes, type)};
    };
    if (message.tensor.is_cuda())
      deliver_later(outputs, log().capturing() ? nullptr : end, outcome);
    else
      work->block_host(message.receive ? std::make_shared<HostArrival>(end, outputs, outcome) : nullptr);
    return work;
  }

  // PyTorch's backend "fake" takes NCCL's time; but which GPU its one process uses does not matter.
  bool as_nccl() const { return name_ == "nccl" || name_ == "fake"; }

  std::string name_;
  std::vector<std::int32_t> ranks_;
  std::int64_t number_;
  c10::intrusive_ptr<Options> options_;
  std::map<int, c10::StreamId> streams_;
  std::map<std::pair<int, int>, c10::StreamId> pairs_;
  std::vector<Message> messages_;
  std::optional<c10::StreamId> used_;
  EndPtr last_;
  bool coalescing_ = false;
  std::uint64_t sequence_ = 0;
};

}  // namespace

Backend make_group(const std::string& name, int rank, std::vector<std::int32_t> ranks,
                   c10::intrusive_ptr<c10d::Backend::Options> options) {
  return c10::make_intrusive<Group>(name, rank, std::move(ranks), std::move(options));
}

// Groups are made by all of their members in the same order, so counting those of the same ranks gives all the same
// number. The n-th that is made is the n-th that was told of. A group of several backends is told of once: those behind
// the first are of its family.
std::int64_t announce_group(const std::vector<std::int32_t>& ranks, std::int64_t family) {
  struct Counted {
    int told = 0, made = 0;
    std::int64_t family = -1;
  };
  static auto* groups = new std::map<std::vector<std::int32_t>, Counted>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto& counted = (*groups)[ranks];
  bool telling = family >= 0;
  if (telling) counted.family = family;
  int occurrence = telling ? counted.told++ : counted.made++;
  auto number = number_of_group(ranks, occurrence);
  if (telling || occurrence >= counted.told) log().group(number, counted.family, ranks);
  return number;
}

}  // namespace foretrain
