# SPDX-License-Identifier: Apache-2.0
"""MindSpore Serving 2.0.2 itself serves the folder; both clients get the model's greedy tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.environment import find_python37, lite_python
from ms_longctx.export.plan import Plan
from ms_longctx.export.serving import export_serving
from tests.export.tiny import PROMPTS, greedy, tiny_model
from tests.parallel.processes import free_port


def _missing() -> str:
    try:
        find_python37()
    except MsLongctxError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_missing()), reason=_missing() or "Python 3.7 is there")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, int]]:
    """The folder of a tiny model, and the ports of gRPC and REST while it is served."""
    # A short path: Serving puts Unix sockets below it, whose names are limited.
    folder = tmp_path_factory.mktemp("s") / "out"
    export_serving(tiny_model(), folder, Plan((21,), chunk=5))
    grpc, rest = free_port(), free_port()
    command = ["./start.sh", "--grpc_port", str(grpc), "--rest_port", str(rest)]
    environment = {name: value for name, value in os.environ.items() if name != "MS_LONGCTX_LITE_LINKED"}
    environment["PYTHON37"] = str(lite_python())
    log = folder.parent / "log"  # a file: the server goes on when nobody reads
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while "\nserving /" not in log.read_text():
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield folder, grpc, rest
    server.terminate()
    server.wait(30)


def client(python: str, folder: Path, *arguments: str) -> Any:
    result = subprocess.run([python, str(folder / "client.py"), *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def post(port: int, method: str, **inputs: Any) -> dict[str, Any]:
    body = json.dumps({"instances": [inputs]}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/model/llama:{method}", body, timeout=30) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def test_served_tokens_are_the_models(served: tuple[Path, int, int]) -> None:
    folder, grpc, rest = served
    wanted = [row[0] for row in greedy(tiny_model(), PROMPTS[:1], 8)]
    ids = ("--ids", ",".join(map(str, PROMPTS[0])), "--max_new_tokens", "8")
    assert client(sys.executable, folder, *ids, "--address", f"127.0.0.1:{rest}") == wanted
    over_grpc = ("--transport", "grpc", "--address", f"127.0.0.1:{grpc}")
    assert client(str(lite_python()), folder, *ids, *over_grpc) == wanted


def test_server_refuses(served: tuple[Path, int, int]) -> None:
    """Mistakes come back as messages, and the server goes on."""
    rest = served[2]
    assert "no session 5" in post(rest, "decode", session=5, token=1)["error_msg"]
    assert "30 tokens, but the cache has 21" in post(rest, "prefill", session=5, ids=list(range(30)))["error_msg"]
    assert "from 0 to 100" in post(rest, "prefill", session=5, ids=[101])["error_msg"]
    assert "token" in post(rest, "prefill", session=5, ids=[1] * 21)["instances"][0]
    assert "cache of 21 columns is full" in post(rest, "decode", session=5, token=1)["error_msg"]
    assert post(rest, "close", session=5)["instances"][0]["closed"] == 1
    assert post(rest, "close", session=5)["instances"][0]["closed"] == 0


def test_occupied_port(served: tuple[Path, int, int]) -> None:
    """A second server on the same port says so and ends; the first one goes on."""
    folder, grpc, rest = served
    command = ["./start.sh", "--grpc_port", str(free_port()), "--rest_port", str(rest)]
    environment = {**os.environ, "PYTHON37": str(lite_python())}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        f"error: 127.0.0.1:{rest}: Address already in use; choose others with --grpc_port and --rest_port"
    ]
    time.sleep(2)  # it would have stopped within that
    assert post(rest, "close", session=5)["instances"][0]["closed"] == 0
    command = [sys.executable, "client.py", "--ids", "1", "--address", f"127.0.0.1:{free_port()}"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "is start.sh running there?" in result.stderr and "Traceback" not in result.stderr
