// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding (arXiv 2104.09864) in the rotate-half layout, and its gradient.
#include "fused_common.h"

namespace MLK_ISA {
namespace {

// Forward: y1 = x1 c1 - x2 s1, y2 = x2 c2 + x1 s2 (1, 2: the halves of a head).
// Backward is the transpose: y1 = x1 c1 + x2 s2, y2 = x2 c2 - x1 s1.
template <bool kBackward, typename T>
void rotate_head(const T* x, const float* cos, const float* sin, T* y, int64_t half_dim) {
  for_vectors(half_dim, [&](int64_t i, int lanes) {
    const int64_t j = half_dim + i;
    const vfloat x1 = load_first(x + i, lanes), x2 = load_first(x + j, lanes);
    const vfloat c1 = load_first(cos + i, lanes), c2 = load_first(cos + j, lanes);
    const vfloat s1 = load_first(sin + i, lanes), s2 = load_first(sin + j, lanes);
    store_first(y + i, kBackward ? x1 * c1 + x2 * s2 : x1 * c1 - x2 * s1, lanes);
    store_first(y + j, kBackward ? x2 * c2 - x1 * s1 : x2 * c2 + x1 * s2, lanes);
  });
}

template <bool kBackward, typename T>
void rotate(const AotArgs& a) {
  const int64_t seq = a.dim(0, 1), heads = a.dim(0, 2), dim = a.dim(0, 3);
  const bool shared = a.dim(1, 0) == 1;  // one table for all rows of the batch
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < a.dim(0, 0) * seq; p++) {
    const int64_t row = (shared ? p % seq : p) * dim;
    for (int64_t h = 0; h < heads; h++) {
      const int64_t at = (p * heads + h) * dim;
      rotate_head<kBackward>(a.ptr<T>(0) + at, a.ptr<float>(1) + row, a.ptr<float>(2) + row, a.ptr<T>(3) + at,
                             dim / 2);
    }
  }
}

}  // namespace

// x (B, S, H, D), cos, sin (B or 1, S, D) fp32 -> like x
int FusedRotary(const AotArgs& a) {
  return with_type(a, 0, [&](auto type) { rotate<false, decltype(type)>(a); });
}

// gradient of the result, cos, sin -> gradient of x
int FusedRotaryGrad(const AotArgs& a) {
  return with_type(a, 0, [&](auto type) { rotate<true, decltype(type)>(a); });
}

}  // namespace MLK_ISA

MLK_EXPORT(FusedRotary)
MLK_EXPORT(FusedRotaryGrad)
