// SPDX-License-Identifier: Apache-2.0
// The shared memory of one job: a seat for each rank and a channel for each ordered pair of ranks.
//
// The segment is a file in /dev/shm. It gets its name when it is complete and loses it when every rank is in, so that
// nothing is left behind however the job ends. A rank is alive while it holds the lock on its byte of the file: the
// kernel drops the lock with the process, even with one that was killed and that nobody has waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "comm_message.h"

namespace comm {

constexpr int kMaxRanks = 64;  // members of a group are bits of a word

// What a caller is told; a Failure stops the whole job.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A ring of bytes with one writer and one reader. Positions only grow and are multiples of kAlign.
struct Channel {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
};

struct alignas(64) Seat {
  std::atomic<uint32_t> bell;       // grows whenever a channel of this rank moves; its futex
  std::atomic<uint32_t> asleep;     // 1: wake it
  std::atomic<uint32_t> heard;      // the bell at which it found nothing to do
  std::atomic<int32_t> pid;         // 0: not there yet
  std::atomic<uint64_t> waits_for;  // ranks without which it cannot go on; 0: it runs
  std::atomic<uint32_t> left;       // 1: it ended by itself
  Label doing;                      // its last collective
};

struct Board {
  uint64_t layout;
  int32_t size;
  std::atomic<int32_t> present;
  std::atomic<uint32_t> stopped;  // 0: no, 1: the reason is being written, 2: it stands
  char reason[1024];
  Seat seats[kMaxRanks];
};

class Segment {
 public:
  // Joins the job `name` (a file name) as one of `size` ranks; returns when all are there.
  // Throws Failure: the seat is taken, a rank died, not all came within `timeout` seconds, too little memory.
  Segment(const std::string& name, int rank, int size, double timeout);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t capacity() const { return capacity_; }  // bytes of a channel
  Channel& channel(int from, int to) const;
  char* bytes(int from, int to) const { return reinterpret_cast<char*>(&channel(from, to) + 1); }
  Seat& seat(int rank) const { return board_->seats[rank]; }
  Seat& own_seat() const { return seat(rank_); }

  bool alive(int rank) const;
  std::string who(int rank) const;  // "rank 2 (process 123)"
  void ring(int rank) const;        // a channel of that rank has moved
  void sleep(uint32_t heard, double seconds) const;

  void stop(const std::string& reason) const;  // the first reason stands
  void check() const;                          // throws Failure once the job is stopped
  void leave() const;                          // this process is about to end in good order

 private:
  void create(const std::string& path);
  bool attach(const std::string& path);
  void take_seat();
  void wait_for_all(double deadline);
  void map(size_t total);

  int rank_, size_, file_ = -1;
  size_t capacity_, total_;
  Board* board_ = nullptr;
};

double now();  // seconds of a clock that never goes back

}  // namespace comm
