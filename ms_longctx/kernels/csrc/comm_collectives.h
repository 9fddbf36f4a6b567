// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "comm_exchange.h"

namespace comm {

// One call of a collective.
struct Call {
  Kind kind;
  int first, second;  // axis of all_gather and reduce_scatter; split and concatenation axis; offset; root
  uint32_t number;
  std::vector<int> ranks;
};

// A tensor that goes in and the memory of the one that comes out.
struct Operand {
  const char* type;
  std::vector<int64_t> dims;
  const void* in;
  void* out;
};

// Throws Failure.
void collective(Transport& transport, const Call& call, const std::vector<Operand>& operands);

}  // namespace comm
