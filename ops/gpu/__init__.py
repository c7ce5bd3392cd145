"""Checks on a machine with GPUs what keepstep relies on there: `python -m ops.gpu [--json]`.

PyTorch with CUDA is enough; `docs/gpu.md` says what each check shows and what none can show.
"""
