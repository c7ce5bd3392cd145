"""The guide names every check, and the variables as the ranks of checks get them."""

import re
from pathlib import Path

from ops.gpu.catalogue import CHECKS
from ops.gpu.environment import LOOPBACK, on_own_gpu

GUIDE = (Path(__file__).parents[4] / "docs" / "gpu.md").read_text()


def test_guide_says_of_every_check_when_it_passes() -> None:
    assert re.findall(r"^\| ([GN]\d+) \|", GUIDE, re.MULTILINE) == [check.id for check in CHECKS]


def test_guide_lists_the_variables_that_ranks_get() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| \S", GUIDE, re.MULTILINE)
    variables = on_own_gpu(0)
    assert dict(rows) == {name: variables[name] for name in variables if name not in LOOPBACK}
