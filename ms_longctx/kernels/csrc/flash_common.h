// SPDX-License-Identifier: Apache-2.0
// What the forward and the backward pass of flash attention share: the problem, its mask, and small tools.
//
// Query heads that share a key/value head are handled together: their rows are numbered r = position * group + head in
// the group, so grouped-query attention never repeats K or V.
#pragma once

#include <omp.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "flash_count.h"
#include "flash_gemm.h"

namespace MLK_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

// The static half of the mask (attention/mask.py: MaskSpec) and the scale. 0 stands for "no limit" and for the usual
// scale, 1 / sqrt(D).
struct Mask {
  float scale;
  bool causal, alibi, documents;
  int64_t window, chunk;
};

inline int read_mask(AotExtra* extra) {
  return keep_attributes(extra, Mask{extra->GetAttrFloat("scale"), extra->GetAttrBool("causal"),
                                     extra->GetAttrBool("alibi"), extra->GetAttrBool("documents"),
                                     extra->GetAttrInt("window"), extra->GetAttrInt("chunk")});
}

// Key rows [low, high).
struct Interval {
  int32_t low, high;
};

// One call: inputs 0-6 are q (B,Sq,H,D), k and v (B,Sk,Hkv,D), q_documents (B,Sq), k_documents (B,Sk), slopes (H),
// offsets (n) or (B, n), n = 2 or 3: first query position, valid key rows, first key position (0 where n is 2). With
// n = 1 all keys are valid and the last query stands at the last key. What the mask does not use is never read.
struct Problem {
  explicit Problem(const AotArgs& args) : Problem(attributes<Mask>(args), args) {}
  Problem(const Mask& static_mask, const AotArgs& args) : mask(static_mask) {
    batch = args.dim(0, 0), q_length = args.dim(0, 1), heads = args.dim(0, 2), dim = args.dim(0, 3);
    kv_length = args.dim(1, 1), kv_heads = args.dim(1, 2), group = heads / kv_heads;
    rows = q_length * group;
    if (mask.scale == 0.f) mask.scale = 1.f / std::sqrt(static_cast<float>(dim));
    q_documents = args.ptr<int32_t>(3), k_documents = args.ptr<int32_t>(4), slopes = args.ptr<float>(5);
    offsets = args.ptr<int32_t>(6);
    offsets_width = args.dim(6, args.ndims[6] - 1);
    offsets_stride = args.ndims[6] == 2 ? offsets_width : 0;
  }

  // Position of query 0 and of key 0; only their difference and, for chunks, their absolute value matter.
  int64_t q_start(int64_t b) const { return offsets_width < 2 ? kv_length - q_length : offsets[b * offsets_stride]; }
  int64_t k_start(int64_t b) const { return offsets_width > 2 ? offsets[b * offsets_stride + 2] : 0; }
  int64_t valid_keys(int64_t b) const {
    return offsets_width < 2 ? kv_length : std::clamp<int64_t>(offsets[b * offsets_stride + 1], 0, kv_length);
  }

  // Keys that query `row` may see by position. Documents are checked apart, except that padding sees nothing.
  Interval visible(int64_t b, int64_t row) const {
    const int64_t position = q_start(b) + row, first = k_start(b);
    int64_t low = first, high = first + valid_keys(b);
    if (mask.causal) high = std::min(high, position + 1);
    if (mask.window > 0) low = std::max(low, position - mask.window + 1);
    if (mask.chunk > 0) {
      const int64_t remainder = (position % mask.chunk + mask.chunk) % mask.chunk;
      low = std::max(low, position - remainder);
      high = std::min(high, position - remainder + mask.chunk);
    }
    if (mask.documents && q_documents[b * q_length + row] < 0) high = low;
    if (high <= low) return {0, 0};
    return {static_cast<int32_t>(low - first), static_cast<int32_t>(high - first)};
  }

  // Offsets, in elements, of row r of key/value head h in q, out and their gradients, and of key j in k and v.
  int64_t q_offset(int64_t b, int64_t h, int64_t r) const {
    return ((b * q_length + r / group) * heads + h * group + r % group) * dim;
  }
  int64_t k_offset(int64_t b, int64_t h, int64_t j) const { return ((b * kv_length + j) * kv_heads + h) * dim; }
  // Pointers to `count` rows of q or a tensor like it; null past the last row.
  template <typename T>
  void row_pointers(int64_t b, int64_t h, int64_t first, int64_t count, T* x, T** row) const {
    for (int64_t i = 0; i < count; i++) row[i] = first + i < rows ? x + q_offset(b, h, first + i) : nullptr;
  }
  // Offset of the same row in lse (B, H, Sq).
  int64_t lse_offset(int64_t b, int64_t h, int64_t r) const {
    return (b * heads + h * group + r % group) * q_length + r / group;
  }

  Mask mask;
  int64_t batch, q_length, kv_length, heads, kv_heads, group, dim;
  int64_t rows;  // query rows of one key/value head
  const int32_t *q_documents, *k_documents, *offsets;
  const float* slopes;
  int64_t offsets_width, offsets_stride;
};

// FlashForward for other kernels: `args` holds its inputs and results, the mask is in `p`.
int flash_forward(const Problem& p, const AotArgs& args);

// Bounds over several query rows; rows that see nothing are left out.
struct RowBounds {
  int32_t low_min = std::numeric_limits<int32_t>::max(), low_max = 0;
  int32_t high_min = std::numeric_limits<int32_t>::max(), high_max = 0;
  int32_t document_min = std::numeric_limits<int32_t>::max(), document_max = -1;
  bool has_blind = false;  // some row sees nothing

  void add(Interval keys, int32_t document) {
    if (keys.high <= keys.low) {
      has_blind = true;
      return;
    }
    low_min = std::min(low_min, keys.low), low_max = std::max(low_max, keys.low);
    high_min = std::min(high_min, keys.high), high_max = std::max(high_max, keys.high);
    document_min = std::min(document_min, document), document_max = std::max(document_max, document);
  }
  void add(const RowBounds& other) {
    low_min = std::min(low_min, other.low_min), low_max = std::max(low_max, other.low_max);
    high_min = std::min(high_min, other.high_min), high_max = std::max(high_max, other.high_max);
    document_min = std::min(document_min, other.document_min);
    document_max = std::max(document_max, other.document_max);
    has_blind |= other.has_blind;
  }
};

// Keys [begin, end) and the range of their document ids.
struct KeyBounds {
  KeyBounds(const Problem& p, int64_t b, int64_t first, int64_t last)
      : begin(static_cast<int32_t>(first)), end(static_cast<int32_t>(last)) {
    if (!p.mask.documents) return;
    const int32_t* ids = p.k_documents + b * p.kv_length;
    document_min = *std::min_element(ids + first, ids + last);
    document_max = *std::max_element(ids + first, ids + last);
  }
  int32_t begin, end, document_min = 0, document_max = 0;
};

// The valid keys of every sequence of the batch, cut into blocks.
inline std::vector<std::vector<KeyBounds>> key_blocks(const Problem& p, int64_t size) {
  std::vector<std::vector<KeyBounds>> blocks(p.batch);
  for (int64_t b = 0; b < p.batch; b++) {
    const int64_t valid = p.valid_keys(b);
    for (int64_t j = 0; j < valid; j += size) blocks[b].emplace_back(p, b, j, std::min(valid, j + size));
  }
  return blocks;
}

// No row sees any key.
MLK_INLINE bool disjoint(const RowBounds& rows, const KeyBounds& keys) {
  return rows.low_min >= keys.end || rows.high_max <= keys.begin || rows.document_min > keys.document_max ||
         rows.document_max < keys.document_min;
}
// Every row sees every key.
MLK_INLINE bool complete(const RowBounds& rows, const KeyBounds& keys) {
  return !rows.has_blind && rows.low_max <= keys.begin && rows.high_min >= keys.end &&
         rows.document_min == keys.document_max && rows.document_max == keys.document_min;
}

// 2^x for x <= 127 with a relative error below 2e-7; anything under 2^-126.5 becomes 0, NaN stays NaN.
MLK_INLINE vfloat exp2_nonpositive(vfloat x) {
  const vfloat kRound = splat(12582912.f + 127.f);  // leaves round(x) + 127 in the low bits
  x = vmax(splat(-127.f), x);
  const vfloat shifted = x + kRound;
  const vfloat f = x - (shifted - kRound);  // in [-1/2, 1/2]
  vfloat p = splat(1.326472725e-3f);    // minimax polynomial of the relative error, 9e-8
  p = p * f + splat(9.671512688e-3f);
  p = p * f + splat(5.550733744e-2f);
  p = p * f + splat(2.402224208e-1f);
  p = p * f + splat(6.931469776e-1f);
  p = p * f + splat(1.f);
  return p * (vfloat)((vint)shifted << 23);
}

// Memory aligned for vectors. Not initialised.
struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float[], Free>;
inline Buffer make_buffer(int64_t floats) {
  return Buffer(static_cast<float*>(std::aligned_alloc(64, (std::max<int64_t>(floats, 1) * 4 + 63) / 64 * 64)));
}

// Leading dimension for a tile of `dim` columns: whole vectors, and an odd number of cache lines, because rows at
// power-of-two distances fall into the same few sets of the L1 cache.
inline int64_t tile_stride(int64_t dim) { return ((dim + 15) / 16 | 1) * 16; }

// out[0 .. padded) = x[0 .. dim) * factor, filled up with 0 to whole vectors.
template <typename T>
MLK_INLINE void copy_row(const T* x, int64_t dim, float factor, float* out) {
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) store(out + d, load(x + d) * factor);
  if (d < dim) store(out + d, load_first(x + d, static_cast<int>(dim - d)) * factor);
}

// out (count, stride) = rows times factor.
template <typename T>
void copy_rows(const T* const* row, int64_t count, int64_t dim, float factor, float* out, int64_t stride) {
  for (int64_t i = 0; i < count; i++) copy_row(row[i], dim, factor, out + i * stride);
}

// row[i][j] <-> row[j][i] of a square of vectors, by exchanging ever larger sub-squares.
MLK_INLINE void transpose(vfloat* row) {
  vint lane;
  for (int i = 0; i < kWidth; i++) lane[i] = i;
#pragma GCC unroll 4
  for (int step = 1; step < kWidth; step *= 2) {
    const vint upper = (lane & step) != 0;
    const vint first = upper ? lane - step + kWidth : lane, second = upper ? lane + kWidth : lane + step;
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i++) {
      if (i & step) continue;
      const vfloat a = row[i], b = row[i + step];
      row[i] = __builtin_shuffle(a, b, first);
      row[i + step] = __builtin_shuffle(a, b, second);
    }
  }
}

// out (dim, kPanel): out[d][i] = row[i][d] * factor; a null row gives 0.
template <typename T>
void load_transposed(const T* const* row, int64_t dim, float factor, float* out) {
  for (int half_panel = 0; half_panel < kPanel; half_panel += kWidth) {
    for (int64_t d = 0; d < dim; d += kWidth) {
      const int count = static_cast<int>(std::min<int64_t>(kWidth, dim - d));
      vfloat square[kWidth];
      for (int i = 0; i < kWidth; i++) {
        const T* x = row[half_panel + i];
        square[i] = x == nullptr ? vfloat{} : load_first(x + d, count) * factor;
      }
      transpose(square);
      for (int i = 0; i < count; i++) store(out + (d + i) * kPanel + half_panel, square[i]);
    }
  }
}

// row[i][d] = in[d][i] * factor[i], where in is (dim, kPanel); null rows are left out.
template <typename T>
void store_transposed(const float* in, int64_t dim, const float* factor, T* const* row) {
  for (int half_panel = 0; half_panel < kPanel; half_panel += kWidth) {
    for (int64_t d = 0; d < dim; d += kWidth) {
      const int count = static_cast<int>(std::min<int64_t>(kWidth, dim - d));
      vfloat square[kWidth] = {};
      for (int i = 0; i < count; i++) square[i] = load(in + (d + i) * kPanel + half_panel);
      transpose(square);
      for (int i = 0; i < kWidth; i++) {
        T* x = row[half_panel + i];
        if (x != nullptr) store_first(x + d, square[i] * factor[half_panel + i], count);
      }
    }
  }
}

}  // namespace MLK_ISA
