"""Every rule of the rendezvous on a small job that a person can read: `cases/*.txt`.

A case that fails shows the present decision next to the recorded one. If the new decision is right,
`REWRITE_CASES=1 pytest tests/unit/elastic/rendezvous/test_cases.py` records it; read the difference
before committing it.
"""

import os
import textwrap
from pathlib import Path

import pytest

from tests.unit.elastic.rendezvous.case_text import INDENT, Case

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))


def recorded(text: str) -> str:
    """Return a case's text with the output that its lines have now."""
    case = Case()
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(INDENT):
            continue
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        try:
            for output in case.run(line):
                lines += _wrapped(output)
        except Exception as error:
            error.add_note(f"at line {number}: {line}")
            raise
    return "\n".join(lines) + "\n"


def _wrapped(output: str) -> list[str]:
    indent = INDENT + output[: len(output) - len(output.lstrip())]
    return textwrap.wrap(
        output.lstrip(), 100, initial_indent=indent, subsequent_indent=f"{indent}  "
    )


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_decisions_are_those_recorded(path: Path) -> None:
    text = path.read_text()
    output = recorded(text)
    if os.environ.get("REWRITE_CASES"):
        path.write_text(output)
        return
    assert output == text, f"{path.name}: decided otherwise than recorded"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_states_its_claim_and_decides(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert lines[0].endswith(".")
    assert "decide" in lines
    assert all(len(line) <= 100 for line in lines)


def test_unknown_line_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="is no line of a case") as raised:
        recorded("a joins with 2 workers\na dances\n")
    assert raised.value.__notes__ == ["at line 2: a dances"]
