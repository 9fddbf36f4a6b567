// SPDX-License-Identifier: Apache-2.0
// The functions of the CANN stand-in whose answers MindSpore reads; all others are generated and return 0.
//
// MindSpore's wheels use the old std::string ABI, and so must every C++ function that takes or returns a string.
#define _GLIBCXX_USE_CXX11_ABI 0
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>

namespace {
constexpr std::size_t kGiB = std::size_t{1} << 30;
constexpr std::size_t kDeviceMemory = MSLC_DEVICE_GIB * kGiB;
constexpr std::size_t kVersionLength = 128;
}  // namespace

extern "C" {
const char *aclrtGetSocName() { return MSLC_SOC; }

int aclrtGetDeviceCount(std::uint32_t *count) {
  *count = 8;
  return 0;
}

int aclrtGetDevice(std::int32_t *device) {
  *device = 0;
  return 0;
}

int aclrtGetMemInfo(int, std::size_t *available, std::size_t *total) {
  *available = kDeviceMemory - 4 * kGiB;  // the driver of a real device keeps some
  *total = kDeviceMemory;
  return 0;
}

int aclsysGetCANNVersion(int, char *version) {
  std::memset(version, 0, kVersionLength);
  std::strncpy(version, MSLC_CANN_VERSION, kVersionLength - 1);
  return 0;
}

const char *aclGetRecentErrMsg() { return ""; }
const char *HcclGetErrorString(int) { return ""; }

int HcclGetCommName(void *, char *name) {
  std::strcpy(name, "standin");
  return 0;
}
}  // extern "C"

// Classes of CANN's graph engine. MindSpore fills static tables with them when its plugin is loaded.
namespace ge {
class StatusFactory {
 public:
  static StatusFactory *Instance();

 private:
  std::map<std::uint32_t, std::string> messages_;  // inline code in MindSpore writes here
};

StatusFactory *StatusFactory::Instance() {
  static StatusFactory factory;
  return &factory;
}

class AscendString {
 public:
  AscendString(const char *text);
  const char *GetString() const;
  bool operator<(const AscendString &other) const;

 private:
  std::shared_ptr<std::string> text_;
};

AscendString::AscendString(const char *text) : text_(std::make_shared<std::string>(text ? text : "")) {}
const char *AscendString::GetString() const { return text_ ? text_->c_str() : ""; }
bool AscendString::operator<(const AscendString &other) const {
  return std::strcmp(GetString(), other.GetString()) < 0;
}

class OperatorImpl;

class Operator {  // as large as the real one: virtual table and std::shared_ptr<OperatorImpl>
 public:
  explicit Operator(const std::string &type);
  Operator(const std::string &name, const std::string &type);
  explicit Operator(const char *type);
  Operator(const char *name, const char *type);
  Operator(const AscendString &name, const AscendString &type);
  virtual ~Operator() = default;
  std::string GetName() const;
  std::string GetOpType() const;
  int GetName(AscendString &name) const;
  int GetOpType(AscendString &type) const;

 private:
  std::shared_ptr<OperatorImpl> impl_;
};

Operator::Operator(const std::string &) {}
Operator::Operator(const std::string &, const std::string &) {}
Operator::Operator(const char *) {}
Operator::Operator(const char *, const char *) {}
Operator::Operator(const AscendString &, const AscendString &) {}
std::string Operator::GetName() const { return "standin"; }
std::string Operator::GetOpType() const { return "standin"; }
int Operator::GetName(AscendString &name) const {
  name = AscendString("standin");
  return 0;
}
int Operator::GetOpType(AscendString &type) const {
  type = AscendString("standin");
  return 0;
}

class OperatorFactory {
 public:
  static Operator CreateOperator(const char *name, const char *type);
  static Operator CreateOperator(const std::string &name, const std::string &type);
  static bool IsExistOp(const char *type);
  static bool IsExistOp(const std::string &type);
};

Operator OperatorFactory::CreateOperator(const char *name, const char *type) { return Operator(name, type); }
Operator OperatorFactory::CreateOperator(const std::string &name, const std::string &type) {
  return Operator(name, type);
}
bool OperatorFactory::IsExistOp(const char *) { return true; }
bool OperatorFactory::IsExistOp(const std::string &) { return true; }
}  // namespace ge
