"""Quantized weights: what is dequantized is what compressed-tensors and transformers compute.

Each folder is loaded by `checkpoint.load(..., convert=True)` into plain layers, of the data type of
the scales and of float32, and converted to keepstep's format and by `--dtype`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.convert.checks import Checks
from tests.convert.quantized_layers import IN, OUT, check, folder_of

REQUIREMENTS = ("transformers==5.24.0", "compressed-tensors==0.20.0")


def check_float8(checks: Checks, root: Path) -> None:
    """Check float8 with scales of blocks, as transformers and DeepSeek-V3 write it."""
    # The library derives blocks from shapes, which have to be multiples of these.
    for number, (shape, block) in enumerate((((64, 256), [32, 128]), ((48, 256), None))):
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
        grid = (1, 1) if block is None else (shape[0] // block[0], shape[1] // block[1])
        scales = torch.rand(grid) / 64
        config = {"quant_method": "fp8", "weight_block_size": block}
        layer = {"weight": codes, "weight_scale_inv": scales}
        path = folder_of(root / f"float8 {number}", config, layer)
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
        check(checks, path, expected)


def check_compressed(checks: Checks, root: Path) -> None:
    """Check compressed-tensors: packed integers, int8 and float8, each strategy."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "packed groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        "packed rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        "packed bytes": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        "packed with zero points": (
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
        ),
        "int8 rows": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        "int8 with zero points": (
            "int-quantized",
            {"num_bits": 8, "strategy": "channel", "symmetric": False},
        ),
        "float8 tensor": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
        ),
        "float8 rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "float8 blocks": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 128]},
        ),
    }
    for name, (form, arguments) in cases.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        compressor = (
            PackedQuantizationCompressor
            if form == "pack-quantized"
            else NaiveQuantizationCompressor
        )
        groups = {
            "group": (OUT, IN // arguments.get("group_size", 1)),
            "channel": (OUT, 1),
            "tensor": (1,),
            "block": (OUT // 16, IN // 128),
        }[arguments["strategy"]]
        layer: dict[str, torch.Tensor] = {
            "weight": torch.randn(OUT, IN, dtype=torch.bfloat16),
            "weight_scale": (torch.rand(groups) / 8 + 0.01).to(torch.bfloat16),
        }
        if not arguments.get("symmetric", True):
            bits = arguments["num_bits"]
            low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
            layer["weight_zero_point"] = torch.randint(low, high, groups, dtype=torch.int8)
        stored = compressor.compress(layer, scheme)
        expected = compressor.decompress(stored, scheme)["weight"]
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
        }
        path = folder_of(root / f"compressed-tensors {name}", config, stored)
        check(checks, path, expected.to(torch.bfloat16))


def main() -> None:
    """Run all checks."""
    checks = Checks()
    torch.manual_seed(0)
    for part in (check_float8, check_compressed):
        with checks.all_of(part.__name__) as directory:
            part(checks, directory)
    checks.finish()


if __name__ == "__main__":
    main()
