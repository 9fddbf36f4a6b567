// SPDX-License-Identifier: Apache-2.0
// Writes new keys and values into their cache, in place.
#include "fused_common.h"

namespace MLK_ISA {
namespace {

constexpr int kOutOfCache = 34;

// Rows of `chunk` (B, C, H, D) to positions start.. of `cache` (B, L, H, D).
void write(const AotArgs& a, int cache, int chunk, int64_t start, int64_t element_size) {
  const int64_t batch = a.dim(chunk, 0), count = a.dim(chunk, 1), length = a.dim(cache, 1);
  const int64_t row = a.dim(chunk, 2) * a.dim(chunk, 3) * element_size;
  for (int64_t b = 0; b < batch; b++) {
    std::memcpy(a.ptr<char>(cache) + (b * length + start) * row, a.ptr<char>(chunk) + b * count * row, count * row);
  }
}

}  // namespace

// key cache, value cache (B, L, H, D), keys, values (B, C, H, D), all fp32 or all fp16, start int32
// -> int32 (2,): start, start + C
int FusedCacheAppend(const AotArgs& a) {
  const int64_t start = *a.ptr<int32_t>(4), end = start + a.dim(2, 1);
  if (start < 0 || end > a.dim(0, 1)) return kOutOfCache;
  for (int i = 1; i < 4; i++) {
    if (!a.is(i, a.dtypes[0])) return kUnsupportedType;
  }
  const int64_t element_size = a.is(0, "float32") ? 4 : 2;
  write(a, 0, 2, start, element_size);
  write(a, 1, 3, start, element_size);
  a.ptr<int32_t>(5)[0] = static_cast<int32_t>(start);
  a.ptr<int32_t>(5)[1] = static_cast<int32_t>(end);
  return 0;
}

}  // namespace MLK_ISA

MLK_EXPORT(FusedCacheAppend)
