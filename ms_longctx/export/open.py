# SPDX-License-Identifier: Apache-2.0
"""Opens an exported directory with the program its format is for."""

from __future__ import annotations

from pathlib import Path

from ms_longctx.errors import MsLongctxError
from ms_longctx.export.exported import ExportedModel
from ms_longctx.export.manifest import read_manifest


def open_export(folder: Path, key: bytes | None = None) -> ExportedModel:
    """The export in ``folder``, ready to generate: MindIR in MindSpore, ONNX in onnxruntime, Lite in MindSpore Lite.

    Args:
        folder: holds ``manifest.json``.
        key: AES key of an encrypted MindIR.

    Raises:
        MsLongctxError: a format that another program serves, a key that is missing or not wanted, or the program of
            the format is not installed.
    """
    kind = read_manifest(folder).format
    if kind == "mindir":
        from ms_longctx.export.mindir import MindIRModel

        return MindIRModel(folder, key)
    if key is not None:
        raise MsLongctxError(f"{folder}: only MindIR is encrypted, this is {kind}; leave --key_file out")
    if kind == "onnx":
        from ms_longctx.export.onnx import OnnxModel

        return OnnxModel(folder)
    if kind == "lite":
        from ms_longctx.export.lite import LiteModel

        return LiteModel(folder)
    raise MsLongctxError(f"{folder}: an export of format {kind} is not opened here; start its server instead")
