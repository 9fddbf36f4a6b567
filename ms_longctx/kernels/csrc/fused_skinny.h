// SPDX-License-Identifier: Apache-2.0
// Matrix products with few rows on the left: y (m, n) = x (m, k) w (n, k)^T, as decoding needs them. They read the
// weight once, in the order it lies in memory, and are bound by its bandwidth.
#pragma once

#include "fused_common.h"

namespace MLK_ISA {

constexpr int kSkinnyRows = 8;  // rows of x that share one pass over the weight

// y[i * ldy] for i < kM and one row of w. The row is read in order, as the prefetchers of the memory want it (several
// rows at a time are slower: with a short k none of the streams gets long); the sums hide the latency of additions.
template <int kM, typename W>
MLK_INLINE void skinny_step(const float* x, const W* w, float* y, int64_t ldy, int64_t k) {
  constexpr int kSums = kM == 1 ? 4 : (kM <= 4 ? 2 : 1);
  constexpr int64_t kAhead = 1024 / sizeof(W);
  vfloat sum[kM][kSums] = {};
  int64_t p = 0;
  for (; p + kSums * kWidth <= k; p += kSums * kWidth) {
    __builtin_prefetch(w + p + kAhead);
#pragma GCC unroll 4
    for (int s = 0; s < kSums; s++) {
      const vfloat wp = load(w + p + s * kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < kM; i++) sum[i][s] += load(x + i * k + p + s * kWidth) * wp;
    }
  }
  for (; p < k; p += kWidth) {
    const int lanes = static_cast<int>(std::min<int64_t>(kWidth, k - p));
    const vfloat wp = load_first(w + p, lanes);
#pragma GCC unroll 8
    for (int i = 0; i < kM; i++) sum[i][0] += load_first(x + i * k + p, lanes) * wp;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kM; i++) {
    vfloat total = sum[i][0];
    for (int s = 1; s < kSums; s++) total += sum[i][s];
    y[i * ldy] = hsum(total);
  }
}

// Columns [begin, end) of y for kM rows of x.
template <int kM, typename W>
void skinny_columns(const float* x, const W* w, float* y, int64_t ldy, int64_t k, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j++) skinny_step<kM>(x, w + j * k, y + j, ldy, k);
}

// Columns [begin, end) of y (m, ldy) = x (m, k) w (., k)^T in the calling thread, for any m.
template <typename W>
void skinny_product(const float* x, const W* w, float* y, int64_t ldy, int64_t m, int64_t k, int64_t begin,
                    int64_t end) {
  for (; m >= kSkinnyRows; m -= kSkinnyRows, x += kSkinnyRows * k, y += kSkinnyRows * ldy) {
    skinny_columns<kSkinnyRows>(x, w, y, ldy, k, begin, end);
  }
  switch (m) {
    case 7: return skinny_columns<7>(x, w, y, ldy, k, begin, end);
    case 6: return skinny_columns<6>(x, w, y, ldy, k, begin, end);
    case 5: return skinny_columns<5>(x, w, y, ldy, k, begin, end);
    case 4: return skinny_columns<4>(x, w, y, ldy, k, begin, end);
    case 3: return skinny_columns<3>(x, w, y, ldy, k, begin, end);
    case 2: return skinny_columns<2>(x, w, y, ldy, k, begin, end);
    case 1: return skinny_columns<1>(x, w, y, ldy, k, begin, end);
    default: return;
  }
}

}  // namespace MLK_ISA
