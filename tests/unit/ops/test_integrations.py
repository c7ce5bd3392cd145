"""Tests of integrations.py's list of frameworks."""

from ops.integrations import DOCUMENTED_LINES, OF_PYTORCH, ROOT, TESTS, frameworks


def test_no_test_of_a_framework_is_left_out_and_each_has_what_it_needs() -> None:
    known = frameworks()
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / TESTS).glob("test_*.py")}
    assert {it.test for name, it in known.items() if name not in OF_PYTORCH} == files - {
        DOCUMENTED_LINES
    }
    assert all((ROOT / framework.test).exists() for framework in known.values())
    assert [name for name, framework in known.items() if not framework.requirements] == [
        *OF_PYTORCH
    ]
