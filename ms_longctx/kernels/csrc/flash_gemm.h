// SPDX-License-Identifier: Apache-2.0
// The one matrix product that flash attention is made of, on tiles that fit the caches.
#pragma once

#include "simd.h"

namespace MLK_ISA {

// A panel is two vectors wide. Rows at a time: as many as leave registers for two vectors of B and one of A.
constexpr int kPanel = 2 * kWidth;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRowStep = 12;  // 32 vector registers
#else
constexpr int kRowStep = 6;  // 16 vector registers
#endif

// How the element (i, k) of A lies in memory: a[i * lda + k] or a[k * lda + i].
enum class Layout { kRows, kColumns };

// C[kRowsN x kVectors vectors] (+)= A[kRowsN x depth] B[depth x ...]; B and C are row-major.
template <int kRowsN, int kVectors, Layout kA>
MLK_INLINE void multiply_step(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                              int64_t depth, bool accumulate) {
  vfloat sum[kRowsN][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRowsN; i++) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) sum[i][v] = accumulate ? load(c + i * ldc + v * kWidth) : vfloat{};
  }
  for (int64_t k = 0; k < depth; k++) {
    vfloat bk[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) bk[v] = load(b + k * ldb + v * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kRowsN; i++) {
      const vfloat x = splat(kA == Layout::kRows ? a[i * lda + k] : a[k * lda + i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) sum[i][v] += x * bk[v];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRowsN; i++) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v++) store(c + i * ldc + v * kWidth, sum[i][v]);
  }
}

// The last rows, fewer than kRowStep.
template <int kRowsN, int kVectors, Layout kA>
MLK_INLINE void multiply_rest(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                              int64_t ldc, int64_t depth, bool accumulate) {
  if constexpr (kRowsN > 0) {
    if (rows == kRowsN) {
      multiply_step<kRowsN, kVectors, kA>(a, lda, b, ldb, c, ldc, depth, accumulate);
    } else {
      multiply_rest<kRowsN - 1, kVectors, kA>(rows, a, lda, b, ldb, c, ldc, depth, accumulate);
    }
  }
}

template <int kVectors, Layout kA>
void multiply_columns(int64_t rows, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                      int64_t ldc, bool accumulate) {
  const int64_t step = kA == Layout::kRows ? lda : 1;
  int64_t i = 0;
  for (; i + kRowStep <= rows; i += kRowStep) {
    multiply_step<kRowStep, kVectors, kA>(a + i * step, lda, b, ldb, c + i * ldc, ldc, depth, accumulate);
  }
  multiply_rest<kRowStep - 1, kVectors, kA>(rows - i, a + i * step, lda, b, ldb, c + i * ldc, ldc, depth, accumulate);
}

// C[rows x columns] (+)= A[rows x depth] B[depth x columns]; columns is a multiple of kWidth.
template <Layout kA>
MLK_INLINE void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b,
                         int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  int64_t j = 0;
  for (; j + kPanel <= columns; j += kPanel) {
    multiply_columns<2, kA>(rows, depth, a, lda, b + j, ldb, c + j, ldc, accumulate);
  }
  if (j < columns) multiply_columns<1, kA>(rows, depth, a, lda, b + j, ldb, c + j, ldc, accumulate);
}

}  // namespace MLK_ISA
