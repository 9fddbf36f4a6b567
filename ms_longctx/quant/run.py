# SPDX-License-Identifier: Apache-2.0
"""The whole job: texts, quantization, search, files and report."""

from __future__ import annotations

import logging
import resource
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ms_longctx.data.tokenizer import load_tokenizer
from ms_longctx.errors import MsLongctxError
from ms_longctx.export.output import check_output
from ms_longctx.models.checkpoint import TensorSource
from ms_longctx.quant.checkpoint import QuantizedCheckpoint
from ms_longctx.quant.files import LAYOUTS, save_quantized
from ms_longctx.quant.layer import UNITS
from ms_longctx.quant.measure import Accuracy
from ms_longctx.quant.memory import release_memory
from ms_longctx.quant.methods import KEPT, Method, make_method
from ms_longctx.quant.mindir import open_weights
from ms_longctx.quant.model import Levels, QuantizedModel
from ms_longctx.quant.quantizer import Quantizer
from ms_longctx.quant.search import NotReached, Search
from ms_longctx.quant.texts import cut_windows, read_texts, split_heldout

log = logging.getLogger(__name__)
DEFAULT_THRESHOLD = {"int8": 0.98}  # int4 has none: what it loses is reported


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        model: Hugging Face directory, ``.gguf`` file, or exported MindIR.
        output: directory to write.
        calibrate_data: JSON lines to calibrate on.
        heldout_data: JSON lines to measure on; ``None``: every tenth text of ``calibrate_data``, kept apart.
        tokenizer: if it is not beside the model.
        method: int8, awq, gptq or rtn.
        layout: of the files; ``None``: awq for int4, compressed-tensors for int8.
        accuracy_threshold: see :meth:`Accuracy.holds`; ``None``: 0.98 for int8, none for int4.
        max_kept: largest share of the weights that may stay fp16.
        samples, seq_length: windows to calibrate on, and tokens of each.
        heldout_samples: windows to measure on.
        group_size: of int4; ``None``: the largest up to 128 that divides all matrices.
        activations: token or none, of int8.
        alpha: of SmoothQuant; ``None``: searched.
        head: int8 or fp: embedding and output head.
    """

    model: str
    output: str
    calibrate_data: str
    heldout_data: str | None = None
    tokenizer: str | None = None
    method: str = "int8"
    layout: str | None = None
    accuracy_threshold: float | None = None
    max_kept: float = 0.2
    samples: int = 512
    seq_length: int = 256
    heldout_samples: int = 32
    group_size: int | None = None
    activations: str = "none"
    alpha: float | None = None
    head: str = "int8"


def quantize(options: Options) -> tuple[dict[str, Any], list[str]]:
    """Quantize, search, write; the report and the table of units.

    Raises:
        NotReached: nothing is written; the exception carries the table as ``table``.
        MsLongctxError: bad input, or the output cannot be written.
    """
    start = time.perf_counter()
    layout = _layout(options)
    check_output(Path(options.output))
    source = open_weights(Path(options.model))
    if isinstance(source, QuantizedCheckpoint):
        raise MsLongctxError(f"--model {options.model} is quantized already; start from the original weights")
    int8 = {"activations": options.activations, "alpha": options.alpha} if options.method == "int8" else {}
    method = make_method(options.method, source.config, options.group_size, **int8)
    quantizer = _quantizer(options, source, method)
    release_memory()  # of texts and tokenizer
    threshold = options.accuracy_threshold
    if threshold is None:
        threshold = DEFAULT_THRESHOLD.get(options.method, 0.0)
    model, accuracy, table = decide(quantizer, method, threshold, options.max_kept)
    report = _report(replace(options, layout=layout), model, accuracy, threshold, time.perf_counter() - start)
    report["table"] = table
    save_quantized(model, Path(options.output), layout, report)
    return report, table


def decide(
    quantizer: Quantizer, method: Method, threshold: float, max_kept: float
) -> tuple[QuantizedModel, Accuracy, list[str]]:
    """The model that holds the threshold, its accuracy, and a line for each unit where a search was needed.

    Levels are searched with every matrix rounded by itself, so that any choice of levels can be measured at once. Then
    all layers are rounded again for what the ones before them give, which makes up for most of what is left.
    """
    if method.propagates:
        levels, table = _search_levels(quantizer, threshold, max_kept) if threshold > 0 else ({}, [])
        model, comparison = quantizer.run(levels, propagate=True)
        accuracy = comparison.measure(quantizer.measure_states(model), model.rows)
        log.info("layers rounded for one another: %s", accuracy)
    else:
        model, accuracy, table = _search(quantizer, threshold, max_kept)
    if not accuracy.holds(threshold):
        raise NotReached(
            f"--accuracy_threshold {threshold} is out of reach with at most {max_kept:.0%} of the weights kept in "
            f"fp16: {accuracy}; lower it, raise --max_kept, use --head fp, or calibrate on more text like it",
            table,
        )
    return model, accuracy, table


def _search(quantizer: Quantizer, threshold: float, max_kept: float) -> tuple[QuantizedModel, Accuracy, list[str]]:
    search = Search(quantizer, threshold, max_kept)
    accuracy = search.run()
    return search.model, accuracy, list(search.table())


def _search_levels(quantizer: Quantizer, threshold: float, max_kept: float) -> tuple[Levels, list[str]]:
    model, _, table = _search(quantizer, threshold, max_kept)
    return model.levels, table  # and not the model, whose memory is needed


def _layout(options: Options) -> str:
    is_int8 = options.method == "int8"
    layout = options.layout or ("compressed-tensors" if is_int8 else "awq")
    if layout not in LAYOUTS or (is_int8 and layout == "awq"):
        expected = "compressed-tensors" if is_int8 else " or ".join(LAYOUTS)
        raise MsLongctxError(f"--layout {layout}: --method {options.method} is stored as {expected}")
    return layout


def _quantizer(options: Options, source: TensorSource, method: Any) -> Quantizer:
    tokenizer = load_tokenizer(options.tokenizer or source.path)
    if tokenizer.vocab_size > source.config.vocab_size:
        raise MsLongctxError("the tokenizer has more tokens than the model; give the model's own as --tokenizer")
    length = options.seq_length
    texts = read_texts(options.calibrate_data, tokenizer, options.samples * length)
    if options.heldout_data is None:
        texts, heldout = split_heldout(texts)
    else:
        heldout = read_texts(options.heldout_data, tokenizer, options.heldout_samples * length)
    return Quantizer(
        source,
        method,
        cut_windows(texts, tokenizer, options.samples, length),
        cut_windows(heldout, tokenizer, options.heldout_samples, length),
        options.head == "int8",
    )


def _report(
    options: Options, model: QuantizedModel, accuracy: Accuracy, threshold: float, seconds: float
) -> dict[str, Any]:
    lowest = model.method.levels[0]
    raised = {f"{layer}.{unit}": model.levels[layer, unit] for layer, unit in sorted(model.levels)}
    units = model.layers * len(UNITS)
    counts = {level: sum(found == level for found in raised.values()) for level in model.method.levels[1:]}
    return {
        "options": asdict(options),
        "group_size": getattr(model.method, "group", None),
        "accuracy_threshold": threshold,
        "accuracy": {**asdict(accuracy), "perplexity_ratio": accuracy.ratio},
        "units": {lowest: units - len(raised), **counts},
        "raised_units": raised,
        "kept_in_fp16": [name for name, level in raised.items() if level == KEPT],
        "seconds": round(seconds, 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
