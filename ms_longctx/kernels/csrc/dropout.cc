// SPDX-License-Identifier: Apache-2.0
// Dropout whose mask is a hash of key, salt and position: the arithmetic of ms_longctx/tuning/dropout.py.
#include <vector>

#include "fused_common.h"

namespace MLK_ISA {
namespace {

typedef uint32_t vuint __attribute__((vector_size(kWidth * 4)));  // products wrap around

struct DropoutAttributes {
  uint32_t salt;
  int32_t limit;  // elements whose hash, as int32, is below are kept
  float factor;   // and multiplied with this
};

uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  return (x ^ (x >> 13)) * 0xC2B2AE35u;
}

std::vector<uint32_t> hash_columns(int64_t columns, uint32_t key) {
  std::vector<uint32_t> hashes(columns + kWidth);  // whole vectors may be read at the end
  for (int64_t c = 0; c < columns; c++) hashes[c] = mix(static_cast<uint32_t>(c) * 0x27D4EB2Fu - key);
  return hashes;
}

MLK_INLINE vint keep_mask(uint32_t row, const uint32_t* columns, int32_t limit) {
  vuint bits;
  std::memcpy(&bits, columns, sizeof bits);
  bits = (bits ^ row) * 0x7FEB352Du;
  bits = (bits ^ (vuint)((vint)bits >> 15)) * 0x2C1B3C6Du;
  return (vint)bits < limit;
}

template <typename T>
void dropout(const T* x, T* y, int64_t rows, int64_t columns, uint32_t key, const DropoutAttributes& at) {
  const std::vector<uint32_t> hashes = hash_columns(columns, key);
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    const uint32_t row = mix(static_cast<uint32_t>(r) * 0x9E3779B1u + key);
    const T* from = x + r * columns;
    T* to = y + r * columns;
    for_vectors(columns, [&](int64_t c, int lanes) {
      const vint kept = keep_mask(row, hashes.data() + c, at.limit);
      store_first(to + c, (vfloat)((vint)(load_first(from + c, lanes) * splat(at.factor)) & kept), lanes);
    });
  }
}

}  // namespace

// x (..., columns) fp32 or fp16, key int32 -> x with elements set to 0 and the others scaled
int KeyedDropout(const AotArgs& a) {
  const auto& at = attributes<DropoutAttributes>(a);
  const uint32_t key = mix(*a.ptr<uint32_t>(1) + at.salt);
  const int64_t columns = a.dim(0, a.ndims[0] - 1), rows = columns ? a.size(0) / columns : 0;
  return with_type(a, 0, [&](auto type) {
    using T = decltype(type);
    dropout(a.ptr<T>(0), a.ptr<T>(2), rows, columns, key, at);
  });
}
int KeyedDropoutInit(AotExtra* e) {
  return keep_attributes(e, DropoutAttributes{static_cast<uint32_t>(e->GetAttrInt("salt")),
                                              static_cast<int32_t>(e->GetAttrInt("limit")),
                                              e->GetAttrFloat("factor")});
}

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(KeyedDropout)
