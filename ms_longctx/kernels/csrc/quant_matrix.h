// SPDX-License-Identifier: Apache-2.0
// Matrices of fp32, fp16, int8 or int4 values, read a vector of weights at a time; no matrix is ever unpacked as a whole.
//
// fp16: w (n, k), without scales.
// int8: q (n, k) and a scale for each row, for some matrices also a factor for each column; w = q * scale * factor.
// int4: groups of consecutive columns with a scale (fp16) and a zero point each; w = (q - zero) * scale. A row is
// stored in blocks of 128 columns of 64 bytes, as 16 little-endian words of 32 bits: nibble s of word i is column
// 16 s + i, so that a shift gives 16 neighbours. A last block of up to 64 columns has words of 16 bits, one of up to
// 32 columns words of 8 bits. Columns and groups are multiples of 16 (kernels/quant.py checks it).
#pragma once

#include <algorithm>

#include "simd.h"

namespace MLK_ISA {

enum MatrixKind : int64_t { kFloat = 0, kInt8 = 1, kInt8Both = 2, kInt4 = 3, kHalf = 4 };  // kInt8Both: int8 inputs as well

// One weight as kernels/quant.py describes it: five int64.
struct Matrix {
  int64_t kind;
  int64_t group;  // columns a scale of int4
  const void* values;
  const void* scales;    // float (n) of int8, half (n, groups) of int4
  const void* third;     // uint8 zero points (n, groups) of int4; float factors (k) of int8, or null

  const float* factors() const { return kind == kInt4 ? nullptr : static_cast<const float*>(third); }
};

constexpr int64_t kBlock = 128, kPiece = 16;  // columns of a block, and of a nibble of all its words

MLK_INLINE int64_t block_bytes(int64_t columns) { return columns > 64 ? 64 : (columns > 32 ? 32 : 16); }
MLK_INLINE int64_t int4_row_bytes(int64_t k) {
  return k / kBlock * block_bytes(kBlock) + (k % kBlock ? block_bytes(k % kBlock) : 0);
}

MLK_INLINE vfloat load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vfloat v;
  for (int i = 0; i < kWidth; i++) v[i] = p[i];
  return v;
#endif
}

// Words [first, first + kWidth) of a block of `columns`, each in 32 bits.
MLK_INLINE vint load_words(const uint8_t* block, int64_t columns, int first) {
  int32_t words[kWidth];
  if (columns > 64) return load_int(reinterpret_cast<const int32_t*>(block) + first);
  if (columns > 32) {
    for (int i = 0; i < kWidth; i++) words[i] = reinterpret_cast<const uint16_t*>(block)[first + i];
  } else {
    for (int i = 0; i < kWidth; i++) words[i] = block[first + i];
  }
  return load_int(words);
}

// The sixteen values a group can have. AVX-512 looks them up; elsewhere they are computed.
struct Group {
#if defined(__AVX512F__)
  __m512 table;
  void set(float scale, float zero) {
    const __m512 values = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    table = _mm512_mul_ps(_mm512_sub_ps(values, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
  }
  // The low four bits of each word choose; the lookup ignores the others.
  MLK_INLINE vfloat values(const Group& g, vint words, int s) {
    return (vfloat)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, 4 * s), g.table);
  }
#else
  float scale = 0, zero = 0;
  void set(float a, float b) { scale = a, zero = b; }
  MLK_INLINE vfloat values(const Group& g, vint words, int s) {
    const vint q = (words >> (4 * s)) & 15;
    return (__builtin_convertvector(q, vfloat) - splat(g.zero)) * splat(g.scale);
  }
#endif
};

// kWidth elements from p, of which only `lanes` are in the row; the others become 0.
MLK_INLINE vfloat load_elements(const int8_t* p, int lanes) {
  if (lanes == kWidth) return load_bytes(p);
  int8_t last[kWidth] = {};
  std::copy_n(p, lanes, last);
  return load_bytes(last);
}

MLK_INLINE vfloat load_elements(const half* p, int lanes) { return lanes == kWidth ? load(p) : load_first(p, lanes); }

// Calls body(column, lanes, weights, turn) for all vectors of a row of int8 or fp16; a scale is left to the caller.
// `turn` is a number known when compiling: sums kept apart by it hide the latency of additions.
template <typename T, typename Body>
MLK_INLINE void plain_row(const T* row, int64_t k, Body body) {
  int64_t p = 0;
  for (; p + 4 * kWidth <= k; p += 4 * kWidth) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) body(p + s * kWidth, kWidth, load_elements(row + p + s * kWidth, kWidth), s);
  }
  for (; p + kWidth <= k; p += kWidth) body(p, kWidth, load_elements(row + p, kWidth), 0);
  if (p < k) body(p, static_cast<int>(k - p), load_elements(row + p, static_cast<int>(k - p)), 0);
}

// The same for int4, with its scales applied. kGroup: columns a group where that is known when compiling, else 0.
template <int kGroup, typename Body>
MLK_INLINE void int4_row(const Matrix& w, int64_t n, int64_t k, Body body) {
  const int64_t size = kGroup ? kGroup : w.group, groups = (k + size - 1) / size;
  const uint8_t* block = static_cast<const uint8_t*>(w.values) + n * int4_row_bytes(k);
  const half* scale = static_cast<const half*>(w.scales) + n * groups;
  const uint8_t* zero = static_cast<const uint8_t*>(w.third) + n * groups;
  Group group;
  int64_t left = 0;  // columns of the group still to come
  const auto piece = [&](int64_t p, int64_t columns, int s) {
    if (left == 0) {
      group.set(to_float(*scale++), *zero++);
      left = size;
    }
    left -= kPiece;
    for (int first = 0; first < kPiece; first += kWidth) {
      body(p + s * kPiece + first, kWidth, Group::values(group, load_words(block, columns, first), s), s);
    }
  };
  int64_t p = 0;
  for (; p + kBlock <= k; p += kBlock, block += block_bytes(kBlock)) {
#pragma GCC unroll 8
    for (int s = 0; s < kBlock / kPiece; s++) piece(p, kBlock, s);
  }
  for (int s = 0; s < (k - p) / kPiece; s++) piece(p, k - p, s);
}

template <typename Body>
MLK_INLINE void quant_row(const Matrix& w, int64_t n, int64_t k, Body body) {
  if (w.kind == kHalf) return plain_row(static_cast<const half*>(w.values) + n * k, k, body);
  if (w.kind != kInt4) return plain_row(static_cast<const int8_t*>(w.values) + n * k, k, body);
  switch (w.group) {
    case 128: return int4_row<128>(w, n, k, body);
    case 64: return int4_row<64>(w, n, k, body);
    case 32: return int4_row<32>(w, n, k, body);
    default: return int4_row<0>(w, n, k, body);
  }
}

// What a row's sum is multiplied with.
MLK_INLINE float row_scale(const Matrix& w, int64_t n) {
  return w.kind == kInt4 || w.kind == kHalf ? 1.f : static_cast<const float*>(w.scales)[n];
}

// Row n as fp32 without the factors of its columns; int8 without its scale either if `scaled` is false.
[[maybe_unused]] static void unpack_row(const Matrix& w, int64_t n, int64_t k, float* out, bool scaled = true) {
  if (w.kind == kFloat) {
    std::copy_n(static_cast<const float*>(w.values) + n * k, k, out);
    return;
  }
  const vfloat scale = splat(scaled ? row_scale(w, n) : 1.f);
  quant_row(w, n, k, [&](int64_t p, int lanes, vfloat v, int) { store_first(out + p, v * scale, lanes); });
}

// Row n as it is.
[[maybe_unused]] static void whole_row(const Matrix& w, int64_t n, int64_t k, float* out) {
  unpack_row(w, n, k, out);
  if (const float* factors = w.factors()) {
    for (int64_t p = 0; p < k; p++) out[p] *= factors[p];
  }
}

}  // namespace MLK_ISA
