// SPDX-License-Identifier: Apache-2.0
// Products of fp32 inputs with matrices of any kind (quant_matrix.h): y (m, n) = x (m, k) w (n, k)^T + bias.
//
// Few rows, as in decoding: each weight is widened in registers and the pass is bound by reading it. Many rows, as in
// reading a prompt: a tile of rows of the weight is unpacked at a time and multiplied with oneDNN's sgemm.
#pragma once

#include <omp.h>

#include <initializer_list>
#include <list>
#include <vector>

#include "fused_common.h"
#include "fused_gemm.h"
#include "fused_skinny.h"
#include "quant_matrix.h"

namespace MLK_ISA {
namespace {

// out[m * stride + n] = x[m] . weight[n] + bias[n] for `rows` rows of the weight; bias may be null.
struct Projection {
  Matrix weight;
  const float* bias;
  int64_t rows;
  float* out;
  int64_t stride;
};

// Inputs (count, k) in int8, symmetric with one scale a row, as vLLM's dynamic per-token quantization rounds them.
// Stored in 16 bits, which the products want, and for sgemm as fp32 numbers that are integers.
class Int8Inputs {
 public:
  Int8Inputs(const float* x, int64_t count, int64_t k, bool as_float)
      : k_(k), scales_(count), shorts_(as_float ? 0 : count * k), floats_(as_float ? count * k : 0) {
#pragma omp parallel for schedule(static) if (as_float)
    for (int64_t m = 0; m < count; m++) {
      const float* row = x + m * k;
      vfloat largest{};
      for_vectors(k, [&](int64_t p, int lanes) {
        const vfloat v = load_first(row + p, lanes);
        largest = vmax(largest, vmax(v, -v));
      });
      const float max = hmax(largest);
      scales_[m] = max / 127.f;
      const float rate = max > 0.f ? 127.f / max : 0.f;
      for (int64_t p = 0; p < k; p++) {
        const float q = std::nearbyint(row[p] * rate);
        if (as_float) {
          floats_[m * k + p] = q;
        } else {
          shorts_[m * k + p] = static_cast<int16_t>(q);
        }
      }
    }
  }
  float scale(int64_t m) const { return scales_[m]; }
  const int16_t* shorts(int64_t m) const { return shorts_.data() + m * k_; }
  const float* floats() const { return floats_.data(); }

 private:
  int64_t k_;
  std::vector<float> scales_;
  std::vector<int16_t> shorts_;
  std::vector<float> floats_;
};

// Exact in 32 bits up to k = 2^31 / 127^2 = 133144. 8-bit products of one instruction (vpmaddubsw) would saturate.
MLK_INLINE int32_t dot_int8(const int8_t* w, const int16_t* x, int64_t k) {
  int64_t p = 0;
  int32_t sum = 0;
#if defined(__AVX512BW__)
  __m512i total = _mm512_setzero_si512();
  for (; p + 32 <= k; p += 32) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + p)));
    total = _mm512_add_epi32(total, _mm512_madd_epi16(wide, _mm512_loadu_si512(x + p)));
  }
  sum = _mm512_reduce_add_epi32(total);
#elif defined(__AVX2__)
  __m256i total = _mm256_setzero_si256();
  for (; p + 16 <= k; p += 16) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + p)));
    const __m256i inputs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + p));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(wide, inputs));
  }
  int32_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), total);
  for (int32_t lane : lanes) sum += lane;
#endif
  for (; p < k; p++) sum += static_cast<int32_t>(w[p]) * x[p];
  return sum;
}

// Columns [first, last) of kM rows of the result, weights widened to fp32.
template <int kM>
void few_rows(const float* x, int64_t k, const Projection& to, float* out, int64_t first, int64_t last) {
  constexpr int kSums = kM == 1 ? 4 : 1;
  for (int64_t n = first; n < last; n++) {
    vfloat sum[kM][kSums] = {};
    quant_row(to.weight, n, k, [&](int64_t p, int lanes, vfloat w, int turn) {
#pragma GCC unroll 8
      for (int i = 0; i < kM; i++) sum[i][turn % kSums] += load_first(x + i * k + p, lanes) * w;
    });
    const float scale = row_scale(to.weight, n);
    for (int i = 0; i < kM; i++) {
      vfloat total = sum[i][0];
      for (int s = 1; s < kSums; s++) total += sum[i][s];
      out[i * to.stride + n] = hsum(total) * scale;
    }
  }
}

template <int kM>
void all_rows(const float* x, int64_t count, int64_t k, const Projection& to, int64_t first, int64_t last) {
  float* out = to.out;
  for (; count >= kM; count -= kM, x += kM * k, out += kM * to.stride) few_rows<kM>(x, k, to, out, first, last);
  for (; count > 0; count--, x += k, out += to.stride) few_rows<1>(x, k, to, out, first, last);
}

void int8_columns(const Int8Inputs& x, int64_t count, int64_t k, const Projection& to, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n++) {
    const int8_t* row = static_cast<const int8_t*>(to.weight.values) + n * k;
    const float scale = row_scale(to.weight, n);
    for (int64_t m = 0; m < count; m++) {
      to.out[m * to.stride + n] = static_cast<float>(dot_int8(row, x.shorts(m), k)) * (x.scale(m) * scale);
    }
  }
}

// Many rows: kTile rows of the weight are unpacked at a time. Products of int8 with int8 are left whole numbers, whose
// sums are exact in fp32 up to 2^24; the scales come last.
void tiles(SgemmFunction sgemm, const float* x, const Int8Inputs* int8, int64_t count, int64_t k, const Projection& to,
           int64_t first, int64_t last) {
  constexpr int64_t kTile = 64;
  std::vector<float> tile(kTile * k);
  for (int64_t n = first; n < last; n += kTile) {
    const int64_t rows = std::min(kTile, last - n);
    for (int64_t i = 0; i < rows; i++) unpack_row(to.weight, n + i, k, tile.data() + i * k, int8 == nullptr);
    const float* left = int8 != nullptr ? int8->floats() : x;
    sgemm('N', 'T', count, rows, k, 1.f, left, k, tile.data(), k, 0.f, to.out + n, to.stride);
    if (int8 == nullptr) continue;
    for (int64_t m = 0; m < count; m++) {
      for (int64_t i = 0; i < rows; i++) {
        to.out[m * to.stride + n + i] *= int8->scale(m) * row_scale(to.weight, n + i);
      }
    }
  }
}

// For each projection its inputs: x, or x times the factors of the weight's columns.
class Inputs {
 public:
  Inputs(const float* x, int64_t count, int64_t k, std::initializer_list<Projection> projections) {
    for (const Projection& p : projections) {
      const float* factors = p.weight.factors();
      if (factors == nullptr) {
        inputs_.push_back(x);
        continue;
      }
      std::vector<float>& product = products_.emplace_back(count * k);
      for (int64_t m = 0; m < count; m++) {
        for (int64_t i = 0; i < k; i++) product[m * k + i] = x[m * k + i] * factors[i];
      }
      inputs_.push_back(product.data());
    }
  }
  const float* operator[](int64_t i) const { return inputs_[i]; }

 private:
  std::list<std::vector<float>> products_;  // whose addresses stay
  std::vector<const float*> inputs_;
};

// All projections of the inputs x (count, k); the rows of their weights are shared out evenly to the threads.
void project(const float* inputs, int64_t count, int64_t k, std::initializer_list<Projection> projections) {
  const Inputs each(inputs, count, k, projections);
  const SgemmFunction sgemm = count > kSkinnyRows ? mlk_sgemm() : nullptr;
  std::vector<Int8Inputs> int8;
  for (const Projection& p : projections) {
    if (p.weight.kind == kInt8Both && int8.empty()) int8.emplace_back(inputs, count, k, sgemm != nullptr);
  }
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    for (int64_t i = 0; i < static_cast<int64_t>(projections.size()); i++) {
      const Projection& p = projections.begin()[i];
      const float* x = each[i];
      const auto border = [&](int64_t t) { return t == threads ? p.rows : p.rows * t / threads / 8 * 8; };
      const int64_t first = border(thread), last = border(thread + 1);
      const float* weight = static_cast<const float*>(p.weight.values);
      if (p.weight.kind == kFloat && sgemm != nullptr && first < last) {
        sgemm('N', 'T', count, last - first, k, 1.f, x, k, weight + first * k, k, 0.f, p.out + first, p.stride);
      } else if (p.weight.kind == kFloat) {
        skinny_product(x, weight, p.out, p.stride, count, k, first, last);
      } else if (sgemm != nullptr) {
        tiles(sgemm, x, p.weight.kind == kInt8Both ? int8.data() : nullptr, count, k, p, first, last);
      } else if (p.weight.kind == kInt8Both) {
        int8_columns(int8.front(), count, k, p, first, last);
      } else {
        all_rows<4>(x, count, k, p, first, last);
      }
      if (p.bias == nullptr) continue;
      for (int64_t m = 0; m < count; m++) {
        for (int64_t n = first; n < last; n++) p.out[m * p.stride + n] += p.bias[n];
      }
    }
  }
}

}  // namespace
}  // namespace MLK_ISA
