// SPDX-License-Identifier: Apache-2.0
// Which of the compiled variants this CPU runs.
#include "simd.h"

#if defined(MLK_IS_BASELINE)

#if defined(__x86_64__)
static MlkLevel detect() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    return kAvx512;
  }
  // F16C has no name in GCC 12's __builtin_cpu_supports; every CPU with AVX2 has it.
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kAvx2 : kBaseline;
}
#else
static MlkLevel detect() { return kBaseline; }
#endif

static MlkLevel wanted() {
  const char* name = std::getenv("MS_LONGCTX_ISA");
  if (name == nullptr) return kAvx512;
  if (std::strcmp(name, "baseline") == 0) return kBaseline;
  return std::strcmp(name, "avx2") == 0 ? kAvx2 : kAvx512;
}

MlkLevel mlk_level() {
  static const MlkLevel level = detect() < wanted() ? detect() : wanted();
  return level;
}

extern "C" __attribute__((visibility("default"))) const char* ms_longctx_isa() {
  static const char* const kNames[] = {"baseline", "avx2", "avx512"};
  return kNames[mlk_level()];
}

// What the library was built from (ms_longctx/kernels/__init__.py:source_hash), given by build.py.
extern "C" __attribute__((visibility("default"))) const char* ms_longctx_sources() { return MLK_SOURCES; }

#endif
