# SPDX-License-Identifier: Apache-2.0
"""A client of the server beside it: greedy answers over REST or gRPC.

``python client.py --prompt TEXT`` (Python with ms_longctx, which has the tokenizer) or, with token ids only,
``python3.7 client.py --ids 504,6376``. gRPC speaks through Serving's own client under Python 3.7; with ``--prompt``
this program starts it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import urllib.error
import urllib.request
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class Rest:
    """REST: JSON in, JSON out.

    Args:
        address: ``host:port``.
    """

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/model/llama:"

    def __call__(self, method: str, **inputs: Any) -> dict[str, Any]:
        body = json.dumps({"instances": [inputs]}).encode()
        request = urllib.request.Request(self._url + method, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"error: the server says: {error.read().decode(errors='replace').strip()}") from error
        except OSError as error:
            raise SystemExit(
                f"error: {self._url.rpartition('/model')[0]} gives no answer ({error}); is start.sh running there?"
            ) from error
        if "instances" not in answer or "error_msg" in answer["instances"][0]:
            raise SystemExit(f"error: the server says: {answer}")
        found: dict[str, Any] = answer["instances"][0]
        return found


class Grpc:
    """gRPC through ``mindspore_serving.client``.

    Args:
        address: ``host:port``.
    """

    def __init__(self, address: str) -> None:
        from mindspore_serving.client import Client

        self._clients = {name: Client(address, "llama", name) for name in ("prefill", "decode", "close")}

    def __call__(self, method: str, **inputs: Any) -> dict[str, Any]:
        import numpy as np

        reply = self._clients[method].infer([{name: np.asarray(value, np.int32) for name, value in inputs.items()}])
        if not isinstance(reply, (list, tuple)) or "error" in reply[0]:
            raise SystemExit(f"error: the server says: {reply}")
        found: dict[str, Any] = reply[0]
        return found


def answer(call: Any, ids: list[int], count: int, stop: list[int]) -> list[int]:
    """Token ids of a greedy answer, the end token included."""
    session = random.randrange(1, 2**31)
    tokens = [int(call("prefill", session=session, ids=ids)["token"])]
    while tokens[-1] not in stop and len(tokens) < count:
        tokens.append(int(call("decode", session=session, token=tokens[-1])["token"]))
    call("close", session=session)
    return tokens


def answer_text(args: argparse.Namespace) -> str:
    """The text of an answer to ``--prompt``."""
    from ms_longctx.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(HERE)
    ids = tokenizer.encode_chat([{"role": "user", "content": args.prompt}], add_generation_prompt=True)
    stop = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if args.transport == "rest":
        tokens = answer(Rest(args.address), ids, args.max_new_tokens, stop)
    else:
        from ms_longctx.export.environment import lite_python

        command = [str(lite_python()), __file__, "--transport", "grpc", "--address", args.address]
        command += ["--ids", ",".join(map(str, ids)), "--max_new_tokens", str(args.max_new_tokens)]
        command += ["--stop", ",".join(map(str, stop))]
        answered = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if answered.returncode:  # it has said why
            raise SystemExit(answered.returncode)
        tokens = json.loads(answered.stdout)
    return tokenizer.decode([token for token in tokens if token not in stop])


def main() -> None:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt")
    asked.add_argument("--ids", help="token ids, separated by commas; prints token ids as JSON")
    parser.add_argument("--transport", choices=("rest", "grpc"), default="rest")
    parser.add_argument("--address", help="host:port; default 127.0.0.1:5501 (REST) or 127.0.0.1:5500 (gRPC)")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--stop", default="", help="token ids that end an answer, with --ids")
    args = parser.parse_args()
    args.address = args.address or ("127.0.0.1:5501" if args.transport == "rest" else "127.0.0.1:5500")
    if args.prompt is not None:
        print(answer_text(args))
        return
    ids, stop = ([int(word) for word in text.split(",") if word] for text in (args.ids, args.stop))
    call = Rest(args.address) if args.transport == "rest" else Grpc(args.address)
    print(json.dumps(answer(call, ids, args.max_new_tokens, stop)))


if __name__ == "__main__":
    main()
