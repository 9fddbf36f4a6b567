# SPDX-License-Identifier: Apache-2.0
"""Asks a served model for the logits of given tokens (Python 3.7, part of bench_export.py).

``serving_client.py FOLDER rest|grpc HOST:PORT REQUEST.json LOGITS.npy``; the request has ``ids`` and ``tokens``.
Prints the median milliseconds of a token.
"""

import json
import statistics
import sys
import time

import numpy as np


def main(folder: str, transport: str, address: str, request: str, output: str) -> None:
    """Read the prompt, append the tokens, write the logits after each."""
    sys.path.insert(0, folder)
    import client  # the one that was exported

    call = client.Rest(address) if transport == "rest" else client.Grpc(address)
    with open(request, encoding="utf-8") as file:
        asked = json.load(file)
    logits, seconds = [call("prefill", session=1, ids=asked["ids"])["logits"]], []
    for token in asked["tokens"]:
        started = time.perf_counter()
        logits.append(call("decode", session=1, token=token)["logits"])
        seconds.append(time.perf_counter() - started)
    call("close", session=1)
    np.save(output, np.array(logits, np.float32))
    print(statistics.median(seconds) * 1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
