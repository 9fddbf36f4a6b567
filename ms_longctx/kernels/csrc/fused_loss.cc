// SPDX-License-Identifier: Apache-2.0
// Output projection and cross entropy over chunks of tokens, with the gradients computed in the same pass: the logits
// of a chunk are turned into their own gradient and used up before the next chunk, so (tokens, vocabulary) never
// exists as a whole. Tokens without a label cost nothing.
#include <memory>
#include <numeric>
#include <vector>

#include "fused_common.h"
#include "fused_gemm.h"

namespace MLK_ISA {
namespace {

constexpr int32_t kIgnore = -100;
constexpr int64_t kTile = 1024;  // rows of the weight a thread takes at a time
constexpr int kBadLabel = 33;

struct LossAttributes {
  int64_t chunk_tokens;
  bool weight_gradient;
};

using Buffer = std::unique_ptr<float[]>;
Buffer make_buffer(int64_t n) { return Buffer(new float[n]); }

// Rows [begin, end) of a (., h) matrix as fp32: the matrix itself, or a converted copy in scratch.
const float* as_float(const float* matrix, int64_t h, int64_t begin, int64_t, float*) { return matrix + begin * h; }
const float* as_float(const half* matrix, int64_t h, int64_t begin, int64_t end, float* scratch) {
  for_vectors((end - begin) * h, [&](int64_t i, int lanes) {
    store_first(scratch + i, load_first(matrix + begin * h + i, lanes), lanes);
  });
  return scratch;
}

// Cross entropy of one row of logits, which is replaced by its gradient: softmax - one_hot.
double loss_row(float* row, int64_t n, int32_t label) {
  vfloat top = splat(-INFINITY);
  for_vectors(n, [&](int64_t i, int lanes) {
    if (lanes == kWidth) top = vmax(top, load(row + i));
    for (int j = 0; j < lanes && lanes < kWidth; j++) top = vmax(top, splat(row[i + j]));
  });
  const float highest = hmax(top), target = row[label];
  double total = 0.0;
  for (int64_t start = 0; start < n; start += kTile) {  // short fp32 runs, summed in fp64
    vfloat sum = splat(0.f);
    for_vectors(std::min(kTile, n - start), [&](int64_t i, int lanes) {
      float* p = row + start + i;
      store_first(p, vexp(load_first(p, lanes) - splat(highest)), lanes);
      sum += load_first(p, lanes);
    });
    total += hsum(sum);
  }
  const vfloat scale = splat(static_cast<float>(1.0 / total));
  for_vectors(n, [&](int64_t i, int lanes) { store_first(row + i, load_first(row + i, lanes) * scale, lanes); });
  row[label] -= 1.f;
  return std::log(total) + highest - target;
}

// One call of the operator: H hidden type, W weight type; the gradients are null where not wanted.
template <typename H, typename W>
struct Loss {
  const H* hidden;
  const W* weight;
  const int32_t* labels;
  float *grad_hidden, *grad_weight;
  int64_t vocab, h;
  SgemmFunction gemm;
  std::vector<int64_t> tokens;  // those with a label

  // Sum over all tokens, in double; chunk: tokens at a time.
  double run(int64_t chunk) {
    const int64_t count = static_cast<int64_t>(tokens.size());
    chunk = std::max<int64_t>(1, std::min(chunk, count));
    const Buffer logits = make_buffer(chunk * vocab), rows = make_buffer(chunk * h), grads = make_buffer(chunk * h);
    std::vector<double> losses(count);
#pragma omp parallel
    {
      const Buffer scratch = make_buffer(sizeof(W) == sizeof(float) ? 0 : kTile * h);
      for (int64_t first = 0; first < count; first += chunk) {
        const int64_t m = std::min(chunk, count - first);
        const int64_t* index = tokens.data() + first;
        gather(index, m, rows.get());
        project(rows.get(), m, logits.get(), scratch.get());
#pragma omp for schedule(static)
        for (int64_t r = 0; r < m; r++) {
          losses[first + r] = loss_row(logits.get() + r * vocab, vocab, labels[index[r]]);
        }
        if (grad_hidden == nullptr) continue;
        if (grad_weight != nullptr) weight_gradient(rows.get(), m, logits.get(), first > 0);
        hidden_gradient(index, m, logits.get(), grads.get(), scratch.get());
      }
    }
    return std::accumulate(losses.begin(), losses.end(), 0.0);
  }

 private:
  // The functions below are called by all threads and end at a barrier.

  void gather(const int64_t* index, int64_t m, float* rows) const {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < m; r++) {
      for_vectors(h, [&](int64_t i, int lanes) {
        store_first(rows + r * h + i, load_first(hidden + index[r] * h + i, lanes), lanes);
      });
    }
  }

  void project(const float* rows, int64_t m, float* logits, float* scratch) const {
#pragma omp for schedule(dynamic, 1)
    for (int64_t v = 0; v < vocab; v += kTile) {
      const int64_t n = std::min(kTile, vocab - v);
      const float* w = as_float(weight, h, v, v + n, scratch);
      gemm('N', 'T', m, n, h, 1.f, rows, h, w, h, 0.f, logits + v, vocab);
    }
  }

  void weight_gradient(const float* rows, int64_t m, const float* dlogits, bool accumulate) const {
#pragma omp for schedule(dynamic, 1)
    for (int64_t v = 0; v < vocab; v += kTile) {
      const int64_t n = std::min(kTile, vocab - v);
      gemm('T', 'N', n, h, m, 1.f, dlogits + v, vocab, rows, h, accumulate ? 1.f : 0.f, grad_weight + v * h, h);
    }
  }

  void hidden_gradient(const int64_t* index, int64_t m, const float* dlogits, float* grads, float* scratch) const {
    constexpr int64_t kRows = 64;  // each streams the weight once
    const int64_t tile = sizeof(W) == sizeof(float) ? vocab : kTile;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < m; r += kRows) {
      const int64_t n = std::min(kRows, m - r);
      for (int64_t v = 0; v < vocab; v += tile) {
        const int64_t k = std::min(tile, vocab - v);
        const float* w = as_float(weight, h, v, v + k, scratch);
        gemm('N', 'N', n, h, k, 1.f, dlogits + r * vocab + v, vocab, w, h, v > 0 ? 1.f : 0.f, grads + r * h, h);
      }
      for (int64_t i = r; i < r + n; i++) std::copy_n(grads + i * h, h, grad_hidden + index[i] * h);
    }
  }
};

// Inputs of both operators: hidden (N, h), weight (V, h), labels (N,) int32. First results: sum of the losses and
// number of labelled tokens, fp32.
int run(const AotArgs& a, float* grad_hidden, float* grad_weight) {
  const SgemmFunction gemm = mlk_sgemm();
  if (gemm == nullptr) return kNoGemm;
  const int64_t rows = a.dim(0, 0), h = a.dim(0, 1), vocab = a.dim(1, 0);
  const int32_t* labels = a.ptr<int32_t>(2);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < rows; i++) {
    if (labels[i] == kIgnore) continue;
    if (labels[i] < 0 || labels[i] >= vocab) return kBadLabel;
    tokens.push_back(i);
  }
  if (grad_hidden != nullptr) std::fill_n(grad_hidden, rows * h, 0.f);
  if (grad_weight != nullptr && tokens.empty()) std::fill_n(grad_weight, vocab * h, 0.f);
  *a.ptr<float>(4) = static_cast<float>(tokens.size());
  int status = 0;
  const int hidden_status = with_type(a, 0, [&](auto hidden_type) {
    using H = decltype(hidden_type);
    status = with_type(a, 1, [&](auto weight_type) {
      using W = decltype(weight_type);
      Loss<H, W> loss{a.ptr<H>(0), a.ptr<W>(1), labels, grad_hidden, grad_weight, vocab, h, gemm, tokens};
      *a.ptr<float>(3) = static_cast<float>(loss.run(attributes<LossAttributes>(a).chunk_tokens));
    });
  });
  return hidden_status != 0 ? hidden_status : status;
}

int read_chunk(AotExtra* extra) {
  return keep_attributes(extra,
                         LossAttributes{extra->GetAttrInt("chunk_tokens"), extra->GetAttrBool("weight_gradient")});
}

}  // namespace

// -> loss sum, count
int FusedLinearCrossEntropy(const AotArgs& a) { return run(a, nullptr, nullptr); }
int FusedLinearCrossEntropyInit(AotExtra* extra) { return read_chunk(extra); }

// -> loss sum, count, gradient of the sum for hidden (N, h) and, if weight_gradient, for weight (V, h), fp32
int FusedLinearCrossEntropyGrad(const AotArgs& a) {
  return run(a, a.ptr<float>(5), attributes<LossAttributes>(a).weight_gradient ? a.ptr<float>(6) : nullptr);
}
int FusedLinearCrossEntropyGradInit(AotExtra* extra) { return read_chunk(extra); }

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(FusedLinearCrossEntropy)
MLK_EXPORT_WITH_INIT(FusedLinearCrossEntropyGrad)
