"""Parses the URLs of checkpoints and files: every module that opens one uses this parser.

Pure. Two URLs that differ never mean one place because a part of one of them was left out: what
has no meaning in a storage, as a query or a fragment, is refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from keepstep.checkpoint.errors import CheckpointError

_SCHEME_OF_PATH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")


@dataclass(frozen=True, slots=True)
class ParsedUrl:
    """A place in a storage. Made by `parse_url`.

    Attributes:
        scheme: `file` for a path, too.
        bucket: the bucket of an object store; empty for a path.
        path: what follows the bucket, as it was written; of a path, with its escapes decoded.
    """

    scheme: str
    bucket: str
    path: str

    @property
    def local_path(self) -> Path | None:
        """The absolute path; None if the place is in an object store."""
        return Path(self.path).absolute() if self.scheme == "file" else None


def url_text(url: str | os.PathLike[str]) -> str:
    """Return a URL that a caller gives as text, or as a path.

    Raises:
        CheckpointError: it is neither, or a URL that pathlib has shortened.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str):
        raise CheckpointError(f"{url!r} is no URL; give a str, or a path as of pathlib")
    if not isinstance(url, str) and _SCHEME_OF_PATH.match(text):
        raise CheckpointError(
            f"{url!r} has one slash where a URL has two, for pathlib leaves out the other: give "
            "the URL as a str"
        )
    return text


def parse_url(url: str) -> ParsedUrl:
    """Return what a URL means.

    A path without a scheme may have any characters.

    Args:
        url: a path, `file://`, or `SCHEME://BUCKET/PREFIX` of any scheme.

    Raises:
        CheckpointError: the URL is empty or malformed, begins with ~, or has a query, a fragment,
            or a host of files.
    """
    if not url:
        raise CheckpointError('the URL is empty; for the current directory write "."')
    if url.startswith("~"):
        raise CheckpointError(
            f"{url}: ~ is not expanded here; write the whole path, or ./{url} for a name with ~"
        )
    try:
        parsed = urlsplit(url)
    except ValueError as error:
        raise CheckpointError(
            f"{url} is no URL: {error}; write a path, or s3://BUCKET/PREFIX"
        ) from error
    if not parsed.scheme:
        return ParsedUrl("file", "", url)
    is_file = parsed.scheme == "file"
    for mark, meaning in ("?", "a query"), ("#", "a fragment"):
        if mark in url:
            remedy = f"write %{ord(mark):X}, or give the path without file://"
            raise CheckpointError(
                f"{url}: {mark} begins {meaning} of a URL, which no storage has, so it would be "
                f"left out; {remedy if is_file else f'choose a name without {mark}'}"
            )
    if not is_file:
        return ParsedUrl(parsed.scheme, parsed.netloc, parsed.path)
    if parsed.netloc not in ("", "localhost"):
        raise CheckpointError(
            f"{url} names a host; write file:///{parsed.netloc}{parsed.path} for a local path"
        )
    return ParsedUrl("file", "", unquote(parsed.path))
