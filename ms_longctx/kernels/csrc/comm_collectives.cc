// SPDX-License-Identifier: Apache-2.0
// What each collective sends, receives and adds. Inputs and outputs are row-major and do not overlap.
#ifdef MLK_IS_BASELINE  // the sums have their variants in comm_reduce.cc

#include "comm_collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace comm {
namespace {

constexpr size_t kSmall = 32 << 10;  // below, all ranks send all to all: one trip instead of two

int64_t product(const std::vector<int64_t>& dims, size_t from, size_t to) {
  return std::accumulate(dims.begin() + from, dims.begin() + to, int64_t(1), std::multiplies<int64_t>());
}

// Part `index` of `parts` along `axis` of a row-major tensor.
View slice(void* data, const std::vector<int64_t>& dims, int axis, int parts, int index, size_t item) {
  const size_t run = product(dims, axis, dims.size()) / parts * item;
  const size_t count = run == 0 ? 0 : product(dims, 0, axis);
  return {static_cast<char*>(data) + index * run, run, run * parts, count};
}

class Job {
 public:
  Job(Transport& transport, const Call& call, const Operand& operand)
      : call_(call), dims_(operand.dims), size_(static_cast<int>(call.ranks.size())),
        me_(static_cast<int>(std::find(call.ranks.begin(), call.ranks.end(), transport.segment.rank()) -
                             call.ranks.begin())),
        in_(const_cast<void*>(operand.in)), out_(operand.out), label_(make_label(operand)),
        exchange_(transport, label_) {
    if (me_ == size_) throw Failure(describe(label_) + " is called by rank " + std::to_string(transport.segment.rank()));
    for (int rank : call.ranks) {
      if (rank >= transport.segment.size()) {
        throw Failure(describe(label_) + ": the job has " + std::to_string(transport.segment.size()) + " ranks");
      }
    }
    bytes_ = product(dims_, 0, dims_.size()) * label_.item;
  }

  void run() {
    switch (call_.kind) {
      case kAllReduce: all_reduce(); break;
      case kAllGather: all_gather(axis(call_.first)); break;
      case kReduceScatter: reduce_scatter(axis(call_.first)); break;
      case kAllToAll: all_to_all(axis(call_.first), axis(call_.second)); break;
      case kRingShift: ring_shift(); break;
      case kBroadcast: broadcast(); break;
      case kReduce: reduce(); break;
    }
    exchange_.run();
  }

 private:
  Label make_label(const Operand& operand) const {
    Label label;
    std::memset(&label, 0, sizeof label);
    for (int rank : call_.ranks) label.members |= uint64_t(1) << rank;
    label.kind = call_.kind;
    label.number = call_.number;
    label.first = call_.first;
    label.second = call_.second;
    if (!parse_type(operand.type, &label.type, &label.item)) throw Failure(std::string("type ") + operand.type);
    const bool adds = label.kind == kAllReduce || label.kind == kReduceScatter || label.kind == kReduce;
    label.ndim = static_cast<uint16_t>(std::min<size_t>(dims_.size(), kLabelDims));
    for (size_t d = 0; d < dims_.size(); d++) {
      if (d < kLabelDims) {
        label.dims[d] = dims_[d];
      } else {
        label.dims[kLabelDims - 1] *= dims_[d];
      }
    }
    if (adds && label.type == kOtherType) throw Failure(describe(label) + ": this type cannot be added");
    return label;
  }

  int axis(int given) const {
    const int count = static_cast<int>(dims_.size()), index = given < 0 ? given + count : given;
    if (index < 0 || index >= count) throw Failure(describe(label_) + ": there is no such axis");
    return index;
  }

  void check_divides(int axis) const {
    if (dims_[axis] % size_ != 0) {
      throw Failure(describe(label_) + ": axis " + std::to_string(axis) + " cannot be split over " +
                    std::to_string(size_) + " ranks");
    }
  }

  // Calls body(index in the group) for the others, the next one first, so that not all send to the same rank.
  template <typename Body>
  void for_others(Body body) const {
    for (int step = 1; step < size_; step++) body((me_ + step) % size_);
  }

  int rank(int index) const { return call_.ranks[index]; }
  View in_part(int axis, int index) const { return slice(in_, dims_, axis, size_, index, label_.item); }

  void all_reduce() {
    const View whole = View::whole(in_, bytes_);
    if (bytes_ <= kSmall) {
      for_others([&](int i) { exchange_.send(rank(i), whole); });
      exchange_.sum(call_.ranks, whole, static_cast<char*>(out_));
      return;
    }
    // Each rank adds one part and gives the result to all; results travel while later elements are still added.
    const size_t part = (bytes_ / size_ + kAlign - 1) / kAlign * kAlign;
    const auto share = [&](void* data, int i) {
      const size_t begin = std::min(bytes_, part * i), end = i == size_ - 1 ? bytes_ : std::min(bytes_, part * (i + 1));
      return View::whole(static_cast<char*>(data) + begin, end - begin);
    };
    for_others([&](int i) { exchange_.send(rank(i), share(in_, i)); });
    const View mine = share(out_, me_);
    const size_t* done = exchange_.sum(call_.ranks, share(in_, me_), mine.base);
    for_others([&](int i) { exchange_.send(rank(i), mine, done); });
    for_others([&](int i) { exchange_.receive(rank(i), share(out_, i)); });
  }

  void all_gather(int axis) {
    std::vector<int64_t> joined = dims_;
    joined[axis] *= size_;
    const auto out_part = [&](int i) { return slice(out_, joined, axis, size_, i, label_.item); };
    for_others([&](int i) { exchange_.send(rank(i), View::whole(in_, bytes_)); });
    exchange_.copy(View::whole(in_, bytes_), out_part(me_));
    for_others([&](int i) { exchange_.receive(rank(i), out_part(i)); });
  }

  void reduce_scatter(int axis) {
    check_divides(axis);
    for_others([&](int i) { exchange_.send(rank(i), in_part(axis, i)); });
    exchange_.sum(call_.ranks, in_part(axis, me_), static_cast<char*>(out_));
  }

  void all_to_all(int split, int concat) {
    check_divides(split);
    std::vector<int64_t> result = dims_;
    result[split] /= size_;
    result[concat] *= size_;
    const auto out_part = [&](int i) { return slice(out_, result, concat, size_, i, label_.item); };
    for_others([&](int i) { exchange_.send(rank(i), in_part(split, i)); });
    exchange_.copy(in_part(split, me_), out_part(me_));
    for_others([&](int i) { exchange_.receive(rank(i), out_part(i)); });
  }

  void ring_shift() {
    const int offset = (call_.first % size_ + size_) % size_;
    if (offset == 0) return exchange_.copy(View::whole(in_, bytes_), View::whole(out_, bytes_));
    exchange_.send(rank((me_ + offset) % size_), View::whole(in_, bytes_));
    exchange_.receive(rank((me_ + size_ - offset) % size_), View::whole(out_, bytes_));
  }

  void broadcast() {
    if (me_ != call_.first) return exchange_.receive(rank(call_.first), View::whole(out_, bytes_));
    for_others([&](int i) { exchange_.send(rank(i), View::whole(in_, bytes_)); });
    exchange_.copy(View::whole(in_, bytes_), View::whole(out_, bytes_));
  }

  void reduce() {
    if (me_ == call_.first) {
      exchange_.sum(call_.ranks, View::whole(in_, bytes_), static_cast<char*>(out_));
    } else {
      exchange_.send(rank(call_.first), View::whole(in_, bytes_));
      std::memset(out_, 0, bytes_);
    }
  }

  const Call& call_;
  const std::vector<int64_t> dims_;
  const int size_, me_;
  void* const in_;
  void* const out_;
  const Label label_;
  Exchange exchange_;
  size_t bytes_;
};

}  // namespace

void collective(Transport& transport, const Call& call, const std::vector<Operand>& operands) {
  for (const Operand& operand : operands) Job(transport, call, operand).run();
}

}  // namespace comm

#endif
