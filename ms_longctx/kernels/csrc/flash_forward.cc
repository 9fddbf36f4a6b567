// SPDX-License-Identifier: Apache-2.0
// Flash attention, forward (Dao et al. 2022, arXiv:2205.14135; online softmax in base 2).
//
// A panel holds kPanel query rows, one in each vector lane, with Q and the output transposed. Both products then read K
// and V element by element (broadcast) and everything about a query is a vector: no horizontal sums, and K and V need
// not be transposed. Several panels share a block of keys, so that it is copied (and converted) once.
#include "flash_decode.h"

namespace MLK_ISA {
namespace {

constexpr int64_t kBlock = 128;         // keys in a block
constexpr int64_t kTaskFloats = 1 << 17;  // for Q and the output in one task: half of a usual L2 cache

// kPanel query rows and what has been summed up for them.
struct Panel {
  void start(const Problem& p, int64_t b, int64_t h, int64_t first_row) {
    bounds = RowBounds();
    const float rate = kLog2e;
    for (int i = 0; i < kPanel; i++) {
      const int64_t r = first_row + i;
      const bool used = r < p.rows;
      const int64_t row = used ? r / p.group : 0;
      const Interval keys = used ? p.visible(b, row) : Interval{0, 0};
      document[i] = used && p.mask.documents ? p.q_documents[b * p.q_length + row] : 0;
      low[i] = keys.low, high[i] = keys.high;
      slope[i] = used && p.mask.alibi ? p.slopes[h * p.group + r % p.group] * rate : 0.f;
      position[i] = static_cast<float>(p.q_start(b) - p.k_start(b) + row);
      maximum[i] = -kInfinity, sum[i] = 0.f;
      bounds.add(keys, document[i]);
    }
  }

  alignas(64) float slope[kPanel];     // ALiBi slope * log2(e)
  alignas(64) float position[kPanel];  // in key rows
  alignas(64) float maximum[kPanel];
  alignas(64) float sum[kPanel];
  alignas(64) int32_t low[kPanel];
  alignas(64) int32_t high[kPanel];
  alignas(64) int32_t document[kPanel];
  RowBounds bounds;
  float* query;   // (dim, kPanel), times scale * log2(e)
  float* output;  // (dim, kPanel), not yet divided by the sum
};

struct Scratch {
  Scratch(const Problem& p, int64_t panels)
      : stride(tile_stride(p.dim)), keys(make_buffer(kBlock * stride)), values(make_buffer(kBlock * stride)),
        scores(make_buffer(kBlock * kPanel)), lanes(make_buffer(panels * 2 * p.dim * kPanel)), panel(panels) {
    for (int64_t i = 0; i < panels; i++) {
      panel[i].query = lanes.get() + 2 * i * p.dim * kPanel;
      panel[i].output = panel[i].query + p.dim * kPanel;
    }
  }
  int64_t stride;
  Buffer keys, values;  // (kBlock, stride)
  Buffer scores;        // (kBlock, kPanel)
  Buffer lanes;
  std::vector<Panel> panel;
};

// Keys of the block that some row of the panel may see: [first, last), relative to the block.
Interval trim(const Problem& p, int64_t b, const Panel& panel, const KeyBounds& block) {
  int32_t first = std::max(block.begin, panel.bounds.low_min), last = std::min(block.end, panel.bounds.high_max);
  if (p.mask.documents) {
    const int32_t* ids = p.k_documents + b * p.kv_length;
    const auto outside = [&](int32_t id) { return id < panel.bounds.document_min || id > panel.bounds.document_max; };
    while (first < last && outside(ids[first])) first++;
    while (first < last && outside(ids[last - 1])) last--;
  }
  return {first - block.begin, last - block.begin};
}

// Adds ALiBi, hides what the mask hides (-infinity) and takes the running maximum over keys [first, last).
template <bool kAlibi, bool kMasked>
void mask_scores(const Problem& p, int64_t b, const Panel& panel, int32_t first, int32_t last, float* scores,
                 vfloat* maximum) {
  const int32_t* ids = p.mask.documents ? p.k_documents + b * p.kv_length : nullptr;
  for (int v = 0; v < 2; v++) {
    const int at = v * kWidth;
    const vfloat slope = load(panel.slope + at), position = load(panel.position + at);
    const vint low = load_int(panel.low + at), high = load_int(panel.high + at);
    const vint document = load_int(panel.document + at);
    const auto masked_score = [&](int32_t j) __attribute__((always_inline)) {
      float* score = scores + (j - first) * kPanel + at;
      vfloat s = load(score);
      if (kAlibi) s += slope * (splat(static_cast<float>(j)) - position);
      if (kMasked) {
        const vint key = splat_int(j);
        vint seen = (low <= key) & (key < high);
        if (ids != nullptr) seen &= document == splat_int(ids[j]);
        s = seen ? s : splat(-kInfinity);
      }
      if (kAlibi || kMasked) store(score, s);
      return s;
    };
    vfloat even = maximum[v], odd = maximum[v];  // two chains hide the latency
    int32_t j = first;
    for (; j + 1 < last; j += 2) {
      even = vmax(masked_score(j), even);
      odd = vmax(masked_score(j + 1), odd);
    }
    if (j < last) even = vmax(masked_score(j), even);
    maximum[v] = vmax(even, odd);
  }
}

// Turns scores into weights under the new maximum and corrects what was summed under the old one.
void renormalise(Panel& panel, int64_t dim, int32_t count, const vfloat* maximum, float* scores) {
  for (int v = 0; v < 2; v++) {
    const int at = v * kWidth;
    const vfloat old = load(panel.maximum + at);
    // A row that has seen nothing yet keeps the maximum -infinity; 0 in its place gives weights 0 instead of NaN.
    const vfloat base = maximum[v] == splat(-kInfinity) ? vfloat{} : maximum[v];
    const vfloat correction = exp2_nonpositive(old - base);
    const auto weigh = [&](int32_t j) __attribute__((always_inline)) {
      float* score = scores + j * kPanel + at;
      const vfloat weight = exp2_nonpositive(load(score) - base);
      store(score, weight);
      return weight;
    };
    vfloat even = load(panel.sum + at) * correction, odd{};
    int32_t j = 0;
    for (; j + 1 < count; j += 2) {
      even += weigh(j);
      odd += weigh(j + 1);
    }
    if (j < count) even += weigh(j);
    store(panel.sum + at, even + odd);
    store(panel.maximum + at, maximum[v]);
    if (hmax(maximum[v] - old) == 0.f) continue;
    for (int64_t d = 0; d < dim; d++) {
      float* out = panel.output + d * kPanel + at;
      store(out, load(out) * correction);
    }
  }
}

void attend(const Problem& p, int64_t b, Panel& panel, const KeyBounds& block, Scratch& scratch) {
  if (disjoint(panel.bounds, block)) return;
  const bool masked = !complete(panel.bounds, block);
  const Interval keys = masked ? trim(p, b, panel, block) : Interval{0, block.end - block.begin};
  const int32_t count = keys.high - keys.low, first = block.begin + keys.low, last = block.begin + keys.high;
  if (count <= 0) return;
  mlk_count_scores(count * kPanel);
  float* scores = scratch.scores.get();
  multiply<Layout::kRows>(count, kPanel, p.dim, scratch.keys.get() + keys.low * scratch.stride, scratch.stride,
                          panel.query, kPanel, scores, kPanel, false);
  vfloat maximum[2] = {load(panel.maximum), load(panel.maximum + kWidth)};
  const auto mask = p.mask.alibi ? (masked ? mask_scores<true, true> : mask_scores<true, false>)
                                 : (masked ? mask_scores<false, true> : mask_scores<false, false>);
  mask(p, b, panel, first, last, scores, maximum);
  renormalise(panel, p.dim, count, maximum, scores);
  multiply<Layout::kColumns>(p.dim, kPanel, count, scratch.values.get() + keys.low * scratch.stride, scratch.stride,
                             scores, kPanel, panel.output, kPanel, true);
}

template <typename T>
void start_panel(const Problem& p, int64_t b, int64_t h, int64_t first_row, const T* q, Panel& panel) {
  panel.start(p, b, h, first_row);
  std::fill_n(panel.output, p.dim * kPanel, 0.f);
  const T* row[kPanel];
  p.row_pointers(b, h, first_row, kPanel, q, row);
  load_transposed(row, p.dim, p.mask.scale * kLog2e, panel.query);
}

template <typename T>
void finish_panel(const Problem& p, int64_t b, int64_t h, int64_t first_row, const Panel& panel, T* out, float* lse) {
  T* row[kPanel];
  float inverse[kPanel];
  p.row_pointers(b, h, first_row, kPanel, out, row);
  for (int i = 0; i < kPanel; i++) {
    inverse[i] = panel.sum[i] == 0.f ? 0.f : 1.f / panel.sum[i];
    if (row[i] == nullptr) continue;
    lse[p.lse_offset(b, h, first_row + i)] = panel.maximum[i] * kLn2 + std::log(panel.sum[i]);
  }
  store_transposed(panel.output, p.dim, inverse, row);
}

// The block's rows of K or V.
template <typename T>
void load_rows(const Problem& p, int64_t b, int64_t h, const KeyBounds& block, const T* x, float* out, int64_t stride) {
  for (int64_t j = block.begin; j < block.end; j++, out += stride) copy_row(x + p.k_offset(b, h, j), p.dim, 1.f, out);
}

// All keys for the query rows of `count` panels.
template <typename T>
void run_task(const Problem& p, int64_t b, int64_t h, int64_t first_panel, int64_t count,
              const std::vector<KeyBounds>& blocks, const AotArgs& args, Scratch& scratch) {
  RowBounds all;
  for (int64_t i = 0; i < count; i++) {
    start_panel(p, b, h, (first_panel + i) * kPanel, args.ptr<T>(0), scratch.panel[i]);
    all.add(scratch.panel[i].bounds);
  }
  for (const KeyBounds& block : blocks) {
    if (disjoint(all, block)) continue;
    load_rows(p, b, h, block, args.ptr<T>(1), scratch.keys.get(), scratch.stride);
    load_rows(p, b, h, block, args.ptr<T>(2), scratch.values.get(), scratch.stride);
    for (int64_t i = 0; i < count; i++) attend(p, b, scratch.panel[i], block, scratch);
  }
  for (int64_t i = 0; i < count; i++) {
    finish_panel(p, b, h, (first_panel + i) * kPanel, scratch.panel[i], args.ptr<T>(7), args.ptr<float>(8));
  }
}

template <typename T>
int run(const Problem& p, const AotArgs& args) {
  const int64_t panels = (p.rows + kPanel - 1) / kPanel, pairs = p.batch * p.kv_heads;
  const std::vector<std::vector<KeyBounds>> blocks = key_blocks(p, kBlock);
  // The result does not depend on how panels are grouped, so the number of threads may decide it.
  const int64_t wanted = pairs * panels / (4 * omp_get_max_threads()), fits = kTaskFloats / (2 * p.dim * kPanel);
  const int64_t per_task = std::max<int64_t>(1, std::min(wanted, fits)), tasks = (panels + per_task - 1) / per_task;
#pragma omp parallel
  {
    Scratch scratch(p, per_task);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < pairs * tasks; t++) {
      // Head by head, so that its keys and values stay in the cache. Under a causal mask the last rows see most: first.
      const int64_t pair = t / tasks, first = (tasks - 1 - t % tasks) * per_task;
      run_task<T>(p, pair / p.kv_heads, pair % p.kv_heads, first, std::min(per_task, panels - first),
                  blocks[pair / p.kv_heads], args, scratch);
    }
  }
  return 0;
}

}  // namespace

int flash_forward(const Problem& p, const AotArgs& args) {
  const bool is_half = args.is(0, "float16");
  if (p.rows <= kDecodeRows) return is_half ? decode<half>(p, args) : decode<float>(p, args);
  return is_half ? run<half>(p, args) : run<float>(p, args);
}

int FlashForwardInit(AotExtra* extra) { return read_mask(extra); }

// q, k, v, q_documents, k_documents, slopes, offsets -> out like q, lse (B,H,Sq) fp32. q, k, v: float32 or float16.
int FlashForward(const AotArgs& args) { return flash_forward(Problem(args), args); }

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(FlashForward)
