// SPDX-License-Identifier: Apache-2.0
// Linear layer for few rows (decoding).
#include <vector>

#include "fused_skinny.h"

namespace MLK_ISA {
namespace {

constexpr int64_t kColumns = 64;  // columns of the result a thread takes at a time
constexpr int64_t kParallelFrom = 1 << 15;  // weights; below, waking the other threads costs more than they save

template <typename T, typename W>
void linear(const AotArgs& a) {
  const int64_t n = a.dim(1, 0), k = a.dim(1, 1), m = a.size(0) / k;
  std::vector<float> x(m * k), y(m * n);
  for_vectors(m * k, [&](int64_t i, int lanes) { store_first(&x[i], load_first(a.ptr<T>(0) + i, lanes), lanes); });
#pragma omp parallel for schedule(static) if (n * k >= kParallelFrom)
  for (int64_t begin = 0; begin < n; begin += kColumns) {
    skinny_product(x.data(), a.ptr<W>(1), y.data(), n, m, k, begin, std::min(n, begin + kColumns));
  }
  for_vectors(m * n, [&](int64_t i, int lanes) { store_first(a.ptr<T>(2) + i, load_first(&y[i], lanes), lanes); });
}

}  // namespace

// x (m, k), weight (n, k) -> x weight^T (m, n) of the type of x
int FusedSkinnyLinear(const AotArgs& a) {
  int status = 0;
  const int outer = with_type(a, 0, [&](auto x_type) {
    status = with_type(a, 1, [&](auto w_type) { linear<decltype(x_type), decltype(w_type)>(a); });
  });
  return outer != 0 ? outer : status;
}

}  // namespace MLK_ISA

MLK_EXPORT(FusedSkinnyLinear)
