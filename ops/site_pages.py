"""Adds to the site what is not in docs/: pages of the root, the API's pages, and linked files.

MkDocs calls these hooks (`mkdocs.yml`). The documents are written for a reader of the repository;
here their links are followed, and their lists are indented as Python-Markdown wants it.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ops/bench/RESULTS.md": "RESULTS.md",
    **{f"{name}.md": f"{name}.md" for name in ("ARCHITECTURE", "PROTOCOL", "FORMAT")},
    **{f"{name}.md": f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG")},
}
"""Documents outside of docs/, and their places in the site."""
API = {"keepstep": "keepstep", "checkpoint": "keepstep.checkpoint", "monitor": "keepstep.monitor"}

_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the files of the repository that pages link to."""
    for source, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    for name, module in API.items():
        files.append(File.generated(config, f"api/{name}.md", content=api_page(module)))
    sources = {place: source for source, place in PAGES.items()}
    for page in list(files.documentation_pages()):
        source = sources.get(page.src_uri, f"docs/{page.src_uri}")
        for _, target, _, _ in _LINK.findall(page.content_string):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
            is_linked_file = path not in PAGES and not path.startswith("docs/")
            if (
                is_linked_file
                and (ROOT / path).is_file()
                and f"source/{path}" not in files.src_uris
            ):
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, f"source/{path}", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's text with links to places of the site, and lists as MkDocs reads them."""
    sources = {place: source for source, place in PAGES.items()}
    place = page.file.src_uri
    source = sources.get(place, f"docs/{place}")

    def followed(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if path in PAGES:
            target = PAGES[path]
        else:
            target = path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"
        relative = posixpath.relpath(target, posixpath.dirname(place) or ".")
        return f"{link[1]}{relative}{link[3] or ''}{link[4]}"

    return "\n".join(indented(_LINK.sub(followed, markdown).split("\n")))


def indented(lines: list[str]) -> list[str]:
    """Return lines with a blank one before each list, and four spaces before what is in an item."""
    result: list[str] = []
    is_fenced, width = False, 0
    inside: list[str] = []
    for line in lines:
        if width and (not line.strip() or line.startswith(" " * width)):
            inside.append(line[width:])
            continue
        if width:
            result += [f"    {part}" if part else "" for part in indented(inside)]
            inside = []
        item = None if is_fenced else _ITEM.match(line)
        if item and not width and result and result[-1].strip():
            result.append("")
        width = len(item[0]) if item else 0
        if line.startswith("```"):
            is_fenced = not is_fenced
        result.append(line)
    return (
        result + [f"    {part}" if part else "" for part in indented(inside)] if inside else result
    )


def api_page(module: str) -> str:
    """Return the page of a module's public names: functions, classes, then errors."""
    package = importlib.import_module(module)
    members: dict[str, list[str]] = {"Functions": [], "Classes": [], "Errors": []}
    for name in package.__all__:
        member: Any = getattr(package, name)
        if inspect.ismodule(member):
            continue
        is_error = inspect.isclass(member) and issubclass(member, BaseException)
        kind = "Errors" if is_error else "Classes" if inspect.isclass(member) else "Functions"
        members[kind].append(f"::: {module}.{name}\n")
    text = inspect.getdoc(package) or ""
    sections = [f"## {kind}\n\n" + "\n".join(names) for kind, names in members.items() if names]
    return f"# {module}\n\n{text}\n\n" + "\n".join(sections)
