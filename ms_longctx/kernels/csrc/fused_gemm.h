// SPDX-License-Identifier: Apache-2.0
// Single-threaded fp32 matrix products from the oneDNN library that MindSpore carries and has already loaded.
// It chooses its own instruction set and runs in the calling thread, so the kernels split the work themselves.
#pragma once

#include <cstdint>

// Row-major C (m, n) = op(A) op(B) + beta * C; 'T' transposes, lda/ldb/ldc are the row lengths in memory.
using SgemmFunction = int (*)(char transa, char transb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                              int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc);

SgemmFunction mlk_sgemm();  // fused_gemm.cc: null where there is no such library

constexpr int kNoGemm = 32;  // result of an operator that needs it
