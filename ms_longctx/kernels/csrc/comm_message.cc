// SPDX-License-Identifier: Apache-2.0
#ifdef MLK_IS_BASELINE  // moves bytes: one variant serves every CPU

#include "comm_message.h"

#include <algorithm>
#include <cstring>

namespace comm {
namespace {

struct TypeName {
  const char* name;
  Type type;
  uint16_t item;
};

constexpr TypeName kTypes[] = {
    {"float32", kFloat32, 4},     {"float16", kFloat16, 2},   {"bfloat16", kBFloat16, 2}, {"int32", kInt32, 4},
    {"int64", kInt64, 8},         {"bool", kOtherType, 1},    {"uint8", kOtherType, 1},   {"int8", kOtherType, 1},
    {"int16", kOtherType, 2},     {"uint16", kOtherType, 2},  {"uint32", kOtherType, 4},  {"uint64", kOtherType, 8},
    {"float64", kOtherType, 8},   {"complex64", kOtherType, 8},
};

std::string type_name(const Label& label) {
  if (label.type != kOtherType) return kTypes[label.type].name;
  return "elements of " + std::to_string(label.item) + " bytes";
}

std::string numbers(const std::vector<int64_t>& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return text;
}

std::string arguments(const Label& label) {
  switch (label.kind) {
    case kAllGather:
    case kReduceScatter: return " (axis " + std::to_string(label.first) + ")";
    case kAllToAll: return " (axes " + std::to_string(label.first) + " and " + std::to_string(label.second) + ")";
    case kRingShift: return " (offset " + std::to_string(label.first) + ")";
    case kBroadcast:
    case kReduce: return " (root " + std::to_string(label.first) + ")";
    default: return "";
  }
}

// Calls move(address in the view, bytes already moved, bytes) for every run that the range touches.
template <typename Move>
void for_runs(const View& view, size_t offset, size_t n, Move move) {
  size_t index = offset / view.run, inside = offset % view.run;
  for (size_t done = 0; done < n; index++, inside = 0) {
    const size_t part = std::min(n - done, view.run - inside);
    move(view.base + index * view.stride + inside, done, part);
    done += part;
  }
}

}  // namespace

bool parse_type(const char* name, Type* type, uint16_t* item) {
  for (const TypeName& known : kTypes) {
    if (std::strcmp(known.name, name) == 0) {
      *type = known.type;
      *item = known.item;
      return true;
    }
  }
  return false;
}

std::string describe(const Label& label) {
  static const char* const kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                       "ring_shift", "broadcast",  "reduce"};
  std::vector<int64_t> ranks;
  for (int r = 0; r < 64; r++) {
    if (label.members >> r & 1) ranks.push_back(r);
  }
  return std::string(kNames[label.kind]) + " number " + std::to_string(label.number) + arguments(label) + " of " +
         type_name(label) + " [" + numbers({label.dims, label.dims + label.ndim}) + "] over ranks " + numbers(ranks);
}

void copy_from(const View& view, size_t offset, char* to, size_t n) {
  for_runs(view, offset, n, [to](char* at, size_t done, size_t part) { std::memcpy(to + done, at, part); });
}

void copy_to(const View& view, size_t offset, const char* from, size_t n) {
  for_runs(view, offset, n, [from](char* at, size_t done, size_t part) { std::memcpy(at, from + done, part); });
}

void copy_view(const View& from, const View& to, size_t offset, size_t n) {
  for_runs(to, offset, n, [&](char* at, size_t done, size_t part) { copy_from(from, offset + done, at, part); });
}

}  // namespace comm

#endif
