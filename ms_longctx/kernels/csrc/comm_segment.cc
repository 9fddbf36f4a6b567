// SPDX-License-Identifier: Apache-2.0
#ifdef MLK_IS_BASELINE  // moves bytes: one variant serves every CPU

#include "comm_segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <vector>

namespace comm {
namespace {

constexpr uint64_t kLayout = 0x6d6c63636f6d6d01;  // changes with the structures of the header
const std::string kFolder = "/dev/shm/";
const std::string kPrefix = "ms_longctx.";
// Channels of a few hundred KB stay in the cache. Together they fit into the 64 MB that containers get by default.
constexpr size_t kMostCapacity = 512 << 10, kLeastCapacity = 32 << 10, kBudget = 32 << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

size_t capacity_for(int size) {
  const size_t share = kBudget / std::max(1, size * (size - 1));
  return std::min(kMostCapacity, std::max(kLeastCapacity, share)) / kAlign * kAlign;
}

struct flock byte_lock(int64_t first, int64_t length) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = first;
  lock.l_len = length;  // 0: to the end
  return lock;
}

// Process that holds a lock on these bytes, 0 if none does. A process does not see its own.
int holder(int file, int64_t first, int64_t length) {
  struct flock lock = byte_lock(first, length);
  if (fcntl(file, F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK) return 0;
  return std::max<int>(1, lock.l_pid);  // 0: a process that this container cannot see
}

// Removes what a job left that was killed before all its ranks had come.
bool remove_if_stale(const std::string& path) {
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return false;
  const bool stale = holder(file, 0, 0) == 0;
  if (stale) unlink(path.c_str());
  close(file);
  return stale;
}

void remove_stale_segments() {
  DIR* folder = opendir(kFolder.c_str());
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    if (std::strncmp(entry->d_name, kPrefix.c_str(), kPrefix.size()) == 0) remove_if_stale(kFolder + entry->d_name);
  }
  closedir(folder);
}

std::string system_error() { return std::strerror(errno); }

}  // namespace

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

Segment::Segment(const std::string& name, int rank, int size, double timeout)
    : rank_(rank), size_(size), capacity_(capacity_for(size)) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw Failure("rank " + std::to_string(rank) + " of " + std::to_string(size) + ": expected 0 <= rank < size <= " +
                  std::to_string(kMaxRanks));
  }
  total_ = round_up(sizeof(Board), 4096) + static_cast<size_t>(size) * size * (sizeof(Channel) + capacity_);
  const std::string path = kFolder + kPrefix + name;
  const double deadline = now() + timeout;
  try {
    if (rank == 0) {
      create(path);
    } else {
      while (!attach(path)) {
        if (now() > deadline) {
          throw Failure("rank 0 did not come within " + std::to_string(static_cast<int>(timeout)) +
                        " seconds: did it fail to start?");
        }
        usleep(2000);
      }
    }
    wait_for_all(deadline);
  } catch (...) {
    if (rank == 0 && board_ != nullptr) unlink(path.c_str());
    if (board_ != nullptr) munmap(board_, total_);
    if (file_ >= 0) close(file_);
    if (rank != 0) remove_if_stale(path);
    throw;
  }
  if (rank == 0) unlink(path.c_str());
}

void Segment::create(const std::string& path) {
  remove_stale_segments();
  file_ = open(kFolder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0) throw Failure("no file can be made in " + kFolder + ": " + system_error());
  if (const int error = posix_fallocate(file_, 0, static_cast<off_t>(total_))) {
    throw Failure(std::to_string(size_) + " ranks need " + std::to_string((total_ >> 20) + 1) + " MB in " + kFolder +
                  ": " + std::strerror(error) + "; give it more memory (docker: --shm-size)");
  }
  map(total_);
  board_->layout = kLayout;
  board_->size = size_;
  take_seat();
  const std::string anonymous = "/proc/self/fd/" + std::to_string(file_);
  while (linkat(AT_FDCWD, anonymous.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    const bool taken = errno == EEXIST;
    if (taken && remove_if_stale(path)) continue;
    const std::string why = taken ? "another job is starting under this name; give one of them another port" : system_error();
    munmap(board_, total_);
    board_ = nullptr;  // the name is not ours to remove
    throw Failure(path + ": " + why);
  }
}

// False: rank 0 is not there yet.
bool Segment::attach(const std::string& path) {
  file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0) return false;
  if (holder(file_, 0, 1) == 0) {  // of a job that was killed; rank 0 of this one will remove it
    close(file_);
    file_ = -1;
    return false;
  }
  map(sizeof(Board));
  const bool fits = board_->layout == kLayout && board_->size == size_;
  munmap(board_, sizeof(Board));
  board_ = nullptr;
  if (!fits) throw Failure(path + " belongs to a job of another size or version; do two jobs use one port?");
  map(total_);
  take_seat();
  return true;
}

void Segment::map(size_t total) {
  void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) throw Failure("shared memory cannot be mapped: " + system_error());
  board_ = static_cast<Board*>(memory);
}

void Segment::take_seat() {
  struct flock lock = byte_lock(rank_, 1);
  if (fcntl(file_, F_SETLK, &lock) != 0) {
    throw Failure("rank " + std::to_string(rank_) + " is taken by process " + std::to_string(holder(file_, rank_, 1)) +
                  "; do two jobs use one port?");
  }
  own_seat().pid.store(getpid());
  board_->present.fetch_add(1);
}

void Segment::wait_for_all(double deadline) {
  while (board_->present.load() < size_) {
    std::string missing;
    for (int other = 0; other < size_; other++) {
      if (seat(other).pid.load() == 0) {
        missing += (missing.empty() ? "" : ", ") + std::to_string(other);
      } else if (other != rank_ && !alive(other)) {
        throw Failure(who(other) + " ended before all ranks had started");
      }
    }
    if (now() > deadline) throw Failure("these ranks did not come in time: " + missing + "; do all run on this host?");
    usleep(1000);
  }
}

Channel& Segment::channel(int from, int to) const {
  char* first = reinterpret_cast<char*>(board_) + round_up(sizeof(Board), 4096);
  const size_t index = static_cast<size_t>(from) * size_ + to;
  return *reinterpret_cast<Channel*>(first + index * (sizeof(Channel) + capacity_));
}

bool Segment::alive(int rank) const { return holder(file_, rank, 1) != 0; }

std::string Segment::who(int rank) const {
  return "rank " + std::to_string(rank) + " (process " + std::to_string(seat(rank).pid.load()) + ")";
}

void Segment::ring(int rank) const {
  Seat& other = seat(rank);
  other.bell.fetch_add(1);
  if (other.asleep.load()) syscall(SYS_futex, &other.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::sleep(uint32_t heard, double seconds) const {
  Seat& own = own_seat();
  own.asleep.store(1);
  const timespec most{0, static_cast<long>(1e9 * seconds)};
  syscall(SYS_futex, &own.bell, FUTEX_WAIT, heard, &most, nullptr, 0);  // returns at once if the bell has rung since
  own.asleep.store(0);
}

void Segment::stop(const std::string& reason) const {
  uint32_t expected = 0;
  if (board_->stopped.compare_exchange_strong(expected, 1)) {
    std::snprintf(board_->reason, sizeof board_->reason, "%s", reason.c_str());
    board_->stopped.store(2);
  }
  for (int other = 0; other < size_; other++) ring(other);
}

void Segment::check() const {
  if (board_->stopped.load() == 2) throw Failure(board_->reason);
}

// The lock and the memory stay until the process ends: other threads may still be in a collective.
void Segment::leave() const {
  if (own_seat().pid.load() == getpid()) own_seat().left.store(1);  // not for a forked child
}

}  // namespace comm

#endif
