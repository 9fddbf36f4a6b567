// SPDX-License-Identifier: Apache-2.0
// RMSNorm (arXiv 1910.07467, equation 4), alone and with the residual addition before it, and the gradients.
#include <vector>

#include "fused_common.h"

namespace MLK_ISA {
namespace {

struct NormAttributes {
  float eps;
};

// Rows of one partial sum of the weight gradient: fixed, so that results do not depend on the number of threads.
constexpr int64_t kRowBlock = 64;

// y = weight * x * rstd with rstd = 1 / sqrt(mean(x^2) + eps)
template <typename T>
float norm_row(const T* x, const float* weight, T* y, int64_t n, float eps) {
  vfloat sum = splat(0.f);
  for_vectors(n, [&](int64_t i, int lanes) {
    const vfloat v = load_first(x + i, lanes);
    sum += v * v;
  });
  const float rstd = 1.f / sqrtf(hsum(sum) / static_cast<float>(n) + eps);
  for_vectors(n, [&](int64_t i, int lanes) {
    store_first(y + i, load_first(x + i, lanes) * load_first(weight + i, lanes) * splat(rstd), lanes);
  });
  return rstd;
}

template <typename T>
void add_row(const T* a, const T* b, T* out, int64_t n) {
  for_vectors(n, [&](int64_t i, int lanes) {
    store_first(out + i, load_first(a + i, lanes) + load_first(b + i, lanes), lanes);
  });
}

// With g = dy * weight: dx = rstd * (g - x * rstd^2 * mean(g * x)) [+ carried]; dweight += dy * x * rstd
template <typename T>
void norm_grad_row(const T* x, const float* weight, float rstd, const T* dy, const T* carried, T* dx,
                   float* dweight, int64_t n) {
  vfloat dot = splat(0.f);
  for_vectors(n, [&](int64_t i, int lanes) {
    dot += load_first(dy + i, lanes) * load_first(weight + i, lanes) * load_first(x + i, lanes);
  });
  const vfloat r = splat(rstd), factor = splat(hsum(dot) / static_cast<float>(n) * rstd * rstd);
  for_vectors(n, [&](int64_t i, int lanes) {
    const vfloat vx = load_first(x + i, lanes), vdy = load_first(dy + i, lanes);
    vfloat v = r * (vdy * load_first(weight + i, lanes) - vx * factor);
    if (carried != nullptr) v += load_first(carried + i, lanes);
    store_first(dx + i, v, lanes);
    store_first(dweight + i, load_first(dweight + i, lanes) + vdy * vx * r, lanes);
  });
}

template <typename T>
void norm_grad(const T* x, const float* weight, const float* rstd, const T* dy, const T* carried, T* dx,
               float* dweight, int64_t rows, int64_t n) {
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  std::vector<float> partial(blocks * n, 0.f);
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
      for (int64_t r = b * kRowBlock; r < std::min(rows, (b + 1) * kRowBlock); r++) {
        norm_grad_row(x + r * n, weight, rstd[r], dy + r * n, carried ? carried + r * n : nullptr, dx + r * n,
                      partial.data() + b * n, n);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      float sum = 0.f;
      for (int64_t b = 0; b < blocks; b++) sum += partial[b * n + i];
      dweight[i] = sum;
    }
  }
}

int read_eps(AotExtra* extra) { return keep_attributes(extra, NormAttributes{extra->GetAttrFloat("eps")}); }

}  // namespace

// x (..., n), weight (n,) fp32 -> y like x, rstd (...) fp32
int FusedRmsNorm(const AotArgs& a) {
  const int64_t n = a.size(1), rows = a.size(0) / n;
  const float eps = attributes<NormAttributes>(a).eps;
  return with_type(a, 0, [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      a.ptr<float>(3)[r] = norm_row(a.ptr<T>(0) + r * n, a.ptr<float>(1), a.ptr<T>(2) + r * n, n, eps);
    }
  });
}
int FusedRmsNormInit(AotExtra* extra) { return read_eps(extra); }

// x, delta (..., n), weight (n,) fp32 -> x + delta, its norm, rstd (...) fp32
int FusedAddRmsNorm(const AotArgs& a) {
  const int64_t n = a.size(2), rows = a.size(0) / n;
  const float eps = attributes<NormAttributes>(a).eps;
  return with_type(a, 0, [&](auto type) {
    using T = decltype(type);
    T* sum = a.ptr<T>(3);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      add_row(a.ptr<T>(0) + r * n, a.ptr<T>(1) + r * n, sum + r * n, n);
      a.ptr<float>(5)[r] = norm_row(sum + r * n, a.ptr<float>(2), a.ptr<T>(4) + r * n, n, eps);
    }
  });
}
int FusedAddRmsNormInit(AotExtra* extra) { return read_eps(extra); }

// x, weight, rstd, dy -> dx, dweight fp32
int FusedRmsNormGrad(const AotArgs& a) {
  const int64_t n = a.size(1), rows = a.size(0) / n;
  return with_type(a, 0, [&](auto type) {
    using T = decltype(type);
    norm_grad<T>(a.ptr<T>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<T>(3), nullptr, a.ptr<T>(4),
                 a.ptr<float>(5), rows, n);
  });
}

// sum, weight, rstd, dsum, dy -> gradient of x and of delta alike, dweight fp32
int FusedAddRmsNormGrad(const AotArgs& a) {
  const int64_t n = a.size(1), rows = a.size(0) / n;
  return with_type(a, 0, [&](auto type) {
    using T = decltype(type);
    norm_grad<T>(a.ptr<T>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<T>(4), a.ptr<T>(3), a.ptr<T>(5),
                 a.ptr<float>(6), rows, n);
  });
}

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(FusedRmsNorm)
MLK_EXPORT_WITH_INIT(FusedAddRmsNorm)
MLK_EXPORT(FusedRmsNormGrad)
MLK_EXPORT(FusedAddRmsNormGrad)
