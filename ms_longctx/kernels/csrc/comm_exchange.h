// SPDX-License-Identifier: Apache-2.0
// One collective as a set of steps that advance side by side, piece by piece, until all are done.
#pragma once

#include <memory>
#include <vector>

#include "comm_message.h"
#include "comm_segment.h"

namespace comm {

// This process in its job.
struct Transport {
  Transport(const std::string& name, int rank, int size, double join_timeout, double timeout);

  Segment segment;
  double timeout;  // seconds without any movement, while all others live, after which a wait is given up
  int spins;       // looks before it sleeps
  uint64_t sent[kMaxRanks] = {}, received[kMaxRanks] = {};  // messages
  uint64_t sent_bytes = 0;                                  // of tensors
};

class Step {
 public:
  virtual ~Step() = default;
  virtual bool advance() = 0;  // moves one piece; false: nothing can be moved now
  virtual bool finished() const = 0;
  virtual uint64_t waits_for() const { return 0; }  // bit mask of the ranks without which it cannot advance
};

class Exchange {
 public:
  Exchange(Transport& transport, const Label& label) : transport_(transport), label_(label) {}

  // Messages to (from) one rank go in the order of these calls. `ready`, if given, grows to view.bytes() meanwhile.
  void send(int to, View view, const size_t* ready = nullptr);
  void receive(int from, View view);
  void copy(View from, View to);
  // Adds what the other ranks send to `own`, in the order of `ranks`; the result tells how many bytes of `out` stand.
  const size_t* sum(const std::vector<int>& ranks, View own, char* out);

  // Throws Failure: a message of another collective, a rank that ended, ranks that wait for each other, the timeout.
  void run();

 private:
  bool advance_all(bool* all_finished);
  void wait(uint32_t heard, double idle);
  uint64_t waits_for() const;
  void check_deadlock(double idle);
  void check_alive(uint64_t ranks);

  Transport& transport_;
  Label label_;
  std::vector<std::unique_ptr<Step>> steps_;
  Step* last_send_[kMaxRanks] = {};
  Step* last_receive_[kMaxRanks] = {};
  uint64_t still_ = 0;      // fingerprint of the ranks that wait for each other
  double still_since_ = 0;  // 0: there are none
  bool ended_ = false;      // a rank was found dead: one more look at what it had sent
};

}  // namespace comm
