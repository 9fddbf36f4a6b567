// SPDX-License-Identifier: Apache-2.0
// A whole Llama over a key-value cache in one call: a chunk of a prompt, or one token of each row.
//
// One token needs a few hundred small operators otherwise, and starting each costs more than running it. What is
// computed is LlamaForCausalLM.forward_cached of models/llama.py, with fp32 activations and matrices of fp32, int8 or
// int4. Python calls it without MindSpore's runtime (kernels/decode.py), whose threads would take the cores from this
// one's.
#include "flash_common.h"
#include "quant_project.h"

namespace MLK_ISA {
namespace {

constexpr int kBadToken = 32, kCacheFull = 33;  // results that Python turns into messages
constexpr int64_t kParallelFrom = 9;            // tokens from which small loops are worth several threads

// The first argument, as int64; kernels/decode.py writes it in this order.
struct Settings {
  int64_t batch, length;    // tokens (batch, length)
  int64_t start, capacity;  // column of the cache the first token goes to, columns of the cache
  int64_t layers, hidden, inner, vocabulary, heads, kv_heads, dim;
  int64_t window;                                   // 0: none
  int64_t fused_qkv, attention_bias, mlp_bias;      // 0 or 1
  int64_t count() const { return batch * length; }
  int64_t q_size() const { return heads * dim; }
  int64_t kv_size() const { return kv_heads * dim; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
  int64_t group() const { return heads / kv_heads; }
};

void norm_rows(const float* x, const float* weight, float eps, int64_t count, int64_t n, float* out) {
#pragma omp parallel for schedule(static) if (count >= kParallelFrom)
  for (int64_t m = 0; m < count; m++) {
    const float* row = x + m * n;
    vfloat sum{};
    for (int64_t i = 0; i < n; i += kWidth) {
      const vfloat v = load_first(row + i, static_cast<int>(std::min<int64_t>(kWidth, n - i)));
      sum += v * v;
    }
    const float rate = 1.f / std::sqrt(hsum(sum) / static_cast<float>(n) + eps);
    for (int64_t i = 0; i < n; i++) out[m * n + i] = row[i] * rate * weight[i];
  }
}

// gate = silu(gate) * up
void swiglu(float* gate, const float* up, int64_t size) {
#pragma omp parallel for schedule(static) if (size > (1 << 15))
  for (int64_t i = 0; i < size; i += kWidth) {
    const int lanes = static_cast<int>(std::min<int64_t>(kWidth, size - i));
    const vfloat g = load_first(gate + i, lanes);
    store_first(gate + i, g / (splat(1.f) + vexp(-g)) * load_first(up + i, lanes), lanes);
  }
}

// One head: x * cos + rotate_half(x) * sin, or a copy without tables.
void rotate(const float* x, const float* cos, const float* sin, int64_t dim, float* out) {
  const int64_t half = dim / 2;
  if (cos == nullptr) {
    std::copy_n(x, dim, out);
    return;
  }
  for (int64_t d = 0; d < half; d++) {
    out[d] = x[d] * cos[d] - x[half + d] * sin[d];
    out[half + d] = x[half + d] * cos[half + d] + x[d] * sin[half + d];
  }
}

// The arguments in order; pointers that may be null are absent then.
enum Argument {
  kSettings,   // Settings
  kEps,        // float
  kTokens,     // int32 (batch, length)
  kCos, kSin,  // (batch, length, dim), null without rotary embedding
  kDocuments,  // int32 (batch, capacity), -1 in padded columns, null without padding
  kSlopes,     // (heads) of ALiBi, null without it
  kLogits,     // result (batch, vocabulary) of the last token of each row
  kEmbedding, kNorm, kHead,
  kWeights,  // of the layers (each matrix as a Matrix of quant_matrix.h, norms and biases as they are), then their keys (batch, capacity, kv_heads, dim), then their values
};

class Llama {
 public:
  explicit Llama(const AotArgs& args)
      : args_(args), s_(*args.ptr<Settings>(kSettings)), eps_(*args.ptr<float>(kEps)),
        first_cache_(args.count - 2 * static_cast<int>(s_.layers)), x_(make_buffer(s_.count() * s_.hidden)),
        normed_(make_buffer(s_.count() * s_.hidden)), qkv_(make_buffer(s_.count() * s_.qkv_size())),
        queries_(make_buffer(s_.count() * s_.q_size())), attended_(make_buffer(s_.count() * s_.q_size())),
        lse_(make_buffer(s_.count() * s_.heads)), gate_(make_buffer(s_.count() * s_.inner)),
        up_(make_buffer(s_.count() * s_.inner)) {}

  int run() {
    if (s_.start < 0 || s_.start + s_.length > s_.capacity) return kCacheFull;
    if (!embed()) return kBadToken;
    for (int layer = 0; layer < s_.layers; layer++) {
      attention(layer);
      mlp();
    }
    last_logits();
    return 0;
  }

 private:
  const float* vector() { return args_.ptr<float>(next_++); }
  const float* bias(bool has) { return has ? vector() : nullptr; }
  const Matrix& matrix() { return *args_.ptr<Matrix>(next_++); }

  bool embed() {
    const int32_t* tokens = args_.ptr<int32_t>(kTokens);
    for (int64_t m = 0; m < s_.count(); m++) {
      if (tokens[m] < 0 || tokens[m] >= s_.vocabulary) return false;
      whole_row(*args_.ptr<Matrix>(kEmbedding), tokens[m], s_.hidden, x_.get() + m * s_.hidden);
    }
    return true;
  }

  void norm(const float* weight) { norm_rows(x_.get(), weight, eps_, s_.count(), s_.hidden, normed_.get()); }

  // x += what the projection back to the hidden size left in normed_.
  void add_to_residual() {
    for_vectors(s_.count() * s_.hidden, [&](int64_t i, int lanes) {
      store_first(x_.get() + i, load_first(x_.get() + i, lanes) + load_first(normed_.get() + i, lanes), lanes);
    });
  }

  void attention(int layer) {
    const int64_t width = s_.qkv_size();
    float* out = qkv_.get();
    norm(vector());
    if (s_.fused_qkv) {
      const Matrix& w = matrix();
      const float* b = bias(s_.attention_bias);
      project(normed_.get(), s_.count(), s_.hidden, {{w, b, width, out, width}});
    } else {
      const Matrix& q = matrix();
      const float* q_bias = bias(s_.attention_bias);
      const Matrix& k = matrix();
      const float* k_bias = bias(s_.attention_bias);
      const Matrix& v = matrix();
      const float* v_bias = bias(s_.attention_bias);
      project(normed_.get(), s_.count(), s_.hidden,
              {{q, q_bias, s_.q_size(), out, width},
               {k, k_bias, s_.kv_size(), out + s_.q_size(), width},
               {v, v_bias, s_.kv_size(), out + s_.q_size() + s_.kv_size(), width}});
    }
    float* keys = args_.ptr<float>(first_cache_ + layer);
    float* values = args_.ptr<float>(first_cache_ + static_cast<int>(s_.layers) + layer);
    append(keys, values);
    if (layer == s_.layers - 1) keep_last_tokens();
    attend(keys, values);
    const Matrix& o = matrix();
    const float* o_bias = bias(s_.attention_bias);
    project(attended_.get(), s_.count(), s_.q_size(), {{o, o_bias, s_.hidden, normed_.get(), s_.hidden}});
    add_to_residual();
  }

  // Where in a row of the projections the heads that belong to key/value head h begin.
  struct Columns {
    int64_t query, key, value;
  };
  Columns columns(int64_t h) const {
    const int64_t group = s_.group(), d = s_.dim, fused = h * (group + 2) * d;
    if (s_.fused_qkv) return {fused, fused + group * d, fused + (group + 1) * d};
    return {h * group * d, s_.q_size() + h * d, s_.q_size() + s_.kv_size() + h * d};
  }

  // Row of the cache that token m goes to.
  int64_t cache_row(int64_t m) const { return (m / s_.length) * s_.capacity + s_.start + m % s_.length; }

  // Rotates queries and keys and writes keys and values into the cache.
  void append(float* keys, float* values) const {
    const int64_t d = s_.dim, group = s_.group();
#pragma omp parallel for schedule(static) if (s_.count() >= kParallelFrom)
    for (int64_t m = 0; m < s_.count(); m++) {
      const float* row = qkv_.get() + m * s_.qkv_size();
      const float* cos = args_.data[kCos] ? args_.ptr<float>(kCos) + m * d : nullptr;
      const float* sin = args_.data[kSin] ? args_.ptr<float>(kSin) + m * d : nullptr;
      for (int64_t h = 0; h < s_.kv_heads; h++) {
        const Columns at = columns(h);
        for (int64_t g = 0; g < group; g++) {
          rotate(row + at.query + g * d, cos, sin, d, queries_.get() + (m * s_.heads + h * group + g) * d);
        }
        rotate(row + at.key, cos, sin, d, keys + (cache_row(m) * s_.kv_heads + h) * d);
        std::copy_n(row + at.value, d, values + (cache_row(m) * s_.kv_heads + h) * d);
      }
    }
  }

  // Of the last layer the other tokens leave only their keys and values behind: its output is read for the last one.
  void keep_last_tokens() {
    for (int64_t b = 0; b < s_.batch; b++) {
      const int64_t last = (b + 1) * s_.length - 1;
      std::copy_n(x_.get() + last * s_.hidden, s_.hidden, x_.get() + b * s_.hidden);
      std::copy_n(queries_.get() + last * s_.q_size(), s_.q_size(), queries_.get() + b * s_.q_size());
    }
    s_.start += s_.length - 1;
    s_.length = 1;
  }

  // Flash attention (flash_forward.cc) of the queries over the cache.
  void attend(float* keys, float* values) const {
    int32_t* documents = args_.ptr<int32_t>(kDocuments);
    std::vector<int32_t> q_documents;
    if (documents != nullptr) {
      for (int64_t m = 0; m < s_.count(); m++) q_documents.push_back(documents[cache_row(m)]);
    }
    const Mask mask{0.f, true, args_.data[kSlopes] != nullptr,
                    documents != nullptr, s_.window, 0};
    int32_t offsets[] = {static_cast<int32_t>(s_.start), static_cast<int32_t>(s_.start + s_.length)};
    int64_t q_shape[] = {s_.batch, s_.length, s_.heads, s_.dim}, offsets_shape[] = {2};
    int64_t kv_shape[] = {s_.batch, s_.capacity, s_.kv_heads, s_.dim};
    void* data[] = {queries_.get(), keys, values, q_documents.data(), documents, args_.data[kSlopes], offsets,
                    attended_.get(), lse_.get()};
    int64_t* shapes[] = {q_shape, kv_shape, kv_shape, q_shape, kv_shape, q_shape + 2, offsets_shape};
    int ndims[] = {4, 4, 4, 2, 2, 1, 1};
    const char* dtypes[] = {"float32"};
    const AotArgs inner{9, data, ndims, shapes, dtypes, nullptr};
    flash_forward(Problem(mask, inner), inner);
  }

  void mlp() {
    norm(vector());
    const Matrix& g = matrix();
    const float* g_bias = bias(s_.mlp_bias);
    const Matrix& u = matrix();
    const float* u_bias = bias(s_.mlp_bias);
    project(normed_.get(), s_.count(), s_.hidden,
            {{g, g_bias, s_.inner, gate_.get(), s_.inner}, {u, u_bias, s_.inner, up_.get(), s_.inner}});
    swiglu(gate_.get(), up_.get(), s_.count() * s_.inner);
    const Matrix& down = matrix();
    const float* down_bias = bias(s_.mlp_bias);
    project(gate_.get(), s_.count(), s_.inner, {{down, down_bias, s_.hidden, normed_.get(), s_.hidden}});
    add_to_residual();
  }

  void last_logits() {
    norm(args_.ptr<float>(kNorm));
    project(normed_.get(), s_.batch, s_.hidden,
            {{*args_.ptr<Matrix>(kHead), nullptr, s_.vocabulary, args_.ptr<float>(kLogits), s_.vocabulary}});
  }

  const AotArgs& args_;
  Settings s_;
  const float eps_;
  const int first_cache_;
  int next_ = kWeights;  // the next weight
  Buffer x_, normed_, qkv_, queries_, attended_, lse_, gate_, up_;
};

}  // namespace

int LlamaCached(const AotArgs& args) { return Llama(args).run(); }

}  // namespace MLK_ISA

MLK_EXPORT(LlamaCached)
