// SPDX-License-Identifier: Apache-2.0
// What travels through a channel: a label, then the bytes of the tensor, padded to a multiple of kAlign.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace comm {

constexpr size_t kAlign = 128;
constexpr int kLabelDims = 8;

// The numbers are those of ms_longctx/kernels/comm.py:Kind.
enum Kind : uint16_t { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kRingShift, kBroadcast, kReduce };

enum Type : uint16_t { kFloat32, kFloat16, kBFloat16, kInt32, kInt64, kOtherType };

// Which collective a message belongs to. Sender and receiver build theirs alone; they must agree in every bit.
struct Label {
  uint64_t members;    // bit mask of global ranks
  uint64_t sequence;   // number of the message in its channel
  uint32_t number;     // of the operator among those of its group
  int32_t first;       // axis, offset or root
  int32_t second;      // second axis
  Kind kind;
  Type type;
  uint16_t item;       // bytes of an element
  uint16_t ndim;
  uint32_t unused;
  int64_t dims[kLabelDims];  // of the input; what is beyond is multiplied into the last
};
static_assert(sizeof(Label) <= kAlign, "a label fits into one unit of a channel");

// "all_gather 3 (axis 1) of float32 (2, 5) over ranks 0, 1"
std::string describe(const Label& label);

// Size and name of an element type as MindSpore writes it ("float32"); false: unknown.
bool parse_type(const char* name, Type* type, uint16_t* item);

// Memory of a message: `count` runs of `run` bytes, `stride` bytes apart.
struct View {
  char* base;
  size_t run, stride, count;

  static View whole(void* data, size_t bytes) { return {static_cast<char*>(data), bytes, bytes, 1}; }
  size_t bytes() const { return run * count; }
};

// Copies n bytes, from byte `offset` of the view on, to or from contiguous memory.
void copy_from(const View& view, size_t offset, char* to, size_t n);
void copy_to(const View& view, size_t offset, const char* from, size_t n);
void copy_view(const View& from, const View& to, size_t offset, size_t n);  // between two of the same size

}  // namespace comm
