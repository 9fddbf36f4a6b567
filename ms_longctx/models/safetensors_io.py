# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the safetensors format tensor by tensor (https://github.com/huggingface/safetensors).

The format: 8 bytes little-endian length of the header, the header in JSON (name -> dtype, shape, data_offsets), the
data. The safetensors package cannot give bf16 to numpy, and its writer wants a whole file's tensors in
memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ms_longctx.errors import MsLongctxError

# bf16 has no numpy type: its bits travel as uint16.
_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I8", "I32", "I64")  # of quantized models
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: its file, safetensors type name (``FLOATS``, ``INTEGERS``), shape and first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> np.ndarray:
        """The values in memory of their own: fp32 (also for bf16, exactly), fp16 or integers."""
        count = math.prod(self.shape)
        array = np.fromfile(self.path, _NUMPY_TYPES[self.dtype], count, offset=self.offset)
        if array.size != count:
            raise MsLongctxError(f"{self.path}: ends in the middle of a tensor; copy or download it again")
        return self._widen(array.reshape(self.shape))

    def read_part(self, part: tuple[slice, ...]) -> np.ndarray:
        """As :meth:`read`, but only a block of the tensor; the rest is not read."""
        if not self.shape or math.prod(self.shape) == 0:
            return self.read()[part]
        try:
            mapped = np.memmap(self.path, _NUMPY_TYPES[self.dtype], "r", self.offset, self.shape)
        except (OSError, ValueError) as error:
            raise MsLongctxError(f"{self.path}: ends in the middle of a tensor; copy or download it again") from error
        return self._widen(np.array(mapped[part]))

    def _widen(self, array: np.ndarray) -> np.ndarray:
        return (array.astype(np.uint32) << 16).view(np.float32) if self.dtype == "BF16" else array


def read_header(path: Path, types: tuple[str, ...] = FLOATS) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file.

    Args:
        path: the file.
        types: of tensors that the caller can use.

    Raises:
        MsLongctxError: not a safetensors file, shorter than its header says, or a tensor of another type.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, name, entry, 8 + length, size, types) for name, entry in header.items()}
    except OSError as error:
        raise MsLongctxError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MsLongctxError(f"{path}: not a complete safetensors file ({error}); copy or download it again") from error
    return tensors


def _stored(
    path: Path, name: str, entry: dict[str, Any], start: int, size: int, types: tuple[str, ...]
) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype not in types:
        expected = f"{', '.join(types[:-1])} or {types[-1]}"
        raise MsLongctxError(f"{path}: {name} has type {dtype}; expected {expected}")
    if end - begin != math.prod(shape) * _NUMPY_TYPES[dtype].itemsize or begin < 0:
        raise ValueError(f"the size of {name} contradicts its shape")
    if start + end > size:
        raise ValueError(f"it ends before {name}")
    return StoredTensor(path, dtype, shape, start + begin)


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor in a file, in bytes."""
    return math.prod(shape) * _NUMPY_TYPES[dtype].itemsize


def to_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """What :func:`write_file` takes for a type: bits for BF16, rounded to the nearest even as MindSpore does."""
    if dtype != "BF16":
        return array
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    # A NaN must not be rounded up to infinity.
    return np.where(np.isnan(array), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)


def write_file(path: Path, dtype: str, shapes: dict[str, tuple[int, ...]], arrays: Iterable[np.ndarray]) -> None:
    """Write a file whose tensors all have one type, taking ``arrays`` one by one in the order of ``shapes``.

    Arrays of BF16 are their bits as uint16; see :func:`to_bits`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            array.astype(_NUMPY_TYPES[dtype], copy=False).tofile(stream)
