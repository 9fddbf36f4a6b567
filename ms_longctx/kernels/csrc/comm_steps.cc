// SPDX-License-Identifier: Apache-2.0
#ifdef MLK_IS_BASELINE  // the sums have their variants in comm_reduce.cc

#include "comm_steps.h"

#include <algorithm>
#include <cstring>

#include "comm_reduce.h"

namespace comm {
namespace {

constexpr size_t kPiece = 128 << 10;  // bytes that move before the other side is told

uint64_t bit(int rank) { return uint64_t(1) << rank; }

// What n bytes take in a channel: positions stay multiples of kAlign, so only the last piece may be odd.
size_t padded(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

size_t piece(size_t possible, size_t left) {
  const size_t n = std::min({possible, left, kPiece});
  return n == left ? n : n / kAlign * kAlign;
}

std::string mismatch(const Segment& segment, int from, const Label& expected, const Label& got) {
  return segment.who(segment.rank()) + " is in " + describe(expected) + " but " + segment.who(from) + " sent " +
         describe(got) + (expected.sequence == got.sequence ? "" : " (and messages are missing)") +
         "; the ranks of a group must make and call its collectives in the same order, with the same shapes and types";
}

}  // namespace

Outgoing::Outgoing(Transport& transport, int to, const Label& label, size_t bytes)
    : bytes(bytes), to(to), transport_(transport), channel_(transport.segment.channel(transport.segment.rank(), to)),
      ring_(transport.segment.bytes(transport.segment.rank(), to)), label_(label) {}

size_t Outgoing::room(char** where) const {
  const size_t capacity = transport_.segment.capacity();
  const uint64_t written = channel_.written.load(std::memory_order_relaxed);
  const size_t free = capacity - (written - channel_.read.load(std::memory_order_acquire)), at = written % capacity;
  *where = ring_ + at;
  return std::min(free, capacity - at);
}

bool Outgoing::write_label() {
  char* where;
  if (room(&where) < kAlign) return false;
  label_.sequence = transport_.sent[to]++;
  std::memcpy(where, &label_, sizeof label_);
  labelled_ = true;
  channel_.written.fetch_add(kAlign, std::memory_order_release);
  transport_.segment.ring(to);
  return true;
}

void Outgoing::publish(size_t n) {
  done += n;
  transport_.sent_bytes += n;
  channel_.written.fetch_add(padded(n), std::memory_order_release);
  transport_.segment.ring(to);
}

Incoming::Incoming(Transport& transport, int from, const Label& label, size_t bytes)
    : bytes(bytes), from(from), transport_(transport),
      channel_(transport.segment.channel(from, transport.segment.rank())),
      ring_(transport.segment.bytes(from, transport.segment.rank())), label_(label) {}

size_t Incoming::available(const char** where) const {
  const size_t capacity = transport_.segment.capacity();
  const uint64_t read = channel_.read.load(std::memory_order_relaxed);
  const size_t full = channel_.written.load(std::memory_order_acquire) - read, at = read % capacity;
  *where = ring_ + at;
  return std::min(full, capacity - at);
}

bool Incoming::read_label() {
  const char* where;
  if (available(&where) < kAlign) return false;
  label_.sequence = transport_.received[from]++;
  Label got;
  std::memcpy(&got, where, sizeof got);
  if (std::memcmp(&got, &label_, sizeof got) != 0) throw Failure(mismatch(transport_.segment, from, label_, got));
  labelled_ = true;
  channel_.read.fetch_add(kAlign, std::memory_order_release);
  transport_.segment.ring(from);
  return true;
}

void Incoming::release(size_t n) {
  done += n;
  channel_.read.fetch_add(padded(n), std::memory_order_release);
  transport_.segment.ring(from);
}

bool Send::advance() {
  if (after_ != nullptr && !after_->finished()) return false;
  const bool labelled = out_.labelled();
  if (!labelled && !out_.write_label()) return false;
  char* where;
  const size_t n = piece(std::min(out_.room(&where), readable()), out_.bytes - out_.done);
  if (n == 0) return !labelled;
  copy_from(view_, out_.done, where, n);
  out_.publish(n);
  return true;
}

uint64_t Send::waits_for() const {
  if (finished() || (after_ != nullptr && !after_->finished())) return 0;
  return !out_.labelled() || readable() > 0 ? bit(out_.to) : 0;
}

bool Receive::advance() {
  if (after_ != nullptr && !after_->finished()) return false;
  const bool labelled = in_.labelled();
  if (!labelled && !in_.read_label()) return false;
  const char* where;
  const size_t n = piece(in_.available(&where), in_.bytes - in_.done);
  if (n == 0) return !labelled;
  copy_to(view_, in_.done, where, n);
  in_.release(n);
  return true;
}

uint64_t Receive::waits_for() const {
  return finished() || (after_ != nullptr && !after_->finished()) ? 0 : bit(in_.from);
}

bool Copy::advance() {
  const size_t n = std::min(kPiece, to_.bytes() - done_);
  copy_view(from_, to_, done_, n);
  done_ += n;
  return n > 0;
}

Sum::Sum(Transport& transport, const std::vector<int>& ranks, const Label& label, View own, char* out)
    : own_index_(static_cast<int>(std::find(ranks.begin(), ranks.end(), transport.segment.rank()) - ranks.begin())),
      type_(label.type), item_(label.item), own_(own), out_(out) {
  for (int rank : ranks) {
    const bool self = rank == transport.segment.rank();
    others_.push_back(self ? nullptr : std::make_unique<Incoming>(transport, rank, label, own.bytes()));
  }
  if (own.count > 1) packed_.resize(kPiece);
}

bool Sum::advance() {
  bool moved = false, labelled = true;
  for (auto& other : others_) {
    if (other == nullptr || other->labelled()) continue;
    other->read_label() ? moved = true : labelled = false;
  }
  if (!labelled || done_ == own_.bytes()) return moved;
  std::vector<const void*> sources(others_.size());
  size_t possible = kPiece;
  for (size_t i = 0; i < others_.size(); i++) {
    const char* where = nullptr;
    if (others_[i] != nullptr) possible = std::min(possible, others_[i]->available(&where));
    sources[i] = where;
  }
  const size_t n = piece(possible, own_.bytes() - done_);
  if (n == 0) return moved;
  if (own_.count > 1) copy_from(own_, done_, packed_.data(), n);
  sources[own_index_] = own_.count > 1 ? packed_.data() : own_.base + done_;
  add(type_, sources.data(), static_cast<int>(sources.size()), out_ + done_, n / item_);
  done_ += n;
  for (auto& other : others_) {
    if (other != nullptr) other->release(n);
  }
  return true;
}

bool Sum::finished() const {
  return std::all_of(others_.begin(), others_.end(), [](auto& other) { return other == nullptr || other->finished(); });
}

uint64_t Sum::waits_for() const {
  uint64_t ranks = 0;
  const char* where;
  for (auto& other : others_) {
    if (other != nullptr && !other->finished() && other->available(&where) == 0) ranks |= bit(other->from);
  }
  return ranks;
}

}  // namespace comm

#endif
