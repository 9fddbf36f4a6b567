// SPDX-License-Identifier: Apache-2.0
// The calling convention of MindSpore's ahead-of-time custom operators (ops.Custom(..., func_type="aot")),
// restated here so that the kernels compile without MindSpore's headers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

// These two classes must keep the layout of mindspore/ccsrc/utils/custom_aot_extra.h (virtual functions in the same
// order). Only vtables cross the border, no symbol of this library or of MindSpore is shared.
class AotKernelData {
 public:
  AotKernelData() = default;
  virtual ~AotKernelData() = default;
};

class AotExtra {
 public:
  AotExtra() = default;
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) = 0;
  virtual bool GetAttrBool(std::string name) = 0;
  virtual int64_t GetAttrInt(std::string name) = 0;
  virtual float GetAttrFloat(std::string name) = 0;
  virtual std::string GetAttrStr(std::string name) = 0;
  virtual std::vector<int64_t> GetAttrIntVec(std::string name) = 0;
  virtual std::vector<float> GetAttrFloatVec(std::string name) = 0;
  virtual std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string name) = 0;
  virtual std::vector<std::vector<float>> GetAttrFloat2DVec(std::string name) = 0;

  void SetKernelData(AotKernelData* data) { kernel_data_ = data; }
  AotKernelData* KernelData() const { return kernel_data_; }

 private:
  std::vector<size_t> workspace_;
  AotKernelData* kernel_data_ = nullptr;
};

// Arguments of one launch. Inputs come first, then outputs; shapes and dtypes are indexed alike.
struct AotArgs {
  int count;           // inputs + outputs
  void** data;
  int* ndims;
  int64_t** shapes;
  const char** dtypes;  // "float32", "float16", "int32", ...
  AotExtra* extra;

  template <typename T>
  T* ptr(int i) const { return static_cast<T*>(data[i]); }
  int64_t dim(int i, int axis) const { return shapes[i][axis]; }
  bool is(int i, const char* dtype) const { return std::strcmp(dtypes[i], dtype) == 0; }
  int64_t size(int i) const {
    int64_t n = 1;
    for (int d = 0; d < ndims[i]; d++) n *= shapes[i][d];
    return n;
  }
};

namespace {

// Operator attributes (add_prim_attr in Python) are read once, when the operator is set up, and kept as a T.
template <typename T>
struct KernelAttributes : AotKernelData {
  explicit KernelAttributes(const T& v) : value(v) {}
  T value;
};

template <typename T>
[[maybe_unused]] int keep_attributes(AotExtra* extra, const T& value) {
  extra->SetKernelData(new KernelAttributes<T>(value));
  return 0;
}

template <typename T>
[[maybe_unused]] const T& attributes(const AotArgs& args) {
  return static_cast<KernelAttributes<T>*>(args.extra->KernelData())->value;
}

}  // namespace
