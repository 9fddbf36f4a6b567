// SPDX-License-Identifier: Apache-2.0
// Matrix products with few rows on the left: y (m, n) = x (m, k) w (n, k)^T, as decoding needs them. They read the
// weight once, in the order it lies in memory, and are bound by its bandwidth.
#pragma once

#include "fused_common.h"

namespace MLK_ISA {

constexpr int kSkinnyRows = 8;  // rows of x that share one pass over the weight

// y[i * ldy + j] for i < kM and the kN rows of w from w on.
template <int kM, int kN, typename W>
MLK_INLINE void skinny_step(const float* x, const W* w, float* y, int64_t ldy, int64_t k) {
  vfloat sum[kM][kN] = {};
  int64_t p = 0;
  for (; p + kWidth <= k; p += kWidth) {
    vfloat wp[kN];
#pragma GCC unroll 8
    for (int j = 0; j < kN; j++) wp[j] = load(w + j * k + p);
#pragma GCC unroll 8
    for (int i = 0; i < kM; i++) {
      const vfloat xp = load(x + i * k + p);
#pragma GCC unroll 8
      for (int j = 0; j < kN; j++) sum[i][j] += xp * wp[j];
    }
  }
  const int rest = static_cast<int>(k - p);
#pragma GCC unroll 8
  for (int i = 0; i < kM; i++) {
    const vfloat xp = load_first(x + i * k + p, rest);
#pragma GCC unroll 8
    for (int j = 0; j < kN; j++) y[i * ldy + j] = hsum(sum[i][j] + xp * load_first(w + j * k + p, rest));
  }
}

// Columns [begin, end) of y for kM rows of x.
template <int kM, typename W>
void skinny_columns(const float* x, const W* w, float* y, int64_t ldy, int64_t k, int64_t begin, int64_t end) {
  constexpr int kN = kM <= 2 ? 4 : (kM <= 4 ? 2 : 1);
  int64_t j = begin;
  for (; j + kN <= end; j += kN) skinny_step<kM, kN>(x, w + j * k, y + j, ldy, k);
  for (; j < end; j++) skinny_step<kM, 1>(x, w + j * k, y + j, ldy, k);
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
