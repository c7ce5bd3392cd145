"""Drops compiled code, which belongs to models and process groups that are gone.

It finds the new groups by the names of the old ones. Where there is a GPU, `torch._dynamo.reset`
imports TorchInductor first, which took 3 s of a recovery: so nothing is reset where nothing was
compiled, although FSDP2 has imported `torch._dynamo`.
"""

from __future__ import annotations

import sys

import torch


def drop_compiled_code() -> None:
    """Drop what this process has compiled, and its CUDA graphs."""
    if "torch._dynamo" not in sys.modules:
        return
    try:
        # It has each function that Dynamo was given, whatever became of it.
        was_compiled = bool(torch._dynamo.convert_frame.input_codes.seen)
    except AttributeError:
        was_compiled = True  # Other versions of PyTorch may not have these names.
    if was_compiled or "torch._inductor.cudagraph_trees" in sys.modules:
        torch._dynamo.reset()
