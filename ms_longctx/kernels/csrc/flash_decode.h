// SPDX-License-Identifier: Apache-2.0
// Attention of very few query rows over many keys: one token of a generation over its cache.
//
// This is bound by the speed of memory. K and V are read once, in the order they lie in memory: all heads of a few keys,
// then the next keys, which are fetched ahead. The keys are shared out to the threads in chunks of fixed size whose
// partial results are merged in order (flash decoding).
#pragma once

#include "flash_common.h"

namespace MLK_ISA {

constexpr int64_t kDecodeRows = 8;  // query rows of one key/value head

namespace {

constexpr int64_t kChunk = 128;  // keys in a chunk
constexpr int64_t kStep = 16;    // keys at a time

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
  for (int64_t d = 0; d < dim; d += kWidth) {
    const int lanes = static_cast<int>(std::min<int64_t>(kWidth, dim - d));
    vfloat sum[kRowsN][2] = {};  // of even and odd keys
    for (int64_t j = 0; j < count; j += 2) {
      const T* row = v + j * v_stride + d;
      const vfloat x = load_first(row, lanes), y = load_first(row + (j + 1 < count ? v_stride : 0), lanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRowsN; r++) {
        sum[r][0] += splat(weights[r * kStep + j]) * x;
        sum[r][1] += splat(weights[r * kStep + j + 1]) * y;  // beyond the last key the weight is 0
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRowsN; r++) {
      float* at = out + r * stride + d;
      store(at, load(at) + (sum[r][0] + sum[r][1]));
    }
  }
}

// Masks one row's scores of keys [first, first + count) and turns them into weights; returns the correction factor.
inline float softmax_step(const Problem& p, int64_t b, int64_t row, float slope, int64_t first, int64_t count,
                          float* scores, float* maximum, float* sum) {
  const Interval keys = p.visible(b, row);
  const float position = static_cast<float>(p.q_start(b) - p.k_start(b) + row);
  const int32_t document = p.mask.documents ? p.q_documents[b * p.q_length + row] : 0;
  if (p.mask.alibi || p.mask.documents || first < keys.low || keys.high < first + count) {
    for (int64_t j = 0; j < count; j++) {
      const int64_t key = first + j;
      const bool seen = keys.low <= key && key < keys.high &&
                        (!p.mask.documents || p.k_documents[b * p.kv_length + key] == document);
      scores[j] = seen ? scores[j] + slope * (static_cast<float>(key) - position) : -kInfinity;
    }
  }
  for (int64_t j = count; j < kStep; j++) scores[j] = -kInfinity;
  vfloat tops = splat(*maximum);
  for (int64_t j = 0; j < kStep; j += kWidth) tops = vmax(load(scores + j), tops);
  const float top = hmax(tops);
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

// Keys [keys.low, keys.high), kStep at most, for kRowsN rows of one head.
template <int kRowsN, typename T>
void decode_step(const Problem& p, int64_t b, int64_t h, int64_t first_row, Interval keys, const float* q,
                 int64_t stride, const T* k, const T* v, const Partial& out) {
  float scores[kRowsN * kStep];
  const int64_t kv_stride = p.kv_heads * p.dim, count = keys.high - keys.low, at = p.k_offset(b, h, keys.low);
  dot_rows<kRowsN>(p.dim, stride, q, k + at, kv_stride, count, scores);
  for (int r = 0; r < kRowsN; r++) {
    const int64_t head = (first_row + r) % p.group, row = (first_row + r) / p.group;
    const float slope = p.mask.alibi ? p.slopes[h * p.group + head] * kLog2e : 0.f;
    const float correction =
        softmax_step(p, b, row, slope, keys.low, count, scores + r * kStep, out.maximum + r, out.sum + r);
    if (correction == 1.f) continue;
    for (int64_t d = 0; d < stride; d++) out.output[r * stride + d] *= correction;
  }
  add_values<kRowsN>(p.dim, stride, scores, v + at, kv_stride, count, out.output);
}

template <typename T>
void prefetch(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(from + i, 0, 2);
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
class Decoder {
 public:
  Decoder(const Problem& p, const AotArgs& args)
      : p_(p), args_(args), stride_((p.dim + kWidth - 1) / kWidth * kWidth), blocks_(key_blocks(p, kChunk)) {
    for (const auto& of_batch : blocks_) chunks_ = std::max<int64_t>(chunks_, of_batch.size());
    const int64_t all = p.batch * p.kv_heads * p.rows;
    partials_ = make_buffer(all * chunks_ * (stride_ + 2));
    queries_ = make_buffer(all * stride_);
    for (int64_t i = 0; i < all; i++) {
      const int64_t pair = i / p.rows;
      copy_row(args.ptr<T>(0) + p.q_offset(pair / p.kv_heads, pair % p.kv_heads, i % p.rows), p.dim,
               p.mask.scale * kLog2e, queries_.get() + i * stride_);
    }
  }

  void run() {
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < p_.batch * chunks_; t++) run_chunk(t / chunks_, t % chunks_);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < p_.batch * p_.kv_heads * p_.rows; i++) {
        const int64_t pair = i / p_.rows, b = pair / p_.kv_heads, h = pair % p_.kv_heads, r = i % p_.rows;
        merge_row(p_, chunks_, partial(pair, 0, r), p_.rows, stride_, args_.ptr<T>(7) + p_.q_offset(b, h, r),
                  args_.ptr<float>(8) + p_.lse_offset(b, h, r));
      }
    }
  }

 private:
  Partial partial(int64_t pair, int64_t chunk, int64_t row) const {
    const int64_t at = (pair * chunks_ + chunk) * p_.rows + row, all = p_.batch * p_.kv_heads * chunks_ * p_.rows;
    float* memory = partials_.get();
    return {memory + at, memory + all + at, memory + 2 * all + at * stride_};
  }

  void run_chunk(int64_t b, int64_t chunk) const {
    for (int64_t h = 0; h < p_.kv_heads; h++) {
      const Partial all = partial(b * p_.kv_heads + h, chunk, 0);
      std::fill_n(all.maximum, p_.rows, -kInfinity);
      std::fill_n(all.sum, p_.rows, 0.f);
      std::fill_n(all.output, p_.rows * stride_, 0.f);
    }
    if (chunk >= static_cast<int64_t>(blocks_[b].size())) return;
    RowBounds bounds;
    for (int64_t i = 0; i < p_.q_length; i++) {
      bounds.add(p_.visible(b, i), p_.mask.documents ? p_.q_documents[b * p_.q_length + i] : 0);
    }
    const KeyBounds& keys = blocks_[b][chunk];
    if (disjoint(bounds, keys)) return;
    const int32_t end = std::min(keys.end, bounds.high_max);
    const int64_t width = p_.kv_heads * p_.dim;
    for (int32_t j = std::max(keys.begin, bounds.low_min); j < end; j += kStep) {
      const int32_t next = std::min<int32_t>(j + kStep, end), after = std::min<int32_t>(next + kStep, end);
      prefetch(args_.ptr<T>(2) + p_.k_offset(b, 0, j), (next - j) * width);
      prefetch(args_.ptr<T>(1) + p_.k_offset(b, 0, next), (after - next) * width);
      for (int64_t h = 0; h < p_.kv_heads; h++) run_head(b, h, chunk, {j, next});
    }
  }

  void run_head(int64_t b, int64_t h, int64_t chunk, Interval keys) const {
    const int64_t pair = b * p_.kv_heads + h;
    for (int64_t r = 0; r < p_.rows; r += 4) {
      const auto run = [&](auto count) {
        decode_step<decltype(count)::value>(p_, b, h, r, keys, queries_.get() + (pair * p_.rows + r) * stride_,
                                            stride_, args_.ptr<T>(1), args_.ptr<T>(2), partial(pair, chunk, r));
      };
      switch (p_.rows - r) {
        case 1: run(std::integral_constant<int, 1>()); break;
        case 2: run(std::integral_constant<int, 2>()); break;
        case 3: run(std::integral_constant<int, 3>()); break;
        default: run(std::integral_constant<int, 4>());
      }
    }
  }

  const Problem& p_;
  const AotArgs& args_;
  const int64_t stride_;
  const std::vector<std::vector<KeyBounds>> blocks_;
  int64_t chunks_ = 0;
  Buffer partials_, queries_;
};

template <typename T>
int decode(const Problem& p, const AotArgs& args) {
  Decoder<T>(p, args).run();
  return 0;
}

}  // namespace
}  // namespace MLK_ISA
