"""Claims about checkpoints with quantized weights: dequantized if asked and known, else refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

from keepstep import checkpoint
from keepstep.checkpoint import Descriptions, Scale
from keepstep.checkpoint.cli.ckpt import ckpt
from keepstep.checkpoint.convert.write.dequantized import dequantized
from keepstep.checkpoint.errors import CheckpointDamaged, LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Box
from keepstep.checkpoint.format.layout.source import BoxRequest
from tests.opened_checkpoints import open_any

OUT, IN = 16, 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Any:
    """Return codes packed one after the other, by the definition."""
    rows = np.moveaxis(codes, axis, -1).astype(np.uint32)
    per_word = 32 // bits
    packed = np.zeros((rows.shape[0], rows.shape[1] // per_word), np.uint32)
    for word in range(packed.shape[1]):
        for place in range(per_word):
            element = place if order is None else order[place]
            packed[:, word] |= rows[:, word * per_word + element] << np.uint32(place * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32))


def folder_of(
    path: Path, config: Mapping[str, Any] | None, layer: Mapping[str, torch.Tensor]
) -> str:
    """Write a folder of Hugging Face with one quantized layer and a norm."""
    path.mkdir()
    tensors = {f"layer.{name}": tensor.contiguous() for name, tensor in layer.items()}
    tensors["norm.weight"] = torch.full((IN,), 1.001, dtype=torch.float16)
    save_file(tensors, path / "model.safetensors")
    document = {"model_type": "llama", "dtype": "bfloat16"}
    if config is not None:
        document["quantization_config"] = dict(config)  # type: ignore[assignment]
    (path / "config.json").write_text(json.dumps(document))
    return str(path)


def plain(dtype: torch.dtype = torch.float32) -> Any:
    module = nn.Module()
    module.layer = nn.Linear(IN, OUT, bias=False, dtype=dtype)
    module.norm = nn.RMSNorm(IN, dtype=dtype)
    return module


Case = tuple[Mapping[str, Any], Mapping[str, torch.Tensor], torch.Tensor]


def float8_blocks() -> Case:
    """The last blocks are not whole, as those of many models."""
    codes = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2)
    each = scales.repeat_interleave(12, 0)[:OUT].repeat_interleave(48, 1)[:, :IN]
    config = {"quant_method": "fp8", "weight_block_size": [12, 48]}
    layer = {"weight": codes, "weight_scale_inv": scales, "activation_scale": torch.ones(1)}
    return config, layer, codes.float() * each


def float8_one() -> Case:
    codes = torch.randn(OUT, IN).to(torch.float8_e4m3fn)
    layer = {"weight": codes, "weight_scale_inv": torch.tensor(0.75)}
    return {"quant_method": "fp8"}, layer, codes.float() * 0.75


def gptq(bits: int, stored: str, *, in_any_order: bool) -> Case:
    size, most = 16, 2**bits
    random = np.random.default_rng(bits)
    codes, zeros = random.integers(0, most, (IN, OUT)), random.integers(0, most, (IN // size, OUT))
    groups = np.arange(IN) // size
    if in_any_order:
        random.shuffle(groups)
    scales = random.random((IN // size, OUT)).astype(np.float16)
    packed_zeros = words(zeros, bits, 1)
    if stored == "gptq":
        ones = np.uint32(sum(1 << place for place in range(0, 32, bits)))
        packed_zeros = torch.from_numpy((packed_zeros.numpy().view(np.uint32) - ones).view("i4"))
    layer = {
        "qweight": words(codes, bits, 0),
        "qzeros": packed_zeros,
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": size,
        "checkpoint_format": stored,
    }
    expected = (codes - zeros[groups]) * scales[groups].astype(np.float32)
    return config, layer, torch.from_numpy(expected.T.astype(np.float32))


def awq() -> Case:
    size = 32
    random = np.random.default_rng(3)
    codes, zeros = random.integers(0, 16, (IN, OUT)), random.integers(0, 16, (IN // size, OUT))
    scales = random.random((IN // size, OUT)).astype(np.float16)
    layer = {
        "qweight": words(codes, 4, 1, AWQ_ORDER),
        "qzeros": words(zeros, 4, 1, AWQ_ORDER),
        "scales": torch.from_numpy(scales),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    groups = np.arange(IN) // size
    expected = (codes - zeros[groups]) * scales[groups].astype(np.float32)
    return config, layer, torch.from_numpy(expected.T.astype(np.float32))


def compressed_words(*, has_zeros: bool) -> Case:
    random = np.random.default_rng(4)
    size = 16
    codes = random.integers(-8, 8, (OUT, IN))
    scales = torch.from_numpy(random.random((OUT, IN // size))).to(torch.bfloat16)
    zeros = random.integers(-8, 8, (OUT, IN // size))
    layer = {
        "weight_packed": words(codes + 8, 4, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUT, IN]),
    }
    if has_zeros:
        layer["weight_zero_point"] = words(zeros + 8, 4, 0)
        codes = codes - zeros.repeat(size, 1)
    arguments = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": size,
        "symmetric": not has_zeros,
    }
    expected = torch.from_numpy(codes).float() * scales.float().repeat_interleave(size, 1)
    return compressed("pack-quantized", arguments), layer, expected


def compressed_rows() -> Case:
    codes = torch.randint(-128, 128, (OUT, IN), dtype=torch.int8)
    scales = torch.rand(OUT, 1).to(torch.bfloat16)
    zeros = torch.randint(-128, 128, (OUT, 1), dtype=torch.int8)
    layer = {"weight": codes, "weight_scale": scales, "weight_zero_point": zeros}
    arguments = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    expected = (codes.float() - zeros.float()) * scales.float()
    return compressed("int-quantized", arguments), layer, expected


def compressed(form: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
    }


KNOWN = {
    "float8 in blocks": float8_blocks,
    "float8 with one scale": float8_one,
    "gptq": lambda: gptq(4, "gptq", in_any_order=False),
    "gptq of 2 bits, in any order": lambda: gptq(2, "gptq", in_any_order=True),
    "gptq_v2 of 8 bits": lambda: gptq(8, "gptq_v2", in_any_order=True),
    "awq": awq,
    "compressed-tensors, packed": lambda: compressed_words(has_zeros=False),
    "compressed-tensors, packed with zero points": lambda: compressed_words(has_zeros=True),
    "compressed-tensors, int8": compressed_rows,
}
UNKNOWN = {
    "awq of another version": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, awq),
    "gptq of another format": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "marlin"},
        lambda: gptq(4, "gptq", in_any_order=False),
    ),
    "sparse": (
        {**compressed("int-quantized", {}), "sparsity_config": {"format": "sparse-24-bitmask"}},
        compressed_rows,
    ),
    "another method": ({"quant_method": "modelopt"}, float8_one),
    "no configuration": (None, float8_blocks),
    "no configuration, packed": (None, awq),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_module_gets_what_codes_and_scales_stand_for(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config, layer, expected = KNOWN[name]()
    url = folder_of(tmp_path / "folder", config, layer)
    module = plain(dtype)
    checkpoint.load(url, {"model": module}, convert=True)
    assert torch.equal(module.layer.weight, expected.to(dtype))
    assert module.norm.weight[0] == torch.tensor(1.001, dtype=torch.float16).to(dtype)


@pytest.mark.parametrize("name", KNOWN)
def test_any_box_is_that_of_the_whole(name: str, tmp_path: Path) -> None:
    config, layer, expected = KNOWN[name]()
    source = dequantized(open_any(folder_of(tmp_path / "folder", config, layer)).source)
    for offset, shape in (((3, 13), (5, 30)), ((15, 0), (1, 64)), ((0, 63), (16, 1))):
        got = torch.empty(shape)
        box = Box(offset, shape)
        into = memoryview(got.reshape(-1).view(torch.uint8).numpy())
        source.read([BoxRequest("model/layer.weight", box, into)])
        assert torch.equal(got, expected[box.slices])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", KNOWN)
def test_without_convert_a_plain_module_is_refused(name: str, strict: bool, tmp_path: Path) -> None:
    config, layer, _ = KNOWN[name]()
    url = folder_of(tmp_path / "folder", config, layer)
    module = plain(torch.bfloat16)
    before = module.layer.weight.clone()
    with pytest.raises(LayoutMismatch, match=r"layer\.weight.*convert=True"):
        checkpoint.load(url, {"model": module}, strict=strict)
    assert torch.equal(module.layer.weight, before)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("convert", [True, False])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_refused_whatever_the_load_allows(
    name: str, strict: bool, convert: bool, tmp_path: Path
) -> None:
    config, case = UNKNOWN[name]
    url = folder_of(tmp_path / "folder", config, case()[1])
    with pytest.raises(LayoutMismatch, match=r"layer\.weight.*the library that quantized it"):
        checkpoint.load(url, {"model": plain()}, strict=strict, convert=convert)


@pytest.mark.parametrize("names", [("weight", "SCB"), ("weight", "weight.absmax")])
def test_layers_of_bitsandbytes_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    layer = {names[0]: torch.zeros(OUT, IN, dtype=torch.int8), names[1]: torch.ones(OUT)}
    url = folder_of(tmp_path / "folder", {"quant_method": "bitsandbytes"}, layer)
    with pytest.raises(LayoutMismatch, match="bitsandbytes"):
        checkpoint.load(url, {"model": plain()}, strict=False, convert=True)


def test_a_module_that_is_quantized_alike_gets_codes_and_scales(tmp_path: Path) -> None:
    config, layer, _ = awq()
    url = folder_of(tmp_path / "folder", config, layer)
    module = nn.Module()
    module.layer = nn.Module()
    for name, tensor in layer.items():
        module.layer.register_buffer(name, torch.zeros_like(tensor))
    module.norm = nn.RMSNorm(IN, dtype=torch.float16)
    checkpoint.load(url, {"model": module})
    for name, tensor in layer.items():
        assert torch.equal(module.layer.get_buffer(name), tensor)


@pytest.mark.parametrize("strict", [True, False])
def test_a_plain_checkpoint_does_not_become_codes(strict: bool, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    checkpoint.save(url, {"model": plain()}, step=1)
    module = plain()
    module.layer.weight = nn.Parameter(
        torch.zeros(OUT, IN, dtype=torch.float8_e4m3fn), requires_grad=False
    )
    module.layer.register_buffer("weight_scale_inv", torch.ones(1, 1))
    with pytest.raises(LayoutMismatch, match="weight_scale_inv"):
        checkpoint.load(url, {"model": module}, strict=strict, convert=True)


def test_scales_that_are_described_dequantize(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    codes, scales = torch.randint(-9, 9, (OUT, IN), dtype=torch.int8), torch.rand(4, 4)
    described = Descriptions(scales={"layer.weight": Scale("scales", (4, 16), "bfloat16")})
    state = {"model/layer.weight": codes, "scales": scales, "model/norm.weight": torch.ones(IN)}
    checkpoint.save(url, state, step=1, descriptions=described)
    module = plain()
    checkpoint.load(url, {"model": module}, convert=True)
    each = scales.repeat_interleave(4, 0).repeat_interleave(16, 1)
    assert torch.equal(module.layer.weight, codes * each)


def test_another_format_keeps_what_is_known_of_the_quantization(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, layer, expected = float8_blocks()
    url = folder_of(tmp_path / "folder", config, layer)
    run = str(tmp_path / "run")
    done = CliRunner().invoke(ckpt, ["convert", url, run])
    assert done.exit_code == 0, done.output
    document = open_any(run).source.documents["scales"]["model/layer.weight"]
    assert document["scale"] == "model/layer.weight_scale_inv"
    assert document["block_shape"] == [12, 48]
    module = plain()
    with caplog.at_level(logging.INFO, "keepstep"):
        checkpoint.load(run, {"model": module}, convert=True)
    assert torch.equal(module.layer.weight, expected)
    assert "dequantized 1 weights" in caplog.text


def test_scales_of_activations_that_a_dequantized_layer_has_no_place_for_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, layer, _ = float8_blocks()
    url = folder_of(tmp_path / "folder", config, layer)
    with caplog.at_level(logging.INFO, "keepstep"):
        checkpoint.load(url, {"model": plain()}, convert=True)
    assert "left out 1 scales of activations (model/layer.activation_scale, ...)" in caplog.text


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_rounding_leaves_scales_and_codes(name: str, tmp_path: Path) -> None:
    if name in KNOWN:
        config, layer, _ = KNOWN[name]()
    else:
        config, layer = UNKNOWN[name][0], UNKNOWN[name][1]()[1]
    url = folder_of(tmp_path / "folder", config, layer)
    file = str(tmp_path / "out.safetensors")
    done = CliRunner().invoke(ckpt, ["convert", url, file, "--dtype", "bf16"])
    assert done.exit_code == 0, done.output
    floats = [n for n, t in layer.items() if t.is_floating_point() and t.itemsize > 1]
    kept = sum(layer[name].dtype != torch.bfloat16 for name in floats)
    assert (f"not rounded: {kept} tensors" in done.output) == (kept > 0)
    written = load_file(file)
    assert written["norm.weight"].dtype == torch.bfloat16
    for tensor_name, tensor in layer.items():
        assert written[f"layer.{tensor_name}"].dtype == tensor.dtype, tensor_name
        got = written[f"layer.{tensor_name}"].reshape(-1).view(torch.uint8)
        assert torch.equal(got, tensor.contiguous().reshape(-1).view(torch.uint8)), tensor_name


def test_groups_that_have_no_scales_are_damage(tmp_path: Path) -> None:
    config, layer, _ = gptq(4, "gptq", in_any_order=True)
    layer["g_idx"][5] = 4  # type: ignore[index]
    url = folder_of(tmp_path / "folder", config, layer)
    with pytest.raises(CheckpointDamaged, match="g_idx"):
        checkpoint.load(url, {"model": plain()}, convert=True)


def test_codes_that_end_within_a_word_are_refused(tmp_path: Path) -> None:
    config, layer, _ = compressed_words(has_zeros=False)
    layer = {**layer, "weight_shape": torch.tensor([OUT, IN - 3])}
    url = folder_of(tmp_path / "folder", config, layer)
    with pytest.raises(LayoutMismatch, match="weight_shape"):
        checkpoint.load(url, {"model": plain()}, convert=True)


def test_rules_get_weights_that_are_dequantized(tmp_path: Path) -> None:
    config, layer, expected = float8_blocks()
    url = folder_of(tmp_path / "folder", config, layer)
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\nmatch = "layer.weight"\nrename = "fc.weight"\ntranspose = [1, 0]\n'
        '[[rule]]\nmatch = "norm.weight"\n'
    )
    module = nn.Module()
    module.fc = nn.Linear(OUT, IN, bias=False)
    module.norm = nn.RMSNorm(IN)
    checkpoint.load(url, {"model": module}, rules=str(rules), convert=True)
    assert torch.equal(module.fc.weight, expected.T)
