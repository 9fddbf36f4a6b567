// SPDX-License-Identifier: Apache-2.0
// Matrix products of linear layers on the OpenMP threads that the other kernels use. MindSpore's MatMul has threads of
// its own, and the two pools, each waiting actively for its next work, would take the cores from each other.
#include "fused_common.h"
#include "fused_gemm.h"

namespace MLK_ISA {
namespace {

constexpr int64_t kTile = 256;   // rows or columns of the result a thread takes at a time
constexpr int64_t kDepth = 192;  // products summed in one accumulator: partial sums halve the rounding error

struct MatmulAttributes {
  bool transpose_a, transpose_b;
};

}  // namespace

// a, b fp32 matrices, each transposed or not -> their product. The sum of one element is never split, so the result
// does not depend on the number of threads.
int FusedMatmul(const AotArgs& args) {
  const SgemmFunction gemm = mlk_sgemm();
  if (gemm == nullptr) return kNoGemm;
  if (!args.is(0, "float32") || !args.is(1, "float32")) return kUnsupportedType;
  const auto [transpose_a, transpose_b] = attributes<MatmulAttributes>(args);
  const char ta = transpose_a ? 'T' : 'N', tb = transpose_b ? 'T' : 'N';
  const int64_t m = args.dim(2, 0), n = args.dim(2, 1), k = args.dim(0, transpose_a ? 0 : 1);
  const int64_t lda = args.dim(0, 1), ldb = args.dim(1, 1);
  const float *a = args.ptr<float>(0), *b = args.ptr<float>(1);
  float* c = args.ptr<float>(2);
  const int64_t a_row = transpose_a ? 1 : lda, a_deep = transpose_a ? lda : 1;
  const int64_t b_column = transpose_b ? ldb : 1, b_deep = transpose_b ? 1 : ldb;
  const bool by_rows = m >= n;
  const int64_t tiles = ((by_rows ? m : n) + kTile - 1) / kTile;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t i = by_rows ? tile * kTile : 0, rows = by_rows ? std::min(kTile, m - i) : m;
    const int64_t j = by_rows ? 0 : tile * kTile, columns = by_rows ? n : std::min(kTile, n - j);
    for (int64_t l = 0; l < k; l += kDepth) {
      gemm(ta, tb, rows, columns, std::min(kDepth, k - l), 1.f, a + i * a_row + l * a_deep, lda,
           b + j * b_column + l * b_deep, ldb, l == 0 ? 0.f : 1.f, c + i * n + j, n);
    }
  }
  return 0;
}
int FusedMatmulInit(AotExtra* extra) {
  return keep_attributes(extra,
                         MatmulAttributes{extra->GetAttrBool("transpose_a"), extra->GetAttrBool("transpose_b")});
}

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(FusedMatmul)
