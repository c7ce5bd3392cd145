"""The site is built without a warning, has all documents and the API, and needs no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keepstep
from keepstep import checkpoint, monitor

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs keepstep[docs], which keepstep[dev] has")
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", place],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return place


def test_every_document_has_a_page(site: Path) -> None:
    documents = {path.stem for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
    pages = {path.stem for path in site.glob("*.html")}
    assert documents - {"README"} | {"index", "RESULTS"} <= pages


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    for module in (keepstep, checkpoint, monitor):
        page = (site / "api" / f"{module.__name__.rpartition('.')[2]}.html").read_text()
        names = [f"{module.__name__}.{name}" for name in module.__all__]
        modules = {"keepstep.checkpoint", "keepstep.monitor"}
        missing = [name for name in names if name not in modules and f'id="{name}"' not in page]
        assert missing == []


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"(?:https?:)?//[^\"]*")
    found = [hit for path in site.rglob("*.html") for hit in loaded.findall(path.read_text())]
    assert found == []
    imported = re.compile(r"url\([\"']?(?:https?:)?//|@import")
    assert [path for path in site.rglob("*.css") if imported.search(path.read_text())] == []


def test_lists_are_indented_as_mkdocs_reads_them() -> None:
    pytest.importorskip("material", reason="needs keepstep[docs], which keepstep[dev] has")
    from ops.site_pages import indented

    text = [
        "So:",
        "- a",
        "  b",
        "  - c",
        "    d",
        "",
        "  e",
        "f",
        "```",
        "- g",
        "```",
        "1. h",
        "   i",
    ]
    assert indented(text) == [
        "So:", "", "- a", "    b", "", "    - c", "        d", "", "    e", "f",
        "```", "- g", "```", "", "1. h", "    i",
    ]  # fmt: skip
