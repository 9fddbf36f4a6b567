// SPDX-License-Identifier: Apache-2.0
// Vectors of the widest register this translation unit is compiled for, and the choice between the compiled variants.
//
// build.py compiles every csrc/*.cc once per instruction set with -DMLK_ISA=<baseline|avx2|avx512>. A source puts its
// code into `namespace MLK_ISA { ... }` and ends with MLK_EXPORT(Name), outside of any namespace, for every operator:
//
//   namespace MLK_ISA {
//   int Name(const AotArgs& args) { ... return 0; }    // anything but 0 becomes a MindSpore exception
//   int NameInit(AotExtra* extra) { ... return 0; }    // reads the attributes; needed by MLK_EXPORT_WITH_INIT only
//   }
//   MLK_EXPORT(Name)
//
// which makes extern "C" symbols that ops.Custom("libms_longctx_kernels.so:Name", func_type="aot") finds. The
// baseline uses GCC's vector extensions only, so it serves every architecture (16-byte registers: SSE2, NEON).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "aot.h"

#define MLK_INLINE static inline __attribute__((always_inline, unused))

struct half {  // IEEE binary16, storage only
  uint16_t bits;
};

namespace MLK_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a vector
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float vfloat __attribute__((vector_size(kWidth * 4)));
typedef int32_t vint __attribute__((vector_size(kWidth * 4)));
typedef float vfloat_unaligned __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef int32_t vint_unaligned __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

MLK_INLINE vfloat splat(float x) { return x - vfloat{}; }
MLK_INLINE vint splat_int(int32_t x) { return x - vint{}; }
MLK_INLINE vfloat load(const float* p) { return *reinterpret_cast<const vfloat_unaligned*>(p); }
MLK_INLINE vint load_int(const int32_t* p) { return *reinterpret_cast<const vint_unaligned*>(p); }
MLK_INLINE void store(float* p, vfloat v) { *reinterpret_cast<vfloat_unaligned*>(p) = v; }

MLK_INLINE float to_float(float x) { return x; }
MLK_INLINE void from_float(float* p, float x) { *p = x; }

#if defined(__AVX512F__)
MLK_INLINE vfloat vmax(vfloat a, vfloat b) { return (vfloat)_mm512_max_ps((__m512)a, (__m512)b); }
MLK_INLINE vfloat vmin(vfloat a, vfloat b) { return (vfloat)_mm512_min_ps((__m512)a, (__m512)b); }
MLK_INLINE float hsum(vfloat v) { return _mm512_reduce_add_ps((__m512)v); }
MLK_INLINE float hmax(vfloat v) { return _mm512_reduce_max_ps((__m512)v); }
#elif defined(__AVX2__)
MLK_INLINE vfloat vmax(vfloat a, vfloat b) { return (vfloat)_mm256_max_ps((__m256)a, (__m256)b); }
MLK_INLINE vfloat vmin(vfloat a, vfloat b) { return (vfloat)_mm256_min_ps((__m256)a, (__m256)b); }
MLK_INLINE float hsum(vfloat v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
MLK_INLINE float hmax(vfloat v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}
#else
MLK_INLINE vfloat vmax(vfloat a, vfloat b) { return a > b ? a : b; }
MLK_INLINE vfloat vmin(vfloat a, vfloat b) { return a < b ? a : b; }
MLK_INLINE float hsum(vfloat v) { return (v[0] + v[2]) + (v[1] + v[3]); }
MLK_INLINE float hmax(vfloat v) { return fmaxf(fmaxf(v[0], v[2]), fmaxf(v[1], v[3])); }
#endif

// binary16 <-> binary32; hardware conversion where the instruction set has it.
#if defined(__F16C__)
MLK_INLINE float to_float(half x) { return _cvtsh_ss(x.bits); }
MLK_INLINE void from_float(half* p, float x) { p->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
MLK_INLINE float to_float(half x) {
  __fp16 h;
  std::memcpy(&h, &x, sizeof h);
  return static_cast<float>(h);
}
MLK_INLINE void from_float(half* p, float x) {
  __fp16 h = static_cast<__fp16>(x);
  std::memcpy(p, &h, sizeof h);
}
#else
MLK_INLINE float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}
MLK_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  return u;
}
MLK_INLINE float to_float(half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // inf, nan
  // 2^112 moves the exponent bias from 15 to 127 and normalises subnormals.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}
MLK_INLINE void from_float(half* p, float x) {
  const uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  uint32_t out;
  if (rest > 0x7f800000u) {
    out = 0x7e00u;  // nan
  } else if (rest >= 0x477ff000u) {
    out = 0x7c00u;  // rounds to infinity
  } else if (rest < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded value in the low bits
    out = float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000u;
  } else {
    out = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;  // to nearest, ties to even
  }
  p->bits = static_cast<uint16_t>(sign | out);
}
#endif

#if defined(__AVX512F__)
MLK_INLINE vfloat load(const half* p) {
  return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MLK_INLINE void store(half* p, vfloat v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
MLK_INLINE vfloat load(const half* p) {
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MLK_INLINE void store(half* p, vfloat v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#else
MLK_INLINE vfloat load(const half* p) {
  vfloat v;
  for (int i = 0; i < kWidth; i++) v[i] = to_float(p[i]);
  return v;
}
MLK_INLINE void store(half* p, vfloat v) {
  for (int i = 0; i < kWidth; i++) from_float(p + i, v[i]);
}
#endif

// The first n (0 <= n <= kWidth) elements; missing lanes are 0.
template <typename T>
MLK_INLINE vfloat load_first(const T* p, int n) {
  if (n >= kWidth) return load(p);
  float lanes[kWidth] = {};
  for (int i = 0; i < n; i++) lanes[i] = to_float(p[i]);
  return load(lanes);
}
template <typename T>
MLK_INLINE void store_first(T* p, vfloat v, int n) {
  if (n >= kWidth) return store(p, v);
  for (int i = 0; i < n; i++) from_float(p + i, v[i]);
}

// e^x with a relative error below 2e-7; results under 2^-126 become 0, exp(-inf) = 0, large x gives inf.
// Range reduction by ln 2 in two parts (Cody and Waite), then the polynomial of the Cephes library.
MLK_INLINE vfloat vexp(vfloat x) {
  const vfloat kRound = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vfloat clamped = vmin(vmax(x, splat(-88.f)), splat(88.8f));
  const vfloat shifted = clamped * splat(1.44269504f) + kRound;
  const vfloat n = shifted - kRound;
  vfloat r = clamped - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  vfloat p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + (r + splat(1.f));
  // Two factors, because 2^128 (needed for x near 88.7) is no float.
  const vint e = (vint)shifted - splat_int(0x4b400000), low = e >> 1, high = e - low;
  const vfloat value = p * (vfloat)((low + 127) << 23) * (vfloat)((high + 127) << 23);
  return (vfloat)((vint)value & (x > splat(-87.33654f)));
}

}  // namespace MLK_ISA

// ---- choice of the variant at run time ----

enum MlkLevel { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };
MlkLevel mlk_level();  // dispatch.cc: best level of this CPU, at most MS_LONGCTX_ISA where that is set

#define MLK_CONCAT_(a, b) a##_##b
#define MLK_CONCAT(a, b) MLK_CONCAT_(a, b)
#define MLK_LAUNCH_PARAMS \
  int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, void *, void *extra

#if defined(MLK_IS_BASELINE)
#if defined(__x86_64__)
#define MLK_DISPATCH(Name)                                                             \
  int Name##_avx2(const AotArgs&);                                                     \
  int Name##_avx512(const AotArgs&);                                                   \
  static int Name##_dispatch(const AotArgs& args) {                                    \
    switch (mlk_level()) {                                                             \
      case kAvx512: return Name##_avx512(args);                                        \
      case kAvx2: return Name##_avx2(args);                                            \
      default: return Name##_baseline(args);                                           \
    }                                                                                  \
  }
#else
#define MLK_DISPATCH(Name) \
  static int Name##_dispatch(const AotArgs& args) { return Name##_baseline(args); }
#endif
#define MLK_EXPORT(Name)                                                                             \
  static int Name##_baseline(const AotArgs& args) { return MLK_ISA::Name(args); }                    \
  MLK_DISPATCH(Name)                                                                                 \
  extern "C" __attribute__((visibility("default"))) int Name(MLK_LAUNCH_PARAMS) {                    \
    return Name##_dispatch(                                                                          \
        AotArgs{count, data, ndims, shapes, dtypes, static_cast<AotExtra*>(extra)});                 \
  }
#define MLK_EXPORT_WITH_INIT(Name)                                                                   \
  MLK_EXPORT(Name)                                                                                   \
  extern "C" __attribute__((visibility("default"))) int Name##Init(int*, int64_t**, const char**,    \
                                                                   AotExtra* extra) {                \
    return MLK_ISA::Name##Init(extra);                                                               \
  }
#else
#define MLK_EXPORT(Name) \
  int MLK_CONCAT(Name, MLK_ISA)(const AotArgs& args) { return MLK_ISA::Name(args); }
#define MLK_EXPORT_WITH_INIT(Name) MLK_EXPORT(Name)
#endif
