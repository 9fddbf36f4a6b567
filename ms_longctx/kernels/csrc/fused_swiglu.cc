// SPDX-License-Identifier: Apache-2.0
// SwiGLU (arXiv 2002.05202): silu(gate) * up, and its gradient.
#include "fused_common.h"

namespace MLK_ISA {
namespace {

constexpr int64_t kGrain = 4096;  // elements a thread takes at a time

MLK_INLINE vfloat sigmoid(vfloat x) { return splat(1.f) / (splat(1.f) + vexp(-x)); }

// for_vectors on all threads
template <typename Body>
void parallel_for_vectors(int64_t n, Body body) {
#pragma omp parallel for schedule(static)
  for (int64_t start = 0; start < n; start += kGrain) {
    for_vectors(std::min(kGrain, n - start), [&](int64_t i, int lanes) { body(start + i, lanes); });
  }
}

template <typename T>
void forward(const T* gate, const T* up, T* out, int64_t n) {
  parallel_for_vectors(n, [=](int64_t i, int lanes) {
    const vfloat g = load_first(gate + i, lanes);
    store_first(out + i, g * sigmoid(g) * load_first(up + i, lanes), lanes);
  });
}

// d silu(g) / dg = s * (1 + g * (1 - s)) with s = sigmoid(g)
template <typename T>
void backward(const T* gate, const T* up, const T* dout, T* dgate, T* dup, int64_t n) {
  parallel_for_vectors(n, [=](int64_t i, int lanes) {
    const vfloat g = load_first(gate + i, lanes), d = load_first(dout + i, lanes), s = sigmoid(g);
    store_first(dgate + i, d * load_first(up + i, lanes) * s * (splat(1.f) + g * (splat(1.f) - s)), lanes);
    store_first(dup + i, d * g * s, lanes);
  });
}

}  // namespace

// gate, up -> silu(gate) * up; all alike
int FusedSwiGlu(const AotArgs& a) {
  return with_type(a, 0, [&](auto type) {
    using T = decltype(type);
    forward(a.ptr<T>(0), a.ptr<T>(1), a.ptr<T>(2), a.size(0));
  });
}

// gate, up, dout -> dgate, dup
int FusedSwiGluGrad(const AotArgs& a) {
  return with_type(a, 0, [&](auto type) {
    using T = decltype(type);
    backward(a.ptr<T>(0), a.ptr<T>(1), a.ptr<T>(2), a.ptr<T>(3), a.ptr<T>(4), a.size(0));
  });
}

}  // namespace MLK_ISA

MLK_EXPORT(FusedSwiGlu)
MLK_EXPORT(FusedSwiGluGrad)
