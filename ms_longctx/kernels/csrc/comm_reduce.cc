// SPDX-License-Identifier: Apache-2.0
// Sums of several arrays, element by element.
#include "comm_reduce.h"

#include "simd.h"

namespace MLK_ISA {
namespace {

struct bfloat16 {
  uint16_t bits;
};

MLK_INLINE float widen(bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
MLK_INLINE bfloat16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t nearest = bits + 0x7fffu + (bits >> 16 & 1u);  // ties to even
  return {static_cast<uint16_t>((x == x ? nearest : bits | 0x400000u) >> 16)};
}

template <typename T>
void add_floats(const void* const* sources, int count, void* out, size_t elements) {
  const auto at = [&](int s, size_t i) { return static_cast<const T*>(sources[s]) + i; };
  T* result = static_cast<T*>(out);
  size_t i = 0;
  for (; i + kWidth <= elements; i += kWidth) {
    vfloat sum = load(at(0, i));
    for (int s = 1; s < count; s++) sum += load(at(s, i));
    store(result + i, sum);
  }
  const int rest = static_cast<int>(elements - i);
  vfloat sum = load_first(at(0, i), rest);
  for (int s = 1; s < count; s++) sum += load_first(at(s, i), rest);
  store_first(result + i, sum, rest);
}

void add_bfloats(const void* const* sources, int count, void* out, size_t elements) {
  constexpr size_t kBlock = 512;
  float sum[kBlock];
  for (size_t i = 0; i < elements; i += kBlock) {
    const size_t n = elements - i < kBlock ? elements - i : kBlock;
    const bfloat16* first = static_cast<const bfloat16*>(sources[0]) + i;
    for (size_t j = 0; j < n; j++) sum[j] = widen(first[j]);
    for (int s = 1; s < count; s++) {
      const bfloat16* next = static_cast<const bfloat16*>(sources[s]) + i;
      for (size_t j = 0; j < n; j++) sum[j] += widen(next[j]);
    }
    bfloat16* result = static_cast<bfloat16*>(out) + i;
    for (size_t j = 0; j < n; j++) result[j] = narrow(sum[j]);
  }
}

template <typename Unsigned>  // wraps around, as numpy does
void add_integers(const void* const* sources, int count, void* out, size_t elements) {
  Unsigned* result = static_cast<Unsigned*>(out);
  std::memcpy(result, sources[0], elements * sizeof(Unsigned));
  for (int s = 1; s < count; s++) {
    const Unsigned* next = static_cast<const Unsigned*>(sources[s]);
    for (size_t i = 0; i < elements; i++) result[i] += next[i];
  }
}

void add(comm::Type type, const void* const* sources, int count, void* out, size_t elements) {
  switch (type) {
    case comm::kFloat32: return add_floats<float>(sources, count, out, elements);
    case comm::kFloat16: return add_floats<half>(sources, count, out, elements);
    case comm::kBFloat16: return add_bfloats(sources, count, out, elements);
    case comm::kInt32: return add_integers<uint32_t>(sources, count, out, elements);
    default: return add_integers<uint64_t>(sources, count, out, elements);
  }
}

}  // namespace
}  // namespace MLK_ISA

namespace comm {

#define COMM_ADD_PARAMS Type type, const void *const *sources, int count, void *out, size_t elements

#if defined(MLK_IS_BASELINE)
#if defined(__x86_64__)
void add_avx2(COMM_ADD_PARAMS);
void add_avx512(COMM_ADD_PARAMS);
#endif
void add(COMM_ADD_PARAMS) {
#if defined(__x86_64__)
  if (mlk_level() == kAvx512) return add_avx512(type, sources, count, out, elements);
  if (mlk_level() == kAvx2) return add_avx2(type, sources, count, out, elements);
#endif
  MLK_ISA::add(type, sources, count, out, elements);
}
#else
void MLK_CONCAT(add, MLK_ISA)(COMM_ADD_PARAMS) { MLK_ISA::add(type, sources, count, out, elements); }
#endif

}  // namespace comm
