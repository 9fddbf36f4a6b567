// SPDX-License-Identifier: Apache-2.0
// MindSpore operators on quantized matrices: the linear layer and the rows of an embedding.
#include "quant_project.h"

namespace MLK_ISA {
namespace {

constexpr int kBadRow = 32;

struct Form {
  int64_t kind, group;
};

// Arguments from `first` to the output as a matrix: values, scales (not of fp16), zero points or factors (if any).
Matrix matrix(const AotArgs& args, int first) {
  const Form& form = attributes<Form>(args);
  const int parts = args.count - 1 - first;
  const auto part = [&](int i) -> const void* { return i < parts ? args.data[first + i] : nullptr; };
  return {form.kind, form.group, part(0), part(1), part(2)};
}

int keep_form(AotExtra* extra) { return keep_attributes(extra, Form{extra->GetAttrInt("kind"), extra->GetAttrInt("group")}); }

}  // namespace

// (x (m, k), values[, scales[, zeros or factors]]) -> (m, n)
int QuantLinear(const AotArgs& args) {
  const int out = args.count - 1;
  const int64_t n = args.dim(out, 1);
  project(args.ptr<float>(0), args.dim(0, 0), args.dim(0, 1), {{matrix(args, 1), nullptr, n, args.ptr<float>(out), n}});
  return 0;
}

int QuantLinearInit(AotExtra* extra) { return keep_form(extra); }

// (ids int32 (m), values[, scales[, zeros or factors]]) -> (m, k)
int QuantRows(const AotArgs& args) {
  const int out = args.count - 1;
  const int64_t k = args.dim(out, 1), rows = args.dim(1, 0);
  const Matrix table = matrix(args, 1);
  for (int64_t m = 0; m < args.dim(0, 0); m++) {
    const int32_t id = args.ptr<int32_t>(0)[m];
    if (id < 0 || id >= rows) return kBadRow;
    whole_row(table, id, k, args.ptr<float>(out) + m * k);
  }
  return 0;
}

int QuantRowsInit(AotExtra* extra) { return keep_form(extra); }

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(QuantLinear)
MLK_EXPORT_WITH_INIT(QuantRows)
