# SPDX-License-Identifier: Apache-2.0
"""Fetching package-shipped files: the digest is checked and nothing half-written is left behind."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest

from ms_longctx import assets
from ms_longctx.errors import MsLongctxError

MEMBER = "toy/data.bin"
TOY = assets.Asset(
    package="toy",
    version="1.0",
    member=MEMBER,
    sha256="5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",  # sha256 of b"hello\n"
    licence="Apache-2.0",
)


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses as its only index, holding one wheel; returns the cache directory."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, b"hello\n")
        wheel.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        wheel.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("toy-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("MS_LONGCTX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_fetch_extracts_the_member_and_keeps_it(wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = assets.fetch(TOY)
    assert path.read_bytes() == b"hello\n"
    monkeypatch.setenv("PIP_FIND_LINKS", "")  # the second call must not ask pip again
    assert assets.fetch(TOY) == path
    assert [p.name for p in path.parent.iterdir()] == ["data.bin"]


def test_fetch_replaces_a_damaged_copy(wheel_index: Path) -> None:
    path = assets.fetch(TOY)
    path.write_bytes(b"hel")
    assert assets.fetch(TOY).read_bytes() == b"hello\n"


def test_fetch_refuses_another_file(wheel_index: Path) -> None:
    wrong = dataclasses.replace(TOY, sha256="0" * 64)
    with pytest.raises(MsLongctxError, match="expected 0{64}"):
        assets.fetch(wrong)
    assert not list(wheel_index.rglob("data.bin"))


def test_fetch_says_what_pip_said(wheel_index: Path) -> None:
    missing = dataclasses.replace(TOY, version="9.9")
    with pytest.raises(MsLongctxError, match=r"cannot download toy==9.9 with pip \(.*take toy/data.bin out of"):
        assets.fetch(missing)
