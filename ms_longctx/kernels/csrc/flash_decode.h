// SPDX-License-Identifier: Apache-2.0
// Attention of very few query rows over many keys: one token of a generation over its cache.
//
// This is bound by the speed of memory, so K and V are read once, row by row, and the keys are shared out to the
// threads in chunks of fixed size whose partial results are merged in order (flash decoding).
#pragma once

#include "flash_common.h"

namespace MLK_ISA {

constexpr int64_t kDecodeRows = 8;  // query rows of one key/value head

namespace {

constexpr int64_t kChunk = 512;  // keys in a chunk
constexpr int64_t kStep = 64;    // keys at a time

// What one chunk of keys contributes to one row: the maximum, the sum and the output under that maximum.
struct Partial {
  float *maximum, *sum, *output;  // (rows), (rows), (rows, stride)
};

// scores[r][j] = q_r . k_j for keys j of a step; rows are padded with zeros to whole vectors.
template <int kRowsN, typename T>
void dot_rows(int64_t dim, int64_t stride, const float* q, const T* k, int64_t k_stride, int64_t count, float* scores) {
  for (int64_t j = 0; j < count; j++, k += k_stride) {
    vfloat sum[kRowsN] = {};
    for (int64_t d = 0; d < dim; d += kWidth) {
      const vfloat x = load_first(k + d, static_cast<int>(std::min<int64_t>(kWidth, dim - d)));
#pragma GCC unroll 4
      for (int r = 0; r < kRowsN; r++) sum[r] += load(q + r * stride + d) * x;
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRowsN; r++) scores[r * kStep + j] = hsum(sum[r]);
  }
}

// out[r] += sum over j of weights[r][j] * v_j
template <int kRowsN, typename T>
void add_values(int64_t dim, int64_t stride, const float* weights, const T* v, int64_t v_stride, int64_t count,
                float* out) {
  for (int64_t d = 0; d < dim; d += 2 * kWidth) {
    const int first = static_cast<int>(std::min<int64_t>(kWidth, dim - d));
    const int second = static_cast<int>(std::clamp<int64_t>(dim - d - kWidth, 0, kWidth));
    vfloat sum[kRowsN][2];
    for (int r = 0; r < kRowsN; r++) {
      sum[r][0] = load(out + r * stride + d), sum[r][1] = load(out + r * stride + d + kWidth);
    }
    for (int64_t j = 0; j < count; j++) {
      const T* row = v + j * v_stride + d;
      const vfloat x = load_first(row, first), y = load_first(row + kWidth, second);
#pragma GCC unroll 4
      for (int r = 0; r < kRowsN; r++) {
        const vfloat w = splat(weights[r * kStep + j]);
        sum[r][0] += w * x, sum[r][1] += w * y;
      }
    }
    for (int r = 0; r < kRowsN; r++) {
      store(out + r * stride + d, sum[r][0]), store(out + r * stride + d + kWidth, sum[r][1]);
    }
  }
}

// Masks one row's scores of keys [first, first + count) and turns them into weights; returns the correction factor.
inline float softmax_step(const Problem& p, int64_t b, int64_t row, float slope, int64_t first, int64_t count,
                          float* scores, float* maximum, float* sum) {
  const Interval keys = p.visible(b, row);
  const float position = static_cast<float>(p.q_start(b) - p.k_start(b) + row);
  const int32_t document = p.mask.documents ? p.q_documents[b * p.q_length + row] : 0;
  float top = *maximum;
  for (int64_t j = 0; j < count; j++) {
    const int64_t key = first + j;
    const bool seen = keys.low <= key && key < keys.high &&
                      (!p.mask.documents || p.k_documents[b * p.kv_length + key] == document);
    scores[j] = seen ? scores[j] + slope * (static_cast<float>(key) - position) : -kInfinity;
    top = scores[j] > top ? scores[j] : top;
  }
  for (int64_t j = count; j < kStep; j++) scores[j] = -kInfinity;
  const vfloat base = splat(top == -kInfinity ? 0.f : top);
  vfloat total{};
  for (int64_t j = 0; j < kStep; j += kWidth) {
    const vfloat weight = exp2_nonpositive(load(scores + j) - base);
    store(scores + j, weight);
    total += weight;
  }
  const float correction = *maximum == -kInfinity ? 0.f : std::exp2(*maximum - base[0]);
  *sum = *sum * correction + hsum(total);
  *maximum = top;
  return correction;
}

template <int kRowsN, typename T>
void decode_chunk(const Problem& p, int64_t b, int64_t h, int64_t first_row, Interval chunk, const float* q,
                  int64_t stride, const T* k, const T* v, const Partial& out) {
  float scores[kRowsN * kStep];
  const int64_t kv_stride = p.kv_heads * p.dim;
  for (int64_t j = chunk.low; j < chunk.high; j += kStep) {
    const int64_t count = std::min<int64_t>(kStep, chunk.high - j), at = p.k_offset(b, h, j);
    dot_rows<kRowsN>(p.dim, stride, q, k + at, kv_stride, count, scores);
    for (int r = 0; r < kRowsN; r++) {
      const int64_t head = (first_row + r) % p.group, row = (first_row + r) / p.group;
      const float slope = p.mask.alibi ? p.slopes[h * p.group + head] * kLog2e : 0.f;
      const float correction = softmax_step(p, b, row, slope, j, count, scores + r * kStep, out.maximum + r, out.sum + r);
      for (int64_t d = 0; d < stride; d++) out.output[r * stride + d] *= correction;
    }
    add_values<kRowsN>(p.dim, stride, scores, v + at, kv_stride, count, out.output);
  }
}

// Merges the partial results of one row, in the order of the keys.
template <typename T>
void merge_row(const Problem& p, int64_t chunks, const Partial& first, int64_t rows, int64_t stride, T* out, float* lse) {
  float top = -kInfinity, sum = 0.f;
  for (int64_t c = 0; c < chunks; c++) top = std::max(top, first.maximum[c * rows]);
  std::vector<float> total(p.dim, 0.f);
  for (int64_t c = 0; c < chunks; c++) {
    const float maximum = first.maximum[c * rows];
    const float factor = maximum == -kInfinity ? 0.f : std::exp2(maximum - top);
    sum += first.sum[c * rows] * factor;
    for (int64_t d = 0; d < p.dim; d++) total[d] += first.output[c * rows * stride + d] * factor;
  }
  for (int64_t d = 0; d < p.dim; d++) from_float(out + d, sum == 0.f ? 0.f : total[d] / sum);
  *lse = top * kLn2 + std::log(sum);
}

template <typename T>
int decode(const Problem& p, const AotArgs& args) {
  const int64_t rows = p.rows, stride = (p.dim + 2 * kWidth - 1) / (2 * kWidth) * (2 * kWidth);
  const std::vector<std::vector<KeyBounds>> blocks = key_blocks(p, kChunk);
  int64_t chunks = 0;
  for (const auto& of_batch : blocks) chunks = std::max<int64_t>(chunks, of_batch.size());
  const int64_t pairs = p.batch * p.kv_heads;
  Buffer memory = make_buffer(pairs * chunks * rows * (stride + 2));
  Buffer queries = make_buffer(pairs * rows * stride);
  const auto partial = [&](int64_t pair, int64_t c, int64_t r) {
    const int64_t at = (pair * chunks + c) * rows + r, all = pairs * chunks * rows;
    return Partial{memory.get() + at, memory.get() + all + at, memory.get() + 2 * all + at * stride};
  };
  std::fill_n(queries.get(), pairs * rows * stride, 0.f);
  for (int64_t i = 0; i < pairs * rows; i++) {
    const int64_t pair = i / rows;
    copy_row(args.ptr<T>(0) + p.q_offset(pair / p.kv_heads, pair % p.kv_heads, i % rows), p.dim, p.mask.scale * kLog2e,
             queries.get() + i * stride);
  }
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < pairs * chunks; t++) {
      const int64_t pair = t / chunks, c = t % chunks, b = pair / p.kv_heads, h = pair % p.kv_heads;
      const Partial all = partial(pair, c, 0);
      std::fill_n(all.maximum, rows, -kInfinity);
      std::fill_n(all.sum, rows, 0.f);
      std::fill_n(all.output, rows * stride, 0.f);
      if (c >= static_cast<int64_t>(blocks[b].size())) continue;
      RowBounds bounds;
      for (int64_t i = 0; i < p.q_length; i++) {
        bounds.add(p.visible(b, i), p.mask.documents ? p.q_documents[b * p.q_length + i] : 0);
      }
      const KeyBounds& keys = blocks[b][c];
      if (disjoint(bounds, keys)) continue;
      const Interval seen{std::max(keys.begin, bounds.low_min), std::min(keys.end, bounds.high_max)};
      for (int64_t r = 0; r < rows; r += 4) {
        const auto run = [&](auto count) {
          decode_chunk<decltype(count)::value>(p, b, h, r, seen, queries.get() + (pair * rows + r) * stride, stride,
                                               args.ptr<T>(1), args.ptr<T>(2), partial(pair, c, r));
        };
        switch (rows - r) {
          case 1: run(std::integral_constant<int, 1>()); break;
          case 2: run(std::integral_constant<int, 2>()); break;
          case 3: run(std::integral_constant<int, 3>()); break;
          default: run(std::integral_constant<int, 4>());
        }
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < pairs * rows; i++) {
      const int64_t pair = i / rows, b = pair / p.kv_heads, h = pair % p.kv_heads, r = i % rows;
      merge_row(p, chunks, partial(pair, 0, r), rows, stride, args.ptr<T>(7) + p.q_offset(b, h, r),
                args.ptr<float>(8) + p.lse_offset(b, h, r));
    }
  }
  return 0;
}

}  // namespace
}  // namespace MLK_ISA
