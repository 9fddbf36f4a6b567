// SPDX-License-Identifier: Apache-2.0
// What the fused_*.cc kernels share.
#pragma once

#include <algorithm>

#include "simd.h"

namespace MLK_ISA {
namespace {

constexpr int kUnsupportedType = 31;  // result of an operator that got neither fp32 nor fp16

// Calls body(T{}) with T = float or half, the type of argument i.
template <typename Body>
[[maybe_unused]] int with_type(const AotArgs& a, int i, Body body) {
  if (a.is(i, "float32")) {
    body(float{});
  } else if (a.is(i, "float16")) {
    body(half{});
  } else {
    return kUnsupportedType;
  }
  return 0;
}

// Calls body(offset, lanes) for each vector of n elements; lanes < kWidth only at the end.
template <typename Body>
MLK_INLINE void for_vectors(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(i, kWidth);
  if (i < n) body(i, static_cast<int>(n - i));
}

}  // namespace
}  // namespace MLK_ISA
