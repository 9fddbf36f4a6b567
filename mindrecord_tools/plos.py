#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the bundled articles: run_scripts/data/plos_articles*.jsonl.gz and ATTRIBUTION.md.

The source is the starter corpus of PLOS articles in the wheel of allofplos 0.11.1 (later versions lack it),
which pip downloads. Taken are articles under CC BY or CC0 that have a body and an abstract.

    python mindrecord_tools/plos.py [--wheel allofplos-0.11.1-py3-none-any.whl] [--output run_scripts/data]
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PACKAGE = "allofplos==0.11.1"
_CORPUS = "allofplos/starter_corpus/"
_HELD_OUT = 16
_HREF = "{http://www.w3.org/1999/xlink}href"
# What has no running text: its place in a sentence is kept by the words around it.
_LEFT_OUT = {
    "fig", "fig-group", "table-wrap", "table-wrap-group", "disp-formula", "disp-formula-group",
    "inline-formula", "tex-math", "graphic", "inline-graphic", "media", "supplementary-material", "fn",
    "label",
}  # fmt: skip
_BLOCKS = {
    "p", "title", "sec", "list", "list-item", "disp-quote", "boxed-text", "def-list", "def-item",
    "statement",
}  # fmt: skip

_ATTRIBUTION_HEAD = """\
# Attribution of the bundled articles

`plos_articles.jsonl.gz` and `plos_articles_heldout.jsonl.gz` hold {count} articles of the Public Library of
Science, taken from the starter corpus in the Python package {package}.
Changes: figures, tables, formulas and references were left out, white space was normalised.
The licences are Creative Commons Attribution (CC BY,
https://creativecommons.org/licenses/by/4.0/, version as stated by each article) and the CC0 public domain
dedication (https://creativecommons.org/publicdomain/zero/1.0/). Made by `mindrecord_tools/plos.py`.
Articles marked * are held out for evaluation.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the two files and the attribution; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, help=f"wheel of {_PACKAGE}; downloaded with pip if not given")
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--output", type=Path, default=root / "run_scripts" / "data")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        articles = list(read_articles(args.wheel or _download(Path(scratch))))
    held_out = {row["id"] for row in sorted(articles, key=lambda row: _digest(row["id"]))[:_HELD_OUT]}
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        ("plos_articles.jsonl.gz", [row for row in articles if row["id"] not in held_out]),
        ("plos_articles_heldout.jsonl.gz", [row for row in articles if row["id"] in held_out]),
    ):
        _write(args.output / name, rows)
        print(f"{args.output / name}: {len(rows)} articles, {(args.output / name).stat().st_size} bytes")
    (args.output / "ATTRIBUTION.md").write_text(_attribution(articles, held_out), encoding="utf-8")
    return 0


def read_articles(wheel: Path) -> Iterator[dict[str, Any]]:
    """Yield the usable articles of the corpus, ordered by file name.

    Each has ``id`` (DOI), ``title``, ``authors``, ``journal``, ``year``, ``licence``, ``article`` and
    ``abstract``.
    """
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith(_CORPUS) and name.endswith(".xml"):
                row = article_row(ElementTree.fromstring(archive.read(name)))
                if row is not None:
                    yield row


def article_row(root: ElementTree.Element) -> dict[str, Any] | None:
    """Return the row of a JATS article, or ``None`` if licence, body or abstract do not allow one."""
    licence = _licence(root)
    body = root.find("body")
    # Abstracts with a type are the author's summary, the editor's summary and the like.
    abstract = next((each for each in root.iter("abstract") if "abstract-type" not in each.attrib), None)
    if licence is None or body is None or abstract is None or root.get("article-type") == "retraction":
        return None
    row = {
        "id": _first_text(root, ".//article-id[@pub-id-type='doi']"),
        "title": _first_text(root, ".//title-group/article-title"),
        "authors": [_author(each) for each in root.iterfind(".//contrib[@contrib-type='author']")],
        "journal": _journal(root),
        "year": int(_first_text(root, ".//article-meta/pub-date/year")),
        "licence": licence,
        "article": _text(body),
        "abstract": _text(abstract),
    }
    return row if row["article"] and row["abstract"] else None


def _licence(root: ElementTree.Element) -> str | None:
    """``CC0-1.0``, ``CC-BY-4.0``, ``CC-BY`` where no version is stated, or ``None`` for anything else."""
    permissions = root.find(".//article-meta/permissions")
    if permissions is None:
        return None
    links = " ".join(each.get(_HREF, "") for each in permissions.iter())
    text = " ".join("".join(permissions.itertext()).split())
    if "publicdomain/zero" in links or "Public Domain" in text or "free of all copyright" in text:
        return "CC0-1.0"
    stated = re.search(r"creativecommons\.org/licenses/by/(\d\.\d)", links + text)
    if stated:
        return f"CC-BY-{stated.group(1)}"
    return "CC-BY" if "Creative Commons Attribution License" in text else None


def _text(element: ElementTree.Element) -> str:
    """Paragraphs and section titles, separated by blank lines."""
    blocks: list[list[str]] = [[]]
    _collect(element, blocks)
    paragraphs = (" ".join("".join(block).split()) for block in blocks)
    return "\n\n".join(re.sub(r"\s+([,.;:)\]])", r"\1", paragraph) for paragraph in paragraphs if paragraph)


def _collect(element: ElementTree.Element, blocks: list[list[str]]) -> None:
    if element.tag in _BLOCKS:
        blocks.append([])
    blocks[-1].append(element.text or "")
    for child in element:
        if child.tag not in _LEFT_OUT:
            _collect(child, blocks)
        blocks[-1].append(child.tail or "")
    if element.tag in _BLOCKS:
        blocks.append([])


def _first_text(root: ElementTree.Element, path: str) -> str:
    found = root.find(path)
    if found is None:
        raise ValueError(f"no {path} in article")
    return " ".join("".join(found.itertext()).split())


def _journal(root: ElementTree.Element) -> str:
    """The early articles give only an abbreviation of the journal's name."""
    title = root.find(".//journal-title")
    return _first_text(root, ".//journal-title" if title is not None else ".//journal-id")


def _author(contributor: ElementTree.Element) -> str:
    parts = [contributor.findtext("name/given-names"), contributor.findtext("name/surname")]
    return " ".join(part for part in parts if part) or _first_text(contributor, "collab")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """gzip without name and time, so that the same rows give the same bytes."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode("utf-8"), compresslevel=9, mtime=0))


def _attribution(articles: Sequence[dict[str, Any]], held_out: set[str]) -> str:
    lines = [_ATTRIBUTION_HEAD.format(count=len(articles), package=_PACKAGE)]
    for row in articles:
        names = ", ".join(row["authors"][:3]) + (" et al." if len(row["authors"]) > 3 else "")
        mark = " *" if row["id"] in held_out else ""
        lines.append(
            f"- {names} ({row['year']}): {row['title']}. {row['journal']}. "
            f"https://doi.org/{row['id']} ({row['licence']}){mark}"
        )
    return "\n".join(lines) + "\n"


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        _PACKAGE,
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    sys.exit(main())
