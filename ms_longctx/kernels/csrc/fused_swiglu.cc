// SPDX-License-Identifier: Apache-2.0
// SwiGLU (arXiv 2002.05202): silu(gate) * up, and its gradient.
#include <algorithm>

#include "simd.h"

namespace MLK_ISA {
namespace {

constexpr int64_t kGrain = 4096;  // elements a thread takes at a time

MLK_INLINE vfloat sigmoid(vfloat x) { return splat(1.f) / (splat(1.f) + vexp(-x)); }

// Calls body(start, lanes) for every vector of n elements, on all threads.
template <typename Body>
void for_vectors(int64_t n, Body body) {
  const int64_t grains = (n + kGrain - 1) / kGrain;
#pragma omp parallel for schedule(static)
  for (int64_t g = 0; g < grains; g++) {
    const int64_t end = std::min(n, (g + 1) * kGrain);
    for (int64_t i = g * kGrain; i < end; i += kWidth) {
      body(i, static_cast<int>(std::min<int64_t>(kWidth, end - i)));
    }
  }
}

template <typename T>
void forward(const T* gate, const T* up, T* out, int64_t n) {
  for_vectors(n, [=](int64_t i, int lanes) {
    const vfloat g = load_first(gate + i, lanes);
    store_first(out + i, g * sigmoid(g) * load_first(up + i, lanes), lanes);
  });
}

// d silu(g) / dg = s * (1 + g * (1 - s)) with s = sigmoid(g)
template <typename T>
void backward(const T* gate, const T* up, const T* dout, T* dgate, T* dup, int64_t n) {
  for_vectors(n, [=](int64_t i, int lanes) {
    const vfloat g = load_first(gate + i, lanes), d = load_first(dout + i, lanes), s = sigmoid(g);
    store_first(dgate + i, d * load_first(up + i, lanes) * s * (splat(1.f) + g * (splat(1.f) - s)), lanes);
    store_first(dup + i, d * g * s, lanes);
  });
}

}  // namespace

// gate, up -> silu(gate) * up; all alike
int FusedSwiGlu(const AotArgs& a) {
  if (a.is(0, "float32")) {
    forward(a.ptr<float>(0), a.ptr<float>(1), a.ptr<float>(2), a.size(0));
  } else {
    forward(a.ptr<half>(0), a.ptr<half>(1), a.ptr<half>(2), a.size(0));
  }
  return 0;
}

// gate, up, dout -> dgate, dup
int FusedSwiGluGrad(const AotArgs& a) {
  if (a.is(0, "float32")) {
    backward(a.ptr<float>(0), a.ptr<float>(1), a.ptr<float>(2), a.ptr<float>(3), a.ptr<float>(4), a.size(0));
  } else {
    backward(a.ptr<half>(0), a.ptr<half>(1), a.ptr<half>(2), a.ptr<half>(3), a.ptr<half>(4), a.size(0));
  }
  return 0;
}

}  // namespace MLK_ISA

MLK_EXPORT(FusedSwiGlu)
MLK_EXPORT(FusedSwiGluGrad)
