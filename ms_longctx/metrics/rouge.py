# SPDX-License-Identifier: Apache-2.0
"""RougeLXT: ROUGE for long texts, with a penalty on the order of sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rouge_score_rs import RougeScorer

from ms_longctx.errors import MsLongctxError
from ms_longctx.metrics.alignment import align
from ms_longctx.metrics.sentences import MixedTokenizer, has_characters, split_sentences

_NATIVE = ("rouge1", "rouge2", "rougeLsum")
_SUPPORTED = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class RougeLXT:
    r"""ROUGE-L extended to long texts: sentences must be there, and in order.

    ROUGE-L (Lin, 2004) takes the longest common subsequence of tokens. On texts of thousands of tokens that
    rewards chance: common words line up whatever the texts say, and a shuffled text still scores high.
    RougeLXT lines up whole sentences instead and charges for the order.

    Let the reference have sentences r_1..r_n and the prediction p_1..p_m (:func:`split_sentences`), and let
    ``w(i, j)`` be the length of the longest common subsequence of r_i and p_j in tokens.

    - ``in_order``: the largest sum of w(i, j) over pairs (i, j) in which each sentence occurs once at most
      and that rise together in i and j. Skipped and shuffled sentences are missing from it.
    - ``anywhere``: the sum over i of max_j w(i, j), what the prediction holds of each reference sentence,
      wherever it stands. It is never below ``in_order``.
    - precision = in_order / tokens of the prediction, recall = in_order / tokens of the reference,
      F = 2 precision recall / (precision + recall).
    - order penalty = 1 - in_order / anywhere: the part of the matched content that stands in the wrong order.
    - ``rougeLxt = 100 F (1 - order penalty)``, and 0 where nothing matches or a text has no tokens.

    So identical texts have 100. A skipped sentence costs its recall; a shuffled one costs precision, recall
    and the order penalty; a repeated one matches once and costs precision. For texts of one sentence
    rougeLxt equals rougeL.

    Worked example, reference ``A B C`` of 4 + 4 + 3 = 11 tokens without a common word:

    >>> a, b, c = "Ann opened the box.", "Bob read a letter.", "Carl left town."
    >>> rouge = RougeLXT()
    >>> def lxt(*sentences):
    ...     return round(rouge.score(" ".join(sentences), " ".join([a, b, c]))["rougeLxt"], 2)
    >>> lxt(a, b, c)     # in_order 11 of 11
    100.0
    >>> lxt(a, c)        # B skipped: in_order 7, P 7/7, R 7/11, F 14/18; anywhere 7: no order penalty
    77.78
    >>> lxt(c, a, b)     # C moved: in_order 8, P = R = F = 8/11; anywhere 11: times 8/11
    52.89
    >>> lxt(a, b, b, c)  # B twice: in_order 11, P 11/15, R 1, F 22/26; anywhere 11
    84.62
    >>> lxt("")
    0.0

    rouge1, rouge2 (and rougeLsum on request) come from the rouge-score-rs library and, like rougeL, equal
    Google's rouge-score on text it has tokens for; Chinese, Japanese and Korean characters count as one
    token each on top of that. All scores are F-measures in percent; :meth:`compute` gives their mean.

    Texts are scored as they come and only sums are kept. Within a pair, time grows with the product of the
    lengths divided by the machine's word, memory with their sum.

    Args:
        use_stemmer: match English words by their Porter stem, as rouge-score does.
        rouge_types: what to report beside rougeLxt, out of rouge1, rouge2, rougeL, rougeLsum. rougeLsum
            (sentences separated by line breaks) takes seconds on texts of 32K tokens.

    Raises:
        MsLongctxError: an unknown rouge type.
    """

    def __init__(self, use_stemmer: bool = False, rouge_types: Sequence[str] = ("rouge1", "rouge2", "rougeL")) -> None:
        unknown = [name for name in rouge_types if name not in _SUPPORTED]
        if unknown:
            raise MsLongctxError(f"rouge_types: {unknown[0]!r} is not one of {', '.join(_SUPPORTED)}")
        self._types = tuple(rouge_types)
        native = [name for name in self._types if name in _NATIVE]
        self._tokenizer = MixedTokenizer(use_stemmer)
        self._latin = RougeScorer(native, use_stemmer=use_stemmer)
        self._mixed = RougeScorer(native, tokenizer=self._tokenizer)
        self.reset()

    def reset(self) -> None:
        """Forget all pairs."""
        self._pairs = 0
        self._sums = dict.fromkeys(("rougeLxt", *self._types), 0.0)

    def add_batch(self, *, predictions: Iterable[str], references: Iterable[str]) -> None:
        """Score pairs and add them to the mean.

        Args:
            predictions: generated texts.
            references: the text each of them should be, same number.

        Raises:
            MsLongctxError: the numbers differ, or an item is not a string; no pair is added then.
        """
        predicted, wanted = _texts("predictions", predictions), _texts("references", references)
        if len(predicted) != len(wanted):
            raise MsLongctxError(f"{len(predicted)} predictions but {len(wanted)} references; each needs the other")
        for prediction, reference in zip(predicted, wanted, strict=True):
            for name, value in self.score(prediction, reference).items():
                self._sums[name] += value
            self._pairs += 1

    def compute(self) -> dict[str, float]:
        """Mean F-measures in percent over all pairs added since the last :meth:`reset`.

        Raises:
            MsLongctxError: no pair was added.
        """
        if not self._pairs:
            raise MsLongctxError("RougeLXT.compute: no pairs were added; call add_batch first")
        return {name: total / self._pairs for name, total in self._sums.items()}

    def score(self, prediction: str, reference: str) -> dict[str, float]:
        """F-measures of one pair in percent: rougeLxt and the chosen rouge types."""
        mixed = has_characters(prediction) or has_characters(reference)
        native = (self._mixed if mixed else self._latin).score(reference, prediction)
        found = {name: 100.0 * score.fmeasure for name, score in native.items()}
        found |= self._subsequence_scores(prediction, reference)
        return {name: found[name] for name in self._sums}

    def _subsequence_scores(self, prediction: str, reference: str) -> dict[str, float]:
        predicted, wanted = self._sentences(prediction), self._sentences(reference)
        if not predicted or not wanted:
            return {"rougeLxt": 0.0, "rougeL": 0.0}
        sizes = sum(map(len, predicted)), sum(map(len, wanted))
        shared = align(predicted, wanted)
        order = shared.in_order / shared.anywhere if shared.anywhere else 0.0
        return {
            "rougeLxt": 100.0 * _fmeasure(shared.in_order, *sizes) * order,
            "rougeL": 100.0 * _fmeasure(shared.common, *sizes),
        }

    def _sentences(self, text: str) -> list[list[str]]:
        sentences = (self._tokenizer.tokenize(sentence) for sentence in split_sentences(text))
        return [tokens for tokens in sentences if tokens]


def _fmeasure(common: int, predicted: int, wanted: int) -> float:
    """F-measure of ``common`` tokens, in rouge-score's order of operations so that it is equal bitwise."""
    precision, recall = common / predicted, common / wanted
    return 2 * precision * recall / (precision + recall) if common else 0.0


def _texts(name: str, texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise MsLongctxError(f"{name} is one string; pass a list of strings")
    texts = list(texts)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise MsLongctxError(f"{name}[{i}] is of type {type(text).__name__}, expected a string")
    return texts
