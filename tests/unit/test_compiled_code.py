"""Claims about compiled code at the end of a generation; that it is dropped is in test_job.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import torch
from keepstep.torch_internals import drop_compiled_code

if sys.argv[1:]:
    import torch._dynamo
torch.cuda.is_available = lambda: True
drop_compiled_code()
assert "torch._inductor.compile_fx" not in sys.modules
"""


@pytest.mark.parametrize("imported", [(), ("dynamo",)], ids=["nothing", "dynamo"])
def test_nothing_is_imported_where_nothing_was_compiled(imported: tuple[str, ...]) -> None:
    """TorchInductor, where there is a GPU: 3 s of the first recovery of each process."""
    subprocess.run([sys.executable, "-c", PROGRAM, *imported], check=True)
