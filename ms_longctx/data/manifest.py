# SPDX-License-Identifier: Apache-2.0
"""The JSON file beside a prepared set: what it holds, how it was made, and which files belong to it.

A set without its manifest is not finished. Checks here come before MindSpore opens anything, so that a
truncated, renamed or foreign file is named in one line.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ms_longctx.errors import MsLongctxError

SUFFIX = ".mindrecord"
_FORMAT = "ms_longctx prepared set 1"


@dataclass(frozen=True)
class Shard:
    """One MindRecord file.

    Attributes:
        name: without directory.
        size, index_size: bytes of the file and of its ``.db`` index.
        samples, tokens, supervised_tokens: what is in it.
        longest: tokens of its longest sample.
    """

    name: str
    size: int
    index_size: int
    samples: int
    tokens: int
    supervised_tokens: int
    longest: int


@dataclass(frozen=True)
class Manifest:
    """Description of a prepared set.

    Attributes:
        seq_length: limit the samples were cut to.
        layout: ``sft`` or ``lm``.
        format: format of the source rows.
        tokenizer: fingerprint of the tokenizer (:meth:`ms_longctx.data.tokenizer.Tokenizer.fingerprint`).
        vocab_size, pad_id: of that tokenizer.
        source: digest of the settings and input files it was made from.
        shards: the files, in order.
    """

    seq_length: int
    layout: str
    format: str
    tokenizer: str
    vocab_size: int
    pad_id: int
    source: str
    shards: tuple[Shard, ...]

    @property
    def samples(self) -> int:
        """Samples in all files."""
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in all files."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def supervised_tokens(self) -> int:
        """Tokens that are learned."""
        return sum(shard.supervised_tokens for shard in self.shards)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(shard.longest for shard in self.shards)


def manifest_path(path: Path) -> Path:
    """Return where the manifest of the set ``path`` (``name.mindrecord``) is."""
    return path.with_name(path.name + ".json")


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest of the set ``path`` in one step, so that it is there whole or not at all."""
    write_json(manifest_path(path), {"made_by": _FORMAT, **asdict(manifest)})


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` beside ``path`` and rename it there."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, ensure_ascii=False, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)


def load_manifest(path: str | Path) -> Manifest:
    """Read the manifest of a prepared set and check that its files are there and whole.

    Args:
        path: the set (``name.mindrecord``), or a directory with exactly one.

    Raises:
        MsLongctxError: missing, unfinished, foreign, truncated or renamed files; each is named.
    """
    path = _set_path(Path(path))
    file = manifest_path(path)
    if not file.is_file():
        raise MsLongctxError(_no_manifest(path))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("made_by") != _FORMAT:
            raise ValueError("made by another version")
        shards = tuple(Shard(**shard) for shard in content.pop("shards"))
        manifest = Manifest(shards=shards, **content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MsLongctxError(f"{file} is not a manifest of ms-longctx prepare ({error}); prepare again") from error
    for shard in manifest.shards:
        _check_shard(path.parent, shard, file.name)
    return manifest


def shard_paths(path: str | Path, manifest: Manifest) -> list[str]:
    """Return the MindRecord files of the set ``path``, in order."""
    folder = _set_path(Path(path)).parent
    return [str(folder / shard.name) for shard in manifest.shards]


def _set_path(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob(f"*{SUFFIX}.json"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise MsLongctxError(f"directory {path} should hold one prepared set (*{SUFFIX}.json), found {names}")
    return found[0].with_suffix("")


def _no_manifest(path: Path) -> str:
    """Say why there is no manifest, as far as can be seen."""
    if work_directory(path).is_dir():
        return f"{path} is not finished: run the same prepare command again, it goes on where it stopped"
    if not path.exists():
        return f"{path} does not exist; make it with: ms-longctx prepare --input data.jsonl --output {path}"
    with path.open("rb") as stream:
        start = stream.read(16)
    if not start:
        return f"{path} is an empty file; prepare it again"
    if start[8:9] == b"{":
        return (
            f"{path} is a MindRecord file, but {manifest_path(path).name} is not beside it: it was renamed, "
            "copied alone or made by another tool; copy that file too, or use ms-longctx prepare"
        )
    return f"{path} is not a MindRecord file (it starts with {start!r}); make one with ms-longctx prepare"


def work_directory(path: Path) -> Path:
    """Return the directory that holds the set ``path`` while it is being prepared."""
    return path.with_name(path.name + ".partial")


def _check_shard(folder: Path, shard: Shard, manifest: str) -> None:
    for name, size in ((shard.name, shard.size), (shard.name + ".db", shard.index_size)):
        file = folder / name
        if not file.is_file():
            part = f"the index of {shard.name}, part" if name.endswith(".db") else "part"
            raise MsLongctxError(
                f"{file} is missing: it is {part} of the set that {manifest} describes, and a set's files keep their "
                f"names; copy it to {folder.absolute()}, or give it its old name back"
            )
        found = file.stat().st_size
        if found != size:
            raise MsLongctxError(f"{file} has {found} bytes, expected {size}: truncated or replaced; prepare it again")
    if not _names_itself(folder / shard.name):
        raise MsLongctxError(
            f"{folder / shard.name} is damaged, or was written under another name (MindSpore cannot read "
            "renamed MindRecord files): give it its old name back or prepare it again"
        )


def _names_itself(file: Path) -> bool:
    """Whether the header of a MindRecord file (8 bytes of length, then JSON) gives its present name."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(length, 1 << 27)))
        except ValueError:
            return False
    return isinstance(header, dict) and file.name in header.get("shard_addresses", [])
