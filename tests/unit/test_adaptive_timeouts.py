"""The limits of waits in tests: they grow with the machine's load, or say why they do not."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adaptive_timeouts import patient

TESTS = Path(__file__).parents[1]
SHORTEST_S = 1.0
"""Below it, what is waited for is not to come: the limit is what is tested."""


def bare_limits(source: str) -> list[int]:
    """Return the lines on which something is waited for with a number as the limit, in seconds."""
    module = ast.parse(source)
    named = {
        statement.targets[0].id: statement.value
        for statement in module.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Call | ast.Assign):
            for limit in _limits(node):
                match named.get(limit.id) if isinstance(limit, ast.Name) else limit:
                    case ast.Constant(int(seconds) | float(seconds)) if seconds >= SHORTEST_S:
                        found.add(node.lineno)
    return sorted(found)


def _limits(node: ast.Call | ast.Assign) -> Iterator[ast.expr]:
    match node:
        case ast.Assign(value=ast.BinOp(ast.Call(ast.Attribute(attr="monotonic")), ast.Add(), end)):
            yield end
        case ast.Call(ast.Attribute(attr="wait" | "join" | "result"), [], [ast.keyword(_, limit)]):
            yield limit
        case ast.Call(ast.Attribute(attr="wait" | "join" | "result"), [limit]):
            yield limit
        case ast.Call(ast.Attribute(ast.Name("asyncio"), "timeout"), [limit]):
            yield limit
        case ast.Call(ast.Attribute(ast.Name("asyncio"), "wait_for"), [_, limit]):
            yield limit
        # Of Python's library: what a test calls `timeout_s` may be patient by itself.
        case ast.Call(keywords=keywords):
            yield from (keyword.value for keyword in keywords if keyword.arg == "timeout")


def test_limits_of_waits_grow_with_the_machines_load() -> None:
    bare = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in bare_limits(path.read_text())
    ]
    assert bare == []


def test_bare_limits_are_found() -> None:
    assert bare_limits("event.wait(60)") == [1]
    assert bare_limits("thread.join(timeout=5)\nhandle.wait(timeout_s=5)") == [1, 2]
    assert bare_limits("async with asyncio.timeout(10.0): pass") == [1]
    assert bare_limits("await asyncio.wait_for(answer(), 30)") == [1]
    assert bare_limits("subprocess.run(command, timeout=60)") == [1]
    assert bare_limits("until_s = time.monotonic() + 20") == [1]
    assert bare_limits("LIMIT_S = 60\nsave(LIMIT_S).wait(LIMIT_S)") == [2]
    assert bare_limits("event.wait(patient(60))\nevent.wait(0.02)\nevent.wait()") == []
    assert bare_limits("cluster.wait('a', 60)\nawait until(is_shown, timeout_s=40)") == []


@pytest.mark.parametrize(("load", "expected_s"), [(32.0, 480), (4.0, 60), (0.0, 60)])
def test_a_limit_grows_with_the_processes_that_want_each_core(
    monkeypatch: pytest.MonkeyPatch, load: float, expected_s: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert patient(60) == expected_s
