// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "comm_message.h"

namespace comm {

// out[i] = sources[0][i] + sources[1][i] + ... in that order; 16-bit floats are added in float32 and rounded once.
// The sources need no alignment. `type` is none of kOtherType.
void add(Type type, const void* const* sources, int count, void* out, size_t elements);

}  // namespace comm
