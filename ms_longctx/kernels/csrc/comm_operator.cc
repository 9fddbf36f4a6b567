// SPDX-License-Identifier: Apache-2.0
// The operator `Collective` of MindSpore and the functions that ms_longctx/kernels/comm.py calls.
#ifdef MLK_IS_BASELINE

#include <cstdio>
#include <mutex>

#include "comm_collectives.h"
#include "simd.h"

#define COMM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kFailed = 41;  // result of a collective that was given up

std::mutex mutex;  // one collective at a time
comm::Transport* transport = nullptr;  // never freed: other threads may use it while the process ends
std::string failure;  // why this process can communicate no more

int run(const comm::Call& call, const std::vector<comm::Operand>& operands) {
  const std::lock_guard<std::mutex> guard(mutex);
  try {
    if (!failure.empty()) throw comm::Failure(failure);
    if (transport == nullptr) throw comm::Failure("this process has not joined a job");
    comm::collective(*transport, call, operands);
    return 0;
  } catch (const comm::Failure& error) {
    if (transport != nullptr) transport->segment.stop(error.what());
    if (failure.empty()) failure = error.what();
    return kFailed;
  }
}

}  // namespace

COMM_EXPORT int CollectiveInit(int*, int64_t**, const char**, AotExtra* extra) {
  comm::Call call;
  call.kind = static_cast<comm::Kind>(extra->GetAttrInt("kind"));
  call.first = static_cast<int>(extra->GetAttrInt("first"));
  call.second = static_cast<int>(extra->GetAttrInt("second"));
  call.number = static_cast<uint32_t>(extra->GetAttrInt("number"));
  for (int64_t rank : extra->GetAttrIntVec("ranks")) call.ranks.push_back(static_cast<int>(rank));
  return keep_attributes(extra, call);
}

COMM_EXPORT int Collective(MLK_LAUNCH_PARAMS) {
  const AotArgs args{count, data, ndims, shapes, dtypes, static_cast<AotExtra*>(extra)};
  const int pairs = count / 2;
  std::vector<comm::Operand> operands;
  for (int i = 0; i < pairs; i++) {
    operands.push_back({dtypes[i], {shapes[i], shapes[i] + ndims[i]}, data[i], data[pairs + i]});
  }
  const bool failed_before = !failure.empty();
  const int result = run(attributes<comm::Call>(args), operands);
  // MindSpore's exception would not say more than that the operator failed.
  if (result != 0 && !failed_before) std::fprintf(stderr, "error: %s\n", failure.c_str());
  return result;
}

// Result: 0, or kFailed with the reason in ms_longctx_comm_failure().
COMM_EXPORT int ms_longctx_comm_join(const char* name, int rank, int size, double join_timeout, double timeout) {
  const std::lock_guard<std::mutex> guard(mutex);
  try {
    if (transport != nullptr) throw comm::Failure("this process has joined a job before");
    transport = new comm::Transport(name, rank, size, join_timeout, timeout);
    return 0;
  } catch (const comm::Failure& error) {
    failure = error.what();
    return kFailed;
  }
}

COMM_EXPORT void ms_longctx_comm_leave() {
  if (transport != nullptr) transport->segment.leave();
}

COMM_EXPORT int ms_longctx_comm_call(int kind, int first, int second, int number, const int* ranks, int size,
                                     const char* type, const int64_t* dims, int ndim, const void* in, void* out) {
  const comm::Call call{static_cast<comm::Kind>(kind), first, second, static_cast<uint32_t>(number),
                        {ranks, ranks + size}};
  return run(call, {{type, {dims, dims + ndim}, in, out}});
}

// Makes all ranks fail in their next collective, or in the one they wait in.
COMM_EXPORT void ms_longctx_comm_stop(const char* reason) {
  if (transport != nullptr) transport->segment.stop(reason);
}

COMM_EXPORT const char* ms_longctx_comm_failure() { return failure.c_str(); }

// Bytes of tensors that this process has sent to other ranks.
COMM_EXPORT int64_t ms_longctx_comm_sent_bytes() {
  const std::lock_guard<std::mutex> guard(mutex);
  return transport == nullptr ? 0 : static_cast<int64_t>(transport->sent_bytes);
}

#endif
