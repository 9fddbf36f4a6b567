# SPDX-License-Identifier: Apache-2.0
"""One simulated rank: compiles the training program of a small Llama and writes down what became of it.

python program_worker.py RESULT.json GRAPHS [--section.key=value ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mindspore.communication import GlobalComm, get_process_group_ranks

from ms_longctx.config import load_config
from ms_longctx.errors import MsLongctxError
from ms_longctx.parallel.dryrun.graph_file import find_graph_file, read_graph_file
from ms_longctx.parallel.program import compile_program
from ms_longctx.parallel.strategy import Strategy

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def main(result_path: str, graphs: str, overrides: list[str], rank: int, workers: int) -> None:
    """Compile and write."""
    base = [f"--model.{name}={value}" for name, value in MODEL.items()]
    run = load_config(None, [*base, "--data.seq_length=256", "--train.dtype=bf16", *overrides])
    result: dict[str, object]
    try:
        program = compile_program(run, Strategy.from_config(run, workers))
    except MsLongctxError as error:
        result = {"refused": str(error)}
    else:
        graph = read_graph_file(find_graph_file(Path(graphs), rank))
        operators = [
            [execution.operator.name, ranks_of(execution.operator.group, workers), execution.times]
            + [[list(tensor.shape) for tensor in execution.operator.inputs]]
            for execution in graph.communication()
        ]
        result = {
            "full": program.full_shapes,
            "pieces": {name: list(tensor.shape) for name, tensor in graph.parameters.items()},
            "shapes": {parameter.name: list(parameter.shape) for parameter in program.model.trainable_params()},
            "shares": [float(share.asnumpy()) for share in program.cell.network.norm.shares],
            "inputs": [list(tensor.shape) for tensor in program.inputs],
            "operators": operators,
        }
    Path(result_path).write_text(json.dumps(result))


def ranks_of(group: str, workers: int) -> list[int]:
    """Ranks of a communication group; a simulation knows those of the world by its size only."""
    return list(range(workers)) if group == GlobalComm.WORLD_COMM_GROUP else sorted(get_process_group_ranks(group))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:], int(os.environ["RANK_ID"]), int(os.environ["RANK_SIZE"]))
    sys.stdout.flush()
    os._exit(0)  # the exit of a simulated process takes seconds and may crash
