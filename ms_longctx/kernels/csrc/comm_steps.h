// SPDX-License-Identifier: Apache-2.0
// The steps of an exchange.
#pragma once

#include <vector>

#include "comm_exchange.h"

namespace comm {

// The writing end of a message: its label, then bytes.
class Outgoing {
 public:
  Outgoing(Transport& transport, int to, const Label& label, size_t bytes);
  size_t room(char** where) const;  // where and how many bytes may be written
  bool write_label();
  void publish(size_t n);  // n bytes stand at `where`
  bool labelled() const { return labelled_; }
  bool finished() const { return labelled_ && done == bytes; }

  size_t done = 0;
  const size_t bytes;
  const int to;

 private:
  Transport& transport_;
  Channel& channel_;
  char* ring_;
  Label label_;
  bool labelled_ = false;
};

// The reading end; the label must be the one that is expected.
class Incoming {
 public:
  Incoming(Transport& transport, int from, const Label& label, size_t bytes);
  size_t available(const char** where) const;
  bool read_label();  // throws Failure if it is another one
  void release(size_t n);
  bool labelled() const { return labelled_; }
  bool finished() const { return labelled_ && done == bytes; }

  size_t done = 0;
  const size_t bytes;
  const int from;

 private:
  Transport& transport_;
  Channel& channel_;
  const char* ring_;
  Label label_;
  bool labelled_ = false;
};

class Send : public Step {
 public:
  Send(Transport& transport, int to, const Label& label, View view, const size_t* ready, const Step* after)
      : out_(transport, to, label, view.bytes()), view_(view), ready_(ready), after_(after) {}
  bool advance() override;
  bool finished() const override { return out_.finished(); }
  uint64_t waits_for() const override;

 private:
  size_t readable() const { return (ready_ == nullptr ? out_.bytes : *ready_) - out_.done; }
  Outgoing out_;
  View view_;
  const size_t* ready_;
  const Step* after_;
};

class Receive : public Step {
 public:
  Receive(Transport& transport, int from, const Label& label, View view, const Step* after)
      : in_(transport, from, label, view.bytes()), view_(view), after_(after) {}
  bool advance() override;
  bool finished() const override { return in_.finished(); }
  uint64_t waits_for() const override;

 private:
  Incoming in_;
  View view_;
  const Step* after_;
};

class Copy : public Step {
 public:
  Copy(View from, View to) : from_(from), to_(to) {}
  bool advance() override;
  bool finished() const override { return done_ == to_.bytes(); }

 private:
  View from_, to_;
  size_t done_ = 0;
};

class Sum : public Step {
 public:
  Sum(Transport& transport, const std::vector<int>& ranks, const Label& label, View own, char* out);
  bool advance() override;
  bool finished() const override;
  uint64_t waits_for() const override;
  const size_t* done() const { return &done_; }

 private:
  const int own_index_;
  std::vector<std::unique_ptr<Incoming>> others_;  // null at the own index
  const Type type_;
  const size_t item_;
  View own_;
  char* out_;
  std::vector<char> packed_;  // a piece of `own_` where that is not contiguous
  size_t done_ = 0;
};

}  // namespace comm
