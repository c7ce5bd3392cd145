"""Quantized weights: what is dequantized is what GPTQModel computes, of GPTQ and of AWQ."""

from __future__ import annotations

from pathlib import Path

import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq
from torch import nn

from tests.convert.checks import Checks
from tests.convert.quantized_layers import IN, OUT, check, folder_of

REQUIREMENTS = ("gptqmodel==7.7.0",)


def check_gptq(checks: Checks, root: Path) -> None:
    """Check GPTQ: both checkpoint formats, groups in their order and in any other."""
    for bits in (2, 4, 8):
        for stored in ("gptq", "gptq_v2"):
            for in_any_order in (False, True):
                size = 32
                layer = TorchLinear(
                    bits=bits, group_size=size, sym=False, desc_act=in_any_order,
                    in_features=IN, out_features=OUT, bias=False,
                )  # fmt: skip
                linear = nn.Linear(IN, OUT, bias=False)
                groups = torch.arange(IN) // size
                if in_any_order:
                    groups = groups[torch.randperm(IN)]
                most = 2**bits
                scales = torch.rand(OUT, IN // size) / 8 + 0.01
                zeros = torch.randint(0, most, scales.shape).float()
                layer.pack_original(linear, scales, zeros, groups.to(torch.int32))
                layer.post_init()
                expected = layer.dequantize_weight().T.to(torch.float16)
                tensors = {n: getattr(layer, n).clone() for n in ("qweight", "scales", "g_idx")}
                tensors["qzeros"] = layer.qzeros.clone()
                if stored == "gptq":
                    ones = sum(1 << place for place in range(0, 32, bits))
                    words = tensors["qzeros"].to(torch.int64) - ones
                    tensors["qzeros"] = words.to(torch.int32)
                config = {
                    "quant_method": "gptq", "bits": bits, "group_size": size, "sym": False,
                    "desc_act": in_any_order, "checkpoint_format": stored,
                }  # fmt: skip
                name = f"{stored} {bits} bits{' in any order' if in_any_order else ''}"
                check(checks, folder_of(root / name, config, tensors), expected)


def check_awq(checks: Checks, root: Path) -> None:
    """Check AWQ in the order of gemm."""
    size = 64
    codes, zeros = torch.randint(0, 16, (IN, OUT)), torch.randint(0, 16, (IN // size, OUT))
    scales = (torch.rand(IN // size, OUT) / 8 + 0.01).to(torch.float16)
    words, packed_zeros = pack_awq(codes, zeros, 4)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    layer = {"qweight": words, "qzeros": packed_zeros, "scales": scales}
    expected = dequantize_gemm(words, packed_zeros, scales, 4, size).T
    check(checks, folder_of(root / "awq", config, layer), expected)


def main() -> None:
    """Run all checks."""
    checks = Checks()
    torch.manual_seed(0)
    for part in (check_gptq, check_awq):
        with checks.all_of(part.__name__) as directory:
            part(checks, directory)
    checks.finish()


if __name__ == "__main__":
    main()
