# SPDX-License-Identifier: Apache-2.0
"""The build of the kernels: what is compiled, what a failure leaves, and the vector tools against numpy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ms_longctx import kernels
from ms_longctx.kernels.build import LIBRARY_NAME, SOURCE_DIR, KernelBuildError, build, levels

PROBE = """
#include "simd.h"
namespace MLK_ISA {
int Probe(const AotArgs& a) {
  for (int64_t i = 0; i < a.size(0); i += kWidth) {
    const int n = a.size(0) - i < kWidth ? a.size(0) - i : kWidth;
    const vfloat x = load_first(a.ptr<float>(0) + i, n);
    store_first(a.ptr<float>(1) + i, vexp(x), n);
    store_first(a.ptr<half>(2) + i, x, n);
    store_first(a.ptr<float>(3) + i, load_first(a.ptr<half>(2) + i, n), n);
  }
  return 0;
}
}
MLK_EXPORT(Probe)
"""

CHECK_PROBE = """
import sys
import numpy as np
import mindspore as ms
shapes, types = lambda x: (x, x, x), lambda x: (x, ms.float16, x)
probe = ms.ops.Custom(sys.argv[1] + ":Probe", shapes, types, func_type="aot")
x = np.concatenate([np.linspace(-110, 89, 100003), 10.0 ** np.linspace(-9, 6, 3001), [0, -0.0, np.inf, -np.inf]])
x = np.concatenate([x, -x[::7], np.arange(-1, 1, 2**-11) / 2**13]).astype(np.float32)
e, half, back = (y.asnumpy() for y in probe(ms.Tensor(x)))
with np.errstate(over="ignore"):
    expected = np.exp(x.astype(np.float64))
    normal = (expected > 1.2e-38) & (expected < 3.4e38)
    assert np.abs(e[normal] / expected[normal] - 1).max() < 2e-7
    assert (e[expected >= 3.5e38] == np.inf).all() and (e[expected < 1.1e-38] == 0).all()
    assert np.array_equal(half.view(np.uint16), x.astype(np.float16).view(np.uint16))
    assert np.array_equal(back, x.astype(np.float16).astype(np.float32))
"""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source folder with the shared headers and one probe kernel."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name in ("aot.h", "simd.h", "dispatch.cc"):
        shutil.copy(SOURCE_DIR / name, folder)
    (folder / "probe.cc").write_text(PROBE)
    (folder / "still.cc").write_text('#include "simd.h"\n')
    return folder


def objects(output: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (output / "build").glob("*.o")}


@needs_compiler
@pytest.mark.parametrize("isa", list(levels()))
def test_vector_tools(isa: str, sources: Path, tmp_path: Path) -> None:
    """exp within 2e-7 of numpy's float64; float16 conversion equal to numpy's to the bit."""
    library = build(tmp_path, sources)
    environment = {**os.environ, "MS_LONGCTX_ISA": isa}
    command = [sys.executable, "-c", CHECK_PROBE, str(library)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@needs_compiler
def test_only_what_changed_is_compiled(sources: Path, tmp_path: Path) -> None:
    build(tmp_path, sources)
    first = objects(tmp_path)
    assert len(first) == 3 * len(levels())
    linked = (tmp_path / LIBRARY_NAME).stat().st_mtime_ns
    build(tmp_path, sources)
    assert objects(tmp_path) == first and (tmp_path / LIBRARY_NAME).stat().st_mtime_ns == linked
    (sources / "probe.cc").write_text(PROBE + "// more\n")
    build(tmp_path, sources)
    second = objects(tmp_path)
    assert len(second) == len(first)
    assert {name for name in first if name.startswith("still")} == second.keys() & first.keys()
    assert all(second[name] == first[name] for name in second.keys() & first.keys())


@needs_compiler
def test_failure_names_the_error_and_keeps_the_old_library(sources: Path, tmp_path: Path) -> None:
    library = build(tmp_path, sources)
    before = library.read_bytes()
    (sources / "probe.cc").write_text("int broken( {")
    with pytest.raises(KernelBuildError, match="probe.*error"):
        build(tmp_path, sources)
    assert library.read_bytes() == before
    assert "probe" in (tmp_path / "build" / "failure.txt").read_text()
    (sources / "probe.cc").write_text(PROBE)
    build(tmp_path, sources)
    assert not (tmp_path / "build" / "failure.txt").exists()


@needs_compiler
def test_a_library_of_other_sources_is_refused(sources: Path, tmp_path: Path) -> None:
    """Such as one that an update of the sources left behind."""
    library = build(tmp_path, sources)
    environment = {**os.environ, "MS_LONGCTX_KERNELS": str(library)}
    command = [sys.executable, "-c", "from ms_longctx import kernels; print(kernels.reason())"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "was built from other sources" in result.stdout and "kernels.build" in result.stdout


def test_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match="no-such-compiler"):
        build(tmp_path, sources)
    assert not (tmp_path / LIBRARY_NAME).exists()


@pytest.mark.parametrize("value", ["off", "/nowhere/lib.so"])
def test_reason_and_fallback_without_kernels(value: str) -> None:
    """Attention still works, by plain operators, and says why once."""
    program = """
import numpy as np, mindspore as ms
from ms_longctx import kernels
from ms_longctx.attention.flash import FlashAttention
from ms_longctx.attention.mask import MaskSpec
x = ms.Tensor(np.ones((1, 4, 2, 8), np.float32))
cells = [FlashAttention(MaskSpec()), FlashAttention(MaskSpec())]
assert not kernels.available() and cells[0].implementation == "reference"
assert np.allclose(cells[0](x, x, x).asnumpy(), 1)
print(kernels.reason())
"""
    environment = {**os.environ, "MS_LONGCTX_KERNELS": value}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert value in result.stdout
    assert result.stderr.count("no CPU kernels") == 1


@pytest.mark.skipif(not kernels.available(), reason="no CPU kernels")
def test_instruction_set_is_one_that_was_built() -> None:
    assert kernels.instruction_set() in levels()
