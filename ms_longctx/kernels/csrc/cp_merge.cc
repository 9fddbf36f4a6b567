// SPDX-License-Identifier: Apache-2.0
// Attention over the union of two sets of keys out of the attentions over each (attention/merge.py), in one pass.
#include <limits>

#include "simd.h"

namespace MLK_ISA {

// out (B,S,H,D), lse (B,H,S), other_out, other_lse -> out, lse of the union. All float32.
int CpMerge(const AotArgs& args) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t batch = args.dim(0, 0), length = args.dim(0, 1), heads = args.dim(0, 2), dim = args.dim(0, 3);
  const float *out = args.ptr<float>(0), *lse = args.ptr<float>(1);
  const float *other_out = args.ptr<float>(2), *other_lse = args.ptr<float>(3);
  float *merged = args.ptr<float>(4), *merged_lse = args.ptr<float>(5);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < batch * length * heads; row++) {
    const int64_t head = row % heads, position = row / heads % length, b = row / heads / length;
    const int64_t at = (b * heads + head) * length + position;
    const float a = lse[at], c = other_lse[at], top = a > c ? a : c;
    // Exponents are at most 0. Where neither set has a key both outputs are 0 and stay so.
    const float base = top == kNone ? 0.f : top, weight = std::exp(a - base), other_weight = std::exp(c - base);
    const float sum = weight + other_weight, share = top == kNone ? 0.f : weight / sum;
    const float other_share = top == kNone ? 0.f : other_weight / sum;
    merged_lse[at] = top == kNone ? kNone : base + std::log(sum);
    const float *x = out + row * dim, *y = other_out + row * dim;
    float* z = merged + row * dim;
    for (int64_t d = 0; d < dim; d += kWidth) {
      const int lanes = static_cast<int>(dim - d < kWidth ? dim - d : kWidth);
      store_first(z + d, load_first(x + d, lanes) * share + load_first(y + d, lanes) * other_share, lanes);
    }
  }
  return 0;
}

}  // namespace MLK_ISA

MLK_EXPORT(CpMerge)
