// SPDX-License-Identifier: Apache-2.0
// AdamW (arXiv 1711.05101, algorithm 2, as torch.optim.AdamW orders it) that changes parameters and moments in
// place, and the global norm of many gradients.
#include <cmath>
#include <vector>

#include "fused_common.h"

namespace MLK_ISA {
namespace {

constexpr int64_t kBlock = 16384;  // elements a thread takes at a time; fixed, so sums do not depend on threads

struct Block {
  int tensor;
  int64_t begin, end;
};

std::vector<Block> split(const AotArgs& a, int first, int count) {
  std::vector<Block> blocks;
  for (int t = 0; t < count; t++) {
    const int64_t n = a.size(first + t);
    for (int64_t i = 0; i < n; i += kBlock) blocks.push_back({t, i, std::min(n, i + kBlock)});
  }
  return blocks;
}

bool all_fp32(const AotArgs& a, int first, int count) {
  for (int t = first; t < first + count; t++) {
    if (!a.is(t, "float32")) return false;
  }
  return true;
}

bool all_supported(const AotArgs& a, int first, int count) {
  for (int t = first; t < first + count; t++) {
    if (with_type(a, t, [](auto) {}) != 0) return false;
  }
  return true;
}

struct AdamWAttributes {
  float beta1, beta2, eps, weight_decay;
};

struct Update {
  float keep1, add1, keep2, add2, decay, step_size, denominator_scale, eps, grad_scale;
};

Update make_update(const AdamWAttributes& at, float lr, int step, float grad_scale) {
  const double bias1 = 1.0 - std::pow(static_cast<double>(at.beta1), step);
  const double bias2 = 1.0 - std::pow(static_cast<double>(at.beta2), step);
  return {at.beta1,
          1.f - at.beta1,
          at.beta2,
          1.f - at.beta2,
          1.f - lr * at.weight_decay,
          static_cast<float>(lr / bias1),
          static_cast<float>(1.0 / std::sqrt(bias2)),
          at.eps,
          grad_scale};
}

MLK_INLINE vfloat vsqrt(vfloat x) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (vfloat)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < kWidth; i++) x[i] = sqrtf(x[i]);
  return x;
#endif
}

template <typename G>
void update_block(float* p, float* m, float* v, const G* g, int64_t n, const Update& u) {
  for_vectors(n, [&](int64_t i, int lanes) {
    const vfloat grad = load_first(g + i, lanes) * splat(u.grad_scale);
    const vfloat m1 = load_first(m + i, lanes) * splat(u.keep1) + grad * splat(u.add1);
    const vfloat v1 = load_first(v + i, lanes) * splat(u.keep2) + grad * grad * splat(u.add2);
    const vfloat denominator = vsqrt(v1) * splat(u.denominator_scale) + splat(u.eps);
    store_first(m + i, m1, lanes);
    store_first(v + i, v1, lanes);
    const vfloat kept = load_first(p + i, lanes) * splat(u.decay);
    store_first(p + i, kept - splat(u.step_size) * m1 / denominator, lanes);
  });
}

template <typename G>
double sum_of_squares(const G* g, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; i += 16 * kWidth) {  // short fp32 runs, summed in fp64
    vfloat run = splat(0.f);
    for_vectors(std::min<int64_t>(16 * kWidth, n - i), [&](int64_t j, int lanes) {
      const vfloat x = load_first(g + i + j, lanes);
      run += x * x;
    });
    total += hsum(run);
  }
  return total;
}

// Only where the fast sum overflowed fp32 (or a value is not finite): squares in fp64.
template <typename G>
double exact_sum_of_squares(const G* g, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; i++) total += static_cast<double>(to_float(g[i])) * to_float(g[i]);
  return total;
}

template <typename G>
double block_norm(const G* g, int64_t n) {
  const double fast = sum_of_squares(g, n);
  return std::isfinite(fast) ? fast : exact_sum_of_squares(g, n);
}

}  // namespace

// learning rate fp32, step int32 (1 for the first), gradient scale fp32, skip bool; then k parameters fp32, k first
// moments fp32, k second moments fp32, k gradients (fp32 or fp16); result: 1 if updated, 0 if skipped (int32).
int FusedAdamW(const AotArgs& a) {
  const int k = (a.count - 5) / 4, params = 4, m = params + k, v = m + k, grads = v + k;
  if (!all_fp32(a, params, 3 * k) || !all_supported(a, grads, k)) return kUnsupportedType;
  const bool skip = *a.ptr<bool>(3);
  *a.ptr<int32_t>(a.count - 1) = skip ? 0 : 1;
  if (skip) return 0;
  const Update u =
      make_update(attributes<AdamWAttributes>(a), *a.ptr<float>(0), *a.ptr<int32_t>(1), *a.ptr<float>(2));
  const std::vector<Block> blocks = split(a, params, k);
#pragma omp parallel for schedule(static)
  for (size_t b = 0; b < blocks.size(); b++) {
    const Block& block = blocks[b];
    const int64_t at = block.begin, n = block.end - block.begin;
    float *p = a.ptr<float>(params + block.tensor) + at, *m1 = a.ptr<float>(m + block.tensor) + at,
          *v1 = a.ptr<float>(v + block.tensor) + at;
    with_type(a, grads + block.tensor, [&](auto type) {
      update_block(p, m1, v1, a.ptr<decltype(type)>(grads + block.tensor) + at, n, u);
    });
  }
  return 0;
}
int FusedAdamWInit(AotExtra* e) {
  return keep_attributes(e, AdamWAttributes{e->GetAttrFloat("beta1"), e->GetAttrFloat("beta2"),
                                            e->GetAttrFloat("eps"), e->GetAttrFloat("weight_decay")});
}

// k gradients (fp32 or fp16) -> square root of the sum of all squares (fp32), whether every element is finite (bool)
int FusedGlobalNorm(const AotArgs& a) {
  const int k = a.count - 2;
  if (!all_supported(a, 0, k)) return kUnsupportedType;
  const std::vector<Block> blocks = split(a, 0, k);
  std::vector<double> sums(blocks.size());
#pragma omp parallel for schedule(static)
  for (size_t b = 0; b < blocks.size(); b++) {
    const Block& block = blocks[b];
    with_type(a, block.tensor, [&](auto type) {
      sums[b] = block_norm(a.ptr<decltype(type)>(block.tensor) + block.begin, block.end - block.begin);
    });
  }
  double total = 0.0;
  for (const double s : sums) total += s;
  *a.ptr<float>(k) = static_cast<float>(std::sqrt(total));
  *a.ptr<bool>(k + 1) = std::isfinite(total);
  return 0;
}

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(FusedAdamW)
MLK_EXPORT(FusedGlobalNorm)
