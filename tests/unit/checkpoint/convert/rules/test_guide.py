"""The examples of the guide print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[5] / "docs" / "rules.md"


def test_examples_print_what_the_guide_says() -> None:
    blocks = re.findall(r"^```(python)?\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if not block[1].startswith("keepstep ")]
    kinds = [kind for kind, _ in blocks]
    assert kinds == ["python", "", "python", ""]
    for (_, code), (_, output) in zip(blocks[::2], blocks[1::2], strict=True):
        printed = io.StringIO()
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == output
