// SPDX-License-Identifier: Apache-2.0
// RMSNorm (arXiv 1910.07467, equation 4), alone and with the residual addition before it, and its gradient.
#include <algorithm>
#include <vector>

#include "simd.h"

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
  for (int64_t i = 0; i < n; i += kWidth) {
    const vfloat v = load_first(x + i, static_cast<int>(std::min<int64_t>(kWidth, n - i)));
    sum += v * v;
  }
  const float rstd = 1.f / sqrtf(hsum(sum) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int left = static_cast<int>(std::min<int64_t>(kWidth, n - i));
    store_first(y + i, load_first(x + i, left) * load_first(weight + i, left) * splat(rstd), left);
  }
  return rstd;
}

template <typename T>
void add_row(const T* a, const T* b, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const int left = static_cast<int>(std::min<int64_t>(kWidth, n - i));
    store_first(out + i, load_first(a + i, left) + load_first(b + i, left), left);
  }
}

// With g = dy * weight: dx = rstd * (g - x * rstd^2 * mean(g * x)) [+ carried]; dweight += dy * x * rstd
template <typename T>
void norm_grad_row(const T* x, const float* weight, float rstd, const T* dy, const T* carried, T* dx,
                   float* dweight, int64_t n) {
  vfloat dot = splat(0.f);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int left = static_cast<int>(std::min<int64_t>(kWidth, n - i));
    dot += load_first(dy + i, left) * load_first(weight + i, left) * load_first(x + i, left);
  }
  const vfloat r = splat(rstd), factor = splat(hsum(dot) / static_cast<float>(n) * rstd * rstd);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int left = static_cast<int>(std::min<int64_t>(kWidth, n - i));
    const vfloat vx = load_first(x + i, left), vdy = load_first(dy + i, left);
    vfloat v = r * (vdy * load_first(weight + i, left) - vx * factor);
    if (carried != nullptr) v += load_first(carried + i, left);
    store_first(dx + i, v, left);
    store_first(dweight + i, load_first(dweight + i, left) + vdy * vx * r, left);
  }
}

template <typename T>
void norm(const T* x, const float* weight, T* y, float* rstd, int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) rstd[r] = norm_row(x + r * n, weight, y + r * n, n, eps);
}

template <typename T>
void add_norm(const T* x, const T* delta, const float* weight, T* sum, T* y, float* rstd, int64_t rows,
              int64_t n, float eps) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    add_row(x + r * n, delta + r * n, sum + r * n, n);
    rstd[r] = norm_row(sum + r * n, weight, y + r * n, n, eps);
  }
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

// x (..., n), weight (n,) fp32 -> y like x, rstd (rows,) fp32
int FusedRmsNorm(const AotArgs& a) {
  const int64_t n = a.size(1), rows = a.size(0) / n;
  const float eps = attributes<NormAttributes>(a).eps;
  if (a.is(0, "float32")) {
    norm(a.ptr<float>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<float>(3), rows, n, eps);
  } else {
    norm(a.ptr<half>(0), a.ptr<float>(1), a.ptr<half>(2), a.ptr<float>(3), rows, n, eps);
  }
  return 0;
}
int FusedRmsNormInit(AotExtra* extra) { return read_eps(extra); }

// x, delta (..., n), weight (n,) fp32 -> x + delta, its norm, rstd (rows,) fp32
int FusedAddRmsNorm(const AotArgs& a) {
  const int64_t n = a.size(2), rows = a.size(0) / n;
  const float eps = attributes<NormAttributes>(a).eps;
  if (a.is(0, "float32")) {
    add_norm(a.ptr<float>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<float>(3), a.ptr<float>(4),
             a.ptr<float>(5), rows, n, eps);
  } else {
    add_norm(a.ptr<half>(0), a.ptr<half>(1), a.ptr<float>(2), a.ptr<half>(3), a.ptr<half>(4), a.ptr<float>(5),
             rows, n, eps);
  }
  return 0;
}
int FusedAddRmsNormInit(AotExtra* extra) { return read_eps(extra); }

// x, weight, rstd, dy -> dx, dweight fp32
int FusedRmsNormGrad(const AotArgs& a) {
  const int64_t n = a.size(1), rows = a.size(0) / n;
  if (a.is(0, "float32")) {
    norm_grad<float>(a.ptr<float>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<float>(3), nullptr,
                     a.ptr<float>(4), a.ptr<float>(5), rows, n);
  } else {
    norm_grad<half>(a.ptr<half>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<half>(3), nullptr, a.ptr<half>(4),
                    a.ptr<float>(5), rows, n);
  }
  return 0;
}

// sum, weight, rstd, dsum, dy -> gradient of x and delta alike, dweight fp32
int FusedAddRmsNormGrad(const AotArgs& a) {
  const int64_t n = a.size(1), rows = a.size(0) / n;
  if (a.is(0, "float32")) {
    norm_grad(a.ptr<float>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<float>(4), a.ptr<float>(3),
              a.ptr<float>(5), a.ptr<float>(6), rows, n);
  } else {
    norm_grad(a.ptr<half>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<half>(4), a.ptr<half>(3), a.ptr<half>(5),
              a.ptr<float>(6), rows, n);
  }
  return 0;
}

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(FusedRmsNorm)
MLK_EXPORT_WITH_INIT(FusedAddRmsNorm)
MLK_EXPORT(FusedRmsNormGrad)
MLK_EXPORT(FusedAddRmsNormGrad)
