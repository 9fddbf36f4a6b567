// SPDX-License-Identifier: Apache-2.0
// Flash attention, backward (Dao et al. 2022, arXiv:2205.14135, algorithm 4).
//
// A task owns one block of keys of one key/value head and walks over all query rows that see it. Here a vector lane is
// a key: K, V and the sums of their gradients lie transposed in panels, while Q and dOut are read element by element.
// Only dQ is shared between tasks. Tiles of dQ take their contributions in the order of the key blocks (a task waits
// for its turn), so one head keeps all threads busy, no copy of dQ is needed, and the result is the same every time.
#include <sched.h>

#include <array>
#include <atomic>

#include "flash_common.h"

namespace MLK_ISA {
namespace {

constexpr int64_t kTileRows = 96;   // query rows in a tile
constexpr int64_t kBlock = 256;     // keys in a block
constexpr int64_t kPanels = kBlock / kPanel;
constexpr int64_t kScoreStride = kBlock + 16;  // an odd number of cache lines

// Inputs after the seven of Problem, then outputs.
enum Argument { kOut = 7, kLse, kDOut, kDLse, kDQ, kDK, kDV };

// What all tasks share.
struct Plan {
  explicit Plan(const Problem& p)
      : tiles((p.rows + kTileRows - 1) / kTileRows), visible(p.batch * p.q_length), bounds(p.batch * tiles),
        blocks(key_blocks(p, kBlock)), done(new std::atomic<int64_t>[p.batch * p.kv_heads * tiles]) {
    for (int64_t b = 0; b < p.batch; b++) {
      for (int64_t i = 0; i < p.q_length; i++) visible[b * p.q_length + i] = p.visible(b, i);
      for (int64_t r = 0; r < p.rows; r++) {
        const int64_t at = b * p.q_length + r / p.group;
        bounds[b * tiles + r / kTileRows].add(visible[at], p.mask.documents ? p.q_documents[at] : 0);
      }
    }
    for (int64_t i = 0; i < p.batch * p.kv_heads * tiles; i++) done[i] = -1;
  }

  bool skips(int64_t b, int64_t tile, int64_t block) const { return disjoint(bounds[b * tiles + tile], blocks[b][block]); }

  // Blocks until every earlier contribution to this tile of dQ has been added.
  void wait_for_turn(int64_t b, int64_t pair, int64_t tile, int64_t block) const {
    int64_t previous = block - 1;
    while (previous >= 0 && skips(b, tile, previous)) previous--;
    for (int64_t spins = 0; done[pair * tiles + tile].load(std::memory_order_acquire) != previous; spins++) {
      if (spins > 1000) sched_yield();
    }
  }
  void finish_turn(int64_t pair, int64_t tile, int64_t block) const {
    done[pair * tiles + tile].store(block, std::memory_order_release);
  }

  int64_t tiles;
  std::vector<Interval> visible;   // (batch, q_length)
  std::vector<RowBounds> bounds;   // (batch, tiles)
  std::vector<std::vector<KeyBounds>> blocks;
  std::unique_ptr<std::atomic<int64_t>[]> done;  // (batch * kv_heads, tiles): last block added to dQ
};

struct Row {
  float lse, delta, slope, position;  // lse and slope in base 2
  Interval keys;
  int32_t document;
};

// Everything one thread works on.
struct Scratch {
  explicit Scratch(const Problem& p)
      : stride(tile_stride(p.dim)), panel_size(p.dim * kPanel), keys(make_buffer(kBlock * stride)),
        panels(make_buffer(4 * kPanels * panel_size)), query(make_buffer(kTileRows * stride)),
        d_out(make_buffer(kTileRows * stride)), d_query(make_buffer(kTileRows * stride)),
        weights(make_buffer(kTileRows * kPanel)), d_scores(make_buffer(kTileRows * kScoreStride)) {}

  float* key_panel(int64_t i) { return panels.get() + i * panel_size; }
  float* value_panel(int64_t i) { return key_panel(kPanels + i); }
  float* d_key_panel(int64_t i) { return key_panel(2 * kPanels + i); }
  float* d_value_panel(int64_t i) { return key_panel(3 * kPanels + i); }

  int64_t stride, panel_size;
  Buffer keys;     // (kBlock, stride)
  Buffer panels;   // K, V, dK, dV, each (kPanels, dim, kPanel)
  Buffer query;    // (kTileRows, stride), times scale * log2(e)
  Buffer d_out;    // (kTileRows, stride)
  Buffer d_query;  // (kTileRows, stride)
  Buffer weights;  // (kTileRows, kPanel)
  Buffer d_scores;  // (kTileRows, kScoreStride)
  int64_t count = 0;  // rows of the tile in use
  std::array<Row, kTileRows> rows;
  std::array<int32_t, kBlock> documents;  // of the keys
  std::vector<KeyBounds> panel_bounds;
};

template <typename T>
void load_keys(const Problem& p, int64_t b, int64_t h, const KeyBounds& block, const AotArgs& args, Scratch& s) {
  const T *key[kBlock], *value[kBlock];
  const int64_t count = block.end - block.begin;
  for (int64_t j = 0; j < kBlock; j++) {
    const int64_t at = p.k_offset(b, h, block.begin + j);
    key[j] = j < count ? args.ptr<T>(1) + at : nullptr;
    value[j] = j < count ? args.ptr<T>(2) + at : nullptr;
  }
  copy_rows(key, count, p.dim, 1.f, s.keys.get(), s.stride);
  s.panel_bounds.clear();
  for (int64_t i = 0; i < kPanels; i++) {
    load_transposed(key + i * kPanel, p.dim, 1.f, s.key_panel(i));
    load_transposed(value + i * kPanel, p.dim, 1.f, s.value_panel(i));
    const int64_t first = block.begin + i * kPanel, last = std::min<int64_t>(block.end, first + kPanel);
    if (first < last) s.panel_bounds.emplace_back(p, b, first, last);
  }
  std::fill_n(s.d_key_panel(0), 2 * kPanels * s.panel_size, 0.f);
  if (p.mask.documents) std::copy_n(p.k_documents + b * p.kv_length + block.begin, count, s.documents.begin());
}

template <typename T>
void load_tile(const Problem& p, const Plan& plan, int64_t b, int64_t h, int64_t tile, const float* delta,
               const AotArgs& args, Scratch& s) {
  const T *query[kTileRows], *d_out[kTileRows];
  const int64_t first = tile * kTileRows;
  s.count = std::min(kTileRows, p.rows - first);
  p.row_pointers(b, h, first, s.count, args.ptr<const T>(0), query);
  p.row_pointers(b, h, first, s.count, args.ptr<const T>(kDOut), d_out);
  copy_rows(query, s.count, p.dim, p.mask.scale * kLog2e, s.query.get(), s.stride);
  copy_rows(d_out, s.count, p.dim, 1.f, s.d_out.get(), s.stride);
  const float* lse = args.ptr<float>(kLse);
  int64_t position = first / p.group, head = first % p.group;
  for (int64_t i = 0; i < s.count; i++) {
    Row& row = s.rows[i];
    const int64_t at = (b * p.heads + h * p.group + head) * p.q_length + position;
    // A row that sees nothing has lse -infinity; +infinity makes all its weights 0.
    row.lse = lse[at] == -kInfinity ? kInfinity : lse[at] * kLog2e;
    row.delta = delta[at];
    row.slope = p.mask.alibi ? p.slopes[h * p.group + head] * kLog2e : 0.f;
    row.position = static_cast<float>(p.q_start(b) - p.k_start(b) + position);
    row.keys = plan.visible[b * p.q_length + position];
    row.document = p.mask.documents ? p.q_documents[b * p.q_length + position] : 0;
    if (++head == p.group) head = 0, position++;
  }
}

// Rows of the tile that may see keys of the panel.
Interval seeing_rows(const Problem& p, const Scratch& s, const KeyBounds& panel) {
  const auto sees = [&](const Row& row) {
    return row.keys.low < panel.end && row.keys.high > panel.begin &&
           (!p.mask.documents || (row.document >= panel.document_min && row.document <= panel.document_max));
  };
  int32_t first = 0, last = static_cast<int32_t>(s.count);
  while (first < last && !sees(s.rows[first])) first++;
  while (first < last && !sees(s.rows[last - 1])) last--;
  return {first, last};
}

// From scores and dOut V^T (in d_scores) of one panel: the weights P and dS = P (dOut V^T - delta).
template <bool kAlibi, bool kMasked>
void differentiate_softmax(const Problem& p, Scratch& s, int64_t index, Interval rows) {
  const KeyBounds& panel = s.panel_bounds[index];
  vint lane;
  for (int i = 0; i < kWidth; i++) lane[i] = i;
  for (int v = 0; v < 2; v++) {
    const vint key = splat_int(panel.begin + v * kWidth) + lane;
    const vfloat position = __builtin_convertvector(key, vfloat);
    const vint document = load_int(s.documents.data() + index * kPanel + v * kWidth);
    for (int32_t i = rows.low; i < rows.high; i++) {
      const Row& row = s.rows[i];
      float* weight = s.weights.get() + i * kPanel + v * kWidth;
      float* d_score = s.d_scores.get() + i * kScoreStride + index * kPanel + v * kWidth;
      vfloat score = load(weight);
      if (kAlibi) score += splat(row.slope) * (position - splat(row.position));
      vfloat w = exp2_nonpositive(score - splat(row.lse));
      if (kMasked) {
        vint seen = (splat_int(row.keys.low) <= key) & (key < splat_int(row.keys.high));
        if (p.mask.documents) seen &= document == splat_int(row.document);
        w = (vfloat)((vint)w & seen);
      }
      store(weight, w);
      store(d_score, w * (load(d_score) - splat(row.delta)));
    }
  }
}

// One panel of keys with the rows of the tile: adds to dK and dV, leaves dS. Returns the rows concerned.
Interval differentiate_panel(const Problem& p, Scratch& s, int64_t index, bool masked) {
  const Interval rows = masked ? seeing_rows(p, s, s.panel_bounds[index]) : Interval{0, static_cast<int32_t>(s.count)};
  const int64_t count = rows.high - rows.low;
  if (count <= 0) return {0, 0};
  mlk_count_scores(count * kPanel);
  const float *query = s.query.get() + rows.low * s.stride, *d_out = s.d_out.get() + rows.low * s.stride;
  float* weights = s.weights.get() + rows.low * kPanel;
  float* d_scores = s.d_scores.get() + rows.low * kScoreStride + index * kPanel;
  multiply<Layout::kRows>(count, kPanel, p.dim, query, s.stride, s.key_panel(index), kPanel, weights, kPanel, false);
  multiply<Layout::kRows>(count, kPanel, p.dim, d_out, s.stride, s.value_panel(index), kPanel, d_scores, kScoreStride,
                          false);
  const auto differentiate =
      p.mask.alibi ? (masked ? differentiate_softmax<true, true> : differentiate_softmax<true, false>)
                   : (masked ? differentiate_softmax<false, true> : differentiate_softmax<false, false>);
  differentiate(p, s, index, rows);
  multiply<Layout::kColumns>(p.dim, kPanel, count, d_out, s.stride, weights, kPanel, s.d_value_panel(index), kPanel,
                             true);
  multiply<Layout::kColumns>(p.dim, kPanel, count, query, s.stride, d_scores, kScoreStride, s.d_key_panel(index), kPanel,
                             true);
  return rows;
}

// One tile of rows with one block of keys: adds to dK and dV, leaves dS K in d_query.
void differentiate_tile(const Problem& p, Scratch& s, const KeyBounds& block, bool masked) {
  std::fill_n(s.d_query.get(), s.count * s.stride, 0.f);
  const int64_t columns = (p.dim + kWidth - 1) / kWidth * kWidth, panels = s.panel_bounds.size();
  Interval rows{0, 0};
  int64_t first = 0;  // panels [first, i) concern the same rows: one product for all of them
  for (int64_t i = 0; i <= panels; i++) {
    const Interval next = i < panels ? differentiate_panel(p, s, i, masked) : Interval{0, 0};
    if (i < panels && i > first && next.low == rows.low && next.high == rows.high) continue;
    if (rows.low < rows.high) {
      const int64_t keys = std::min<int64_t>(i * kPanel, block.end - block.begin) - first * kPanel;
      multiply<Layout::kRows>(rows.high - rows.low, columns, keys,
                              s.d_scores.get() + rows.low * kScoreStride + first * kPanel, kScoreStride,
                              s.keys.get() + first * kPanel * s.stride, s.stride, s.d_query.get() + rows.low * s.stride,
                              s.stride, true);
    }
    rows = next, first = i;
  }
}

template <typename T>
void run_block(const Problem& p, const Plan& plan, int64_t pair, int64_t index, const float* delta, float* d_query,
               const AotArgs& args, Scratch& s) {
  const int64_t b = pair / p.kv_heads, h = pair % p.kv_heads;
  const KeyBounds& block = plan.blocks[b][index];
  load_keys<T>(p, b, h, block, args, s);
  for (int64_t tile = 0; tile < plan.tiles; tile++) {
    if (plan.skips(b, tile, index)) continue;
    load_tile<T>(p, plan, b, h, tile, delta, args, s);
    const bool whole = complete(plan.bounds[b * plan.tiles + tile], block) && (block.end - block.begin) % kPanel == 0;
    differentiate_tile(p, s, block, !whole);
    float* row[kTileRows];
    p.row_pointers(b, h, tile * kTileRows, s.count, d_query, row);
    plan.wait_for_turn(b, pair, tile, index);
    for (int64_t i = 0; i < s.count; i++) {
      const float* add = s.d_query.get() + i * s.stride;
      for (int64_t d = 0; d < p.dim; d++) row[i][d] += add[d] * p.mask.scale;
    }
    plan.finish_turn(pair, tile, index);
  }
  float one[kPanel], ln2[kPanel];  // dK was summed over queries that were multiplied by log2(e)
  std::fill_n(one, kPanel, 1.f), std::fill_n(ln2, kPanel, kLn2);
  for (int64_t i = 0; i < static_cast<int64_t>(s.panel_bounds.size()); i++) {
    T *d_key[kPanel], *d_value[kPanel];
    for (int64_t j = 0; j < kPanel; j++) {
      const int64_t key = block.begin + i * kPanel + j, at = p.k_offset(b, h, key);
      d_key[j] = key < block.end ? args.ptr<T>(kDK) + at : nullptr;
      d_value[j] = key < block.end ? args.ptr<T>(kDV) + at : nullptr;
    }
    store_transposed(s.d_key_panel(i), p.dim, ln2, d_key);
    store_transposed(s.d_value_panel(i), p.dim, one, d_value);
  }
}

// delta = rowsum(dOut * Out) - dLse, laid out like lse. `row` counts (batch, q position, head).
template <typename T>
void compute_delta(const Problem& p, const AotArgs& args, int64_t row, float* delta) {
  const T *out = args.ptr<T>(kOut) + row * p.dim, *d_out = args.ptr<T>(kDOut) + row * p.dim;
  vfloat sum{};
  for (int64_t d = 0; d < p.dim; d += kWidth) {
    const int count = static_cast<int>(std::min<int64_t>(kWidth, p.dim - d));
    sum += load_first(out + d, count) * load_first(d_out + d, count);
  }
  const int64_t head = row % p.heads, position = row / p.heads % p.q_length, b = row / p.heads / p.q_length;
  const int64_t at = (b * p.heads + head) * p.q_length + position;
  delta[at] = hsum(sum) - args.ptr<float>(kDLse)[at];
}

template <typename T>
int run(const Problem& p, const AotArgs& args) {
  const Plan plan(p);
  const int64_t pairs = p.batch * p.kv_heads, rows = p.batch * p.q_length * p.heads;
  const int64_t block_count = (p.kv_length + kBlock - 1) / kBlock;
  const Buffer delta = make_buffer(rows);
  constexpr bool kDirect = std::is_same_v<T, float>;  // float16 gradients are summed in float32 first
  const Buffer sums = make_buffer(kDirect ? 0 : rows * p.dim);
  float* d_query = kDirect ? args.ptr<float>(kDQ) : sums.get();
#pragma omp parallel
  {
    Scratch scratch(p);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
      compute_delta<T>(p, args, row, delta.get());
      std::fill_n(d_query + row * p.dim, p.dim, 0.f);
    }
    // Keys past the valid ones (the unused end of a cache) have no block.
#pragma omp for schedule(static)
    for (int64_t j = 0; j < p.batch * p.kv_length; j++) {
      if (j % p.kv_length < p.valid_keys(j / p.kv_length)) continue;
      std::memset(args.ptr<T>(kDK) + j * p.kv_heads * p.dim, 0, p.kv_heads * p.dim * sizeof(T));
      std::memset(args.ptr<T>(kDV) + j * p.kv_heads * p.dim, 0, p.kv_heads * p.dim * sizeof(T));
    }
    // In ascending order of blocks, so that whoever a task waits for has been started before it. As many heads at a
    // time as threads: nobody has to wait, and the rows of these heads stay in the cache.
    const int64_t together = std::min<int64_t>(omp_get_num_threads(), pairs);
#pragma omp for schedule(monotonic : dynamic, 1)
    for (int64_t t = 0; t < block_count * pairs; t++) {
      const int64_t group = t / (block_count * together) * together, width = std::min(together, pairs - group);
      const int64_t rest = t - group * block_count, pair = group + rest % width, block = rest / width;
      if (block >= static_cast<int64_t>(plan.blocks[pair / p.kv_heads].size())) continue;
      run_block<T>(p, plan, pair, block, delta.get(), d_query, args, scratch);
    }
    if constexpr (!kDirect) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < rows * p.dim; i++) from_float(args.ptr<T>(kDQ) + i, d_query[i]);
    }
  }
  return 0;
}

}  // namespace

int FlashBackwardInit(AotExtra* extra) { return read_mask(extra); }

// The inputs of FlashForward, then out, lse, d_out, d_lse -> dq, dk, dv. lse, d_lse: float32.
int FlashBackward(const AotArgs& args) {
  const Problem p(args);
  return args.is(0, "float16") ? run<half>(p, args) : run<float>(p, args);
}

}  // namespace MLK_ISA

MLK_EXPORT_WITH_INIT(FlashBackward)
