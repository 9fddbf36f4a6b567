# SPDX-License-Identifier: Apache-2.0
"""Methods of this servable for MindSpore Serving 2.0 (Python 3.7): ``prefill``, ``decode`` and ``close``.

The keys and values of a conversation stay here, under a number that the client chooses; only tokens and logits travel.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from mindspore_serving.server import register

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from session import CacheSession  # noqa: E402  (beside this file)

with open(os.path.join(HERE, "shape.json"), encoding="utf-8") as stream:
    SHAPE = json.load(stream)
MAX_SESSIONS = int(os.environ.get("MS_LONGCTX_SESSIONS", "8"))  # the longest unused is forgotten

prefill_model = register.declare_model(model_file="prefill.mindir", model_format="MindIR", with_batch_dim=False)
decode_model = register.declare_model(model_file="decode.mindir", model_format="MindIR", with_batch_dim=False)
_models = {"prefill": prefill_model, "decode": decode_model}
_sessions = OrderedDict()  # type: OrderedDict[int, CacheSession]
_lock = threading.Lock()


def _run(role: str, arrays: list[Any]) -> Any:
    return _models[role].call(*arrays)


def _answer(logits: Any) -> tuple[Any, Any]:
    return logits[0], np.int32(logits[0].argmax())


def start_session(session: Any, ids: Any) -> tuple[Any, Any]:
    """Read a prompt; logits of the next token and the likeliest one."""
    prompt = [int(token) for token in np.asarray(ids).reshape(-1)]
    if not prompt or min(prompt) < 0 or max(prompt) >= SHAPE["vocab_size"]:
        raise ValueError(f"ids should be one or more token ids from 0 to {SHAPE['vocab_size'] - 1}")
    new = CacheSession(_run, SHAPE, [prompt], np.float32, 0)
    logits = new.prefill()
    with _lock:
        _sessions[int(session)] = new
        _sessions.move_to_end(int(session))
        while len(_sessions) > MAX_SESSIONS:
            _sessions.popitem(last=False)
    return _answer(logits)


def continue_session(session: Any, token: Any) -> tuple[Any, Any]:
    """Append one token; logits of the next token and the likeliest one."""
    with _lock:
        found = _sessions.get(int(session))
        if found is None:
            raise ValueError(f"no session {int(session)}: prefill starts one, {MAX_SESSIONS} are kept")
        _sessions.move_to_end(int(session))
    return _answer(found.step([int(token)]))


def end_session(session: Any) -> Any:
    """Forget a session; 1 if there was one, else 0."""
    with _lock:
        return np.int32(_sessions.pop(int(session), None) is not None)


@register.register_method(output_names=["logits", "token"])
def prefill(session: Any, ids: Any) -> Any:
    """``session`` int32, ``ids (n,)`` int32 -> ``logits (V,)`` fp32, ``token`` int32."""
    logits, token = register.add_stage(start_session, session, ids, outputs_count=2)
    return logits, token


@register.register_method(output_names=["logits", "token"])
def decode(session: Any, token: Any) -> Any:
    """``session`` int32, ``token`` int32 -> ``logits (V,)`` fp32, ``token`` int32."""
    logits, following = register.add_stage(continue_session, session, token, outputs_count=2)
    return logits, following


@register.register_method(output_names=["closed"])
def close(session: Any) -> Any:
    """``session`` int32 -> ``closed`` int32."""
    closed = register.add_stage(end_session, session, outputs_count=1)
    return closed
