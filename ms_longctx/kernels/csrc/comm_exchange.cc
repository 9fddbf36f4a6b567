// SPDX-License-Identifier: Apache-2.0
#ifdef MLK_IS_BASELINE  // waiting: one variant serves every CPU

#include "comm_exchange.h"

#include <thread>

#include "comm_steps.h"

namespace comm {
namespace {

constexpr double kNap = 0.1;          // seconds between looks at whether the others still live
constexpr double kDeadlockTime = 1.0; // seconds for which nothing may move before ranks count as waiting for each other
constexpr int kSpins = 500;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Body>
void for_ranks(uint64_t ranks, Body body) {
  for (int rank = 0; ranks != 0; rank++, ranks >>= 1) {
    if (ranks & 1) body(rank);
  }
}

}  // namespace

Transport::Transport(const std::string& name, int rank, int size, double join_timeout, double timeout)
    : segment(name, rank, size, join_timeout), timeout(timeout),
      spins(size <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpins : 1) {}

void Exchange::send(int to, View view, const size_t* ready) {
  steps_.push_back(std::make_unique<Send>(transport_, to, label_, view, ready, last_send_[to]));
  last_send_[to] = steps_.back().get();
}

void Exchange::receive(int from, View view) {
  steps_.push_back(std::make_unique<Receive>(transport_, from, label_, view, last_receive_[from]));
  last_receive_[from] = steps_.back().get();
}

void Exchange::copy(View from, View to) {
  if (from.bytes() > 0) steps_.push_back(std::make_unique<Copy>(from, to));
}

const size_t* Exchange::sum(const std::vector<int>& ranks, View own, char* out) {
  auto step = std::make_unique<Sum>(transport_, ranks, label_, own, out);
  const size_t* done = step->done();
  for (int rank : ranks) last_receive_[rank] = step.get();
  steps_.push_back(std::move(step));
  return done;
}

void Exchange::run() {
  const Segment& segment = transport_.segment;
  segment.check();
  segment.own_seat().doing = label_;
  double idle_since = 0;
  for (int looks = 0;;) {
    const uint32_t heard = segment.own_seat().bell.load();
    bool all_finished = true;
    if (advance_all(&all_finished)) {
      looks = 0;
      idle_since = 0;
    }
    if (all_finished) return;
    if (looks++ < transport_.spins) {
      pause();
      continue;
    }
    if (idle_since == 0) idle_since = now();
    wait(heard, now() - idle_since);
  }
}

bool Exchange::advance_all(bool* all_finished) {
  bool moved = false;
  for (auto& step : steps_) {
    if (step->finished()) continue;
    moved |= step->advance();
    *all_finished &= step->finished();
  }
  return moved;
}

// Sleeps until a channel moves; looks after the others if that takes long.
void Exchange::wait(uint32_t heard, double idle) {
  const Segment& segment = transport_.segment;
  Seat& own = segment.own_seat();
  const uint64_t ranks = waits_for();
  own.heard.store(heard);
  own.waits_for.store(ranks);
  segment.sleep(heard, kNap);
  if (own.bell.load() == heard) {
    check_alive(ranks);
    check_deadlock(idle);
    if (idle > transport_.timeout) {
      std::string others;
      for_ranks(ranks, [&](int rank) { others += " " + segment.who(rank); });
      throw Failure(segment.who(segment.rank()) + " waited " + std::to_string(static_cast<int>(idle)) + " s for" +
                    others + " in " + describe(label_));
    }
  }
  segment.check();
  own.waits_for.store(0);
}

uint64_t Exchange::waits_for() const {
  uint64_t ranks = 0;
  for (auto& step : steps_) ranks |= step->waits_for();
  return ranks;
}

void Exchange::check_alive(uint64_t ranks) {
  const Segment& segment = transport_.segment;
  bool ended = false;
  for_ranks(ranks, [&](int rank) {
    if (segment.alive(rank)) return;
    ended = true;
    if (!ended_) return;  // what it had sent may have come since the last look
    throw Failure(segment.who(rank) + (segment.seat(rank).left.load() ? " has ended" : " was killed or crashed") + " while " +
                  segment.who(segment.rank()) + " waits for it in " + describe(label_));
  });
  ended_ = ended;
}

// Ranks wait for each other if none of those that this one waits for, directly or through others, can go on.
void Exchange::check_deadlock(double idle) {
  const Segment& segment = transport_.segment;
  uint64_t reached = uint64_t(1) << segment.rank(), looked = 0, fingerprint = 0;
  bool stuck = true;
  while (stuck && reached != looked) {
    const uint64_t fresh = reached & ~looked;
    looked = reached;
    for_ranks(fresh, [&](int rank) {
      const Seat& seat = segment.seat(rank);
      const uint64_t next = seat.waits_for.load();
      const uint32_t bell = seat.bell.load();
      stuck &= next != 0 && bell == seat.heard.load();
      fingerprint = fingerprint * 31 + bell;
      reached |= next;
    });
  }
  if (!stuck || still_since_ == 0 || fingerprint != still_) {
    still_ = fingerprint;
    still_since_ = stuck ? idle : 0;
    return;
  }
  if (idle - still_since_ < kDeadlockTime) return;
  std::string text;
  for_ranks(reached, [&](int rank) {
    text += (text.empty() ? "" : "; ") + segment.who(rank) + " is in " + describe(segment.seat(rank).doing);
  });
  throw Failure("ranks wait for each other: " + text);
}

}  // namespace comm

#endif
