// SPDX-License-Identifier: Apache-2.0
// Longest common subsequences of two long texts, whole and sentence by sentence; ms_longctx/metrics/alignment.py
// defines what is computed and holds the same in Python.
//
// Hyyro's bit-parallel recurrence (AWOCA 2004), v = (v + (v & m)) | (v - (v & m)), run over the words of v that the
// token occurs in and those its carries reach, so a rare token costs a few words however long the text is.
#include <algorithm>
#include <cstdint>
#include <vector>

#ifdef MLK_IS_BASELINE  // integer code: one variant serves every CPU

namespace {

using Word = uint64_t;

struct Text {
  const int32_t* tokens;
  const int64_t* ends;  // of each sentence, in tokens
  int64_t sentences;
  int64_t begin(int64_t i) const { return i ? ends[i - 1] : 0; }
  int64_t size() const { return sentences ? ends[sentences - 1] : 0; }
};

// The prediction as bits, each sentence followed by a guard bit that no token matches. A guard that is set lets a
// carry through, a guard that is kept clear stops it.
class Index {
 public:
  Index(const Text& text, int32_t vocabulary) : text_(text) {
    const int64_t bits = text.size() + text.sentences;
    inside_.assign(bits / 64 + 1, 0);
    all_.assign(bits / 64 + 1, 0);
    for (int64_t bit = 0; bit < bits; bit++) all_[bit / 64] |= Word(1) << (bit % 64);
    places_.resize(vocabulary);
    for (int64_t s = 0; s < text.sentences; s++) {
      for (int64_t t = text.begin(s); t < text.ends[s]; t++) add(text.tokens[t], t + s);
    }
  }

  int64_t common(const int32_t* tokens, int64_t count) const {
    std::vector<Word> state = all_;
    for (int64_t t = 0; t < count; t++) step(state, all_, tokens[t]);
    int64_t zeros = 0;
    for (size_t w = 0; w < state.size(); w++) zeros += __builtin_popcountll(all_[w] & ~state[w]);
    return zeros;
  }

  // Longest common subsequence of the tokens with each sentence.
  void common_by_sentence(const int32_t* tokens, int64_t count, std::vector<Word>& state, int64_t* out) const {
    state = inside_;
    for (int64_t t = 0; t < count; t++) step(state, inside_, tokens[t]);
    for (int64_t s = 0; s < text_.sentences; s++) out[s] = zeros(state, text_.begin(s) + s, text_.ends[s] + s);
  }

 private:
  struct Place {
    int64_t word;
    Word mask;
  };

  void add(int32_t token, int64_t bit) {
    std::vector<Place>& places = places_[token];
    const Word mask = Word(1) << (bit % 64);
    inside_[bit / 64] |= mask;
    if (places.empty() || places.back().word != bit / 64) places.push_back({bit / 64, 0});
    places.back().mask |= mask;
  }

  void step(std::vector<Word>& state, const std::vector<Word>& keep, int32_t token) const {
    const int64_t words = static_cast<int64_t>(state.size());
    bool carry = false;
    int64_t next = 0;  // the word that a carry would enter
    for (const Place& place : places_[token]) {
      for (; carry && next < place.word; next++) carry = add_to(state[next], keep[next], 0, true);
      carry = add_to(state[place.word], keep[place.word], place.mask, carry && next == place.word);
      next = place.word + 1;
    }
    for (; carry && next < words; next++) carry = add_to(state[next], keep[next], 0, true);
  }

  static bool add_to(Word& v, Word keep, Word mask, bool carry_in) {
    const Word hit = v & mask;
    Word sum;
    bool carry = __builtin_add_overflow(v, hit, &sum);
    carry |= __builtin_add_overflow(sum, static_cast<Word>(carry_in), &sum);
    v = (sum | (v - hit)) & keep;
    return carry;
  }

  static int64_t zeros(const std::vector<Word>& state, int64_t from, int64_t to) {
    int64_t count = 0;
    while (from < to) {
      const int64_t stop = std::min(to, (from / 64 + 1) * 64);
      const Word span = stop - from == 64 ? ~Word(0) : ((Word(1) << (stop - from)) - 1) << (from % 64);
      count += __builtin_popcountll(~state[from / 64] & span);
      from = stop;
    }
    return count;
  }

  Text text_;
  std::vector<Word> inside_, all_;
  std::vector<std::vector<Place>> places_;
};

}  // namespace

// Tokens are numbers below `vocabulary`. Writes {common, in_order, anywhere} of alignment.py's Alignment to `out`.
extern "C" __attribute__((visibility("default"))) void ms_longctx_text_alignment(
    const int32_t* prediction, const int64_t* prediction_ends, int64_t prediction_sentences, const int32_t* reference,
    const int64_t* reference_ends, int64_t reference_sentences, int32_t vocabulary, int64_t* out) {
  const Text predicted{prediction, prediction_ends, prediction_sentences};
  const Text wanted{reference, reference_ends, reference_sentences};
  const Index index(predicted, vocabulary);
  out[0] = index.common(reference, wanted.size());
  out[2] = 0;
  std::vector<Word> state;
  std::vector<int64_t> shared(predicted.sentences), best(predicted.sentences + 1, 0);
  for (int64_t i = 0; i < wanted.sentences; i++) {
    const int64_t begin = wanted.begin(i);
    index.common_by_sentence(reference + begin, wanted.ends[i] - begin, state, shared.data());
    int64_t before = 0, top = 0;  // best[j] of the row above, maximum of the new row so far
    for (int64_t j = 0; j < predicted.sentences; j++) {
      const int64_t paired = before + shared[j];
      before = best[j + 1];
      top = std::max({top, before, paired});
      best[j + 1] = top;
    }
    if (predicted.sentences) out[2] += *std::max_element(shared.begin(), shared.end());
  }
  out[1] = best.back();
}

#endif  // MLK_IS_BASELINE
