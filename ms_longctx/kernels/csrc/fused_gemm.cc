// SPDX-License-Identifier: Apache-2.0
// Finds oneDNN's sgemm.
#include "simd.h"

#include "fused_gemm.h"

#if defined(MLK_IS_BASELINE)

#include <dlfcn.h>

static SgemmFunction find() {
  void* library = dlopen("libdnnl.so.3", RTLD_NOW | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<SgemmFunction>(dlsym(library, "dnnl_sgemm"));
}

SgemmFunction mlk_sgemm() {
  static const SgemmFunction function = find();
  return function;
}

// For Python, once MindSpore is imported: whether the kernels that need matrix products can be used.
extern "C" __attribute__((visibility("default"))) int ms_longctx_has_gemm() { return mlk_sgemm() != nullptr; }

#endif
