"""Layers in folders of Hugging Face, quantized as libraries do it, and what is checked of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint.errors import LayoutMismatch
from tests.convert.checkpoints import convert, of_model, read
from tests.convert.checks import Checks, assert_equal, refused

OUT, IN = 48, 256


def folder_of(path: Path, config: Mapping[str, Any], layer: Mapping[str, torch.Tensor]) -> Path:
    """Write a folder of Hugging Face with one quantized layer and a norm."""
    path.mkdir()
    document = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": config}
    (path / "config.json").write_text(json.dumps(document))
    tensors = {f"layer.{name}": tensor.contiguous() for name, tensor in layer.items()}
    tensors["norm.weight"] = torch.rand(IN, dtype=torch.float16)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def plain(dtype: torch.dtype, shape: tuple[int, int]) -> nn.Module:
    """Return a module that has the layer without quantization."""
    module = nn.Module()
    module.layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    module.norm = nn.RMSNorm(IN, dtype=dtype)
    return module


def check(checks: Checks, path: Path, expected: torch.Tensor) -> None:
    """Check what is read of a folder against what its library has dequantized."""
    name, shape = path.name, (expected.shape[0], expected.shape[1])
    for dtype in {expected.dtype, torch.float32}:
        with checks(f"{name}: loaded into {dtype} it is what the library computes"):
            module = plain(dtype, shape)
            checkpoint.load(str(path), {"model": module}, convert=True)
            got = module.layer.weight.detach()
            assert_equal(got.to(expected.dtype), expected)
    with checks(f"{name}: a load without convert is refused, also if it is not strict"):
        for strict in (True, False):
            with refused(LayoutMismatch, "quantized"):
                module = plain(torch.bfloat16, shape)
                checkpoint.load(str(path), {"model": module}, strict=strict)
    with checks(f"{name}: --dtype rounds the norm, and neither codes nor scales"):
        convert(path, path.with_suffix(".bf16"), "--dtype", "bf16", "--only", "model")
        before, after = of_model(read(path)), of_model(read(path.with_suffix(".bf16")))
        assert after.pop("norm.weight").dtype == torch.bfloat16
        before.pop("norm.weight")
        assert_equal(after, before)
    with checks(f"{name}: from keepstep's format it is the same"):
        module = plain(expected.dtype, shape)
        checkpoint.load(str(path.with_suffix(".bf16")), {"model": module}, convert=True)
        assert_equal(module.layer.weight.detach(), expected)
