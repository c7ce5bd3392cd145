"""Claims about what a log must not have."""

from pathlib import Path

import pytest

from ops.bench.chaos.leftovers import complaints, untold

GOOD = """[keepstep 13:03:46] lease 5befa2035a7fec16 has ended; its workers stop, joining again
[keepstep 13:03:47] snapshot server: step 56 is not protected yet, trying again: node a: is gone
[W1122 13:18:11.1 socket.cpp:207] [c10d] The hostname cannot be retrieved. err=-3
keepstep: no coordinator
"""


@pytest.mark.parametrize(
    "bad",
    [
        "Traceback (most recent call last):",
        "  + Exception Group Traceback (most recent call last):",
        "[keepstep 13:03:46] Task was destroyed but it is pending!",
        "Exception ignored in: <function x>",
    ],
)
def test_traces_of_errors_that_nobody_handled_are_found(tmp_path: Path, bad: str) -> None:
    log = tmp_path / "a.log"
    log.write_text(GOOD)
    assert complaints([log]) == []
    log.write_text(GOOD + bad + "\nmore\n" + GOOD)
    (excerpt,) = complaints([log])
    assert excerpt.startswith("a.log: ")
    assert bad in excerpt


def test_second_line_of_a_message_is_found(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(GOOD)
    assert untold([log]) == []
    log.write_text(GOOD + "AssertionError\n")
    (excerpt,) = untold([log])
    assert "AssertionError" in excerpt
