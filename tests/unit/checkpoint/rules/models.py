"""Small models of every family, as Hugging Face's files hold them: names, shapes, configuration.

The names are written out by hand from transformers' modeling files, so that a preset is not
compared with itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keepstep.checkpoint.layout.source import TensorSpec
from tests.unit.checkpoint.rules.arrays import Array

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """A model: the family of its preset, its configuration, the tensors on file."""

    name: str
    family: str
    config: Mapping[str, Any]
    shapes: Shapes


def _llama_like(
    *, tied: bool = False, biased: bool = False, qk_norms: bool = False, gemma2: bool = False
) -> tuple[dict[str, Any], Shapes]:
    config = {
        "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "num_hidden_layers": 3, "vocab_size": 150,
    }  # fmt: skip
    shapes: Shapes = {"model.embed_tokens.weight": (150, 24), "model.norm.weight": (24,)}
    if not tied:
        shapes["lm_head.weight"] = (150, 24)
    for layer in range(3):
        base = f"model.layers.{layer}"
        for part, rows in (("q", 24), ("k", 12), ("v", 12)):
            shapes[f"{base}.self_attn.{part}_proj.weight"] = (rows, 24)
            if biased:
                shapes[f"{base}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{base}.self_attn.o_proj.weight"] = (24, 24)
        if qk_norms:
            shapes[f"{base}.self_attn.q_norm.weight"] = (6,)
            shapes[f"{base}.self_attn.k_norm.weight"] = (6,)
        shapes[f"{base}.mlp.gate_proj.weight"] = (40, 24)
        shapes[f"{base}.mlp.up_proj.weight"] = (40, 24)
        shapes[f"{base}.mlp.down_proj.weight"] = (24, 40)
        shapes[f"{base}.input_layernorm.weight"] = (24,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (24,)
        if gemma2:
            shapes[f"{base}.pre_feedforward_layernorm.weight"] = (24,)
            shapes[f"{base}.post_feedforward_layernorm.weight"] = (24,)
    return config, shapes


def _mixtral() -> tuple[dict[str, Any], Shapes]:
    config, shapes = _llama_like()
    shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for layer in range(3):
        base = f"model.layers.{layer}.block_sparse_moe"
        shapes[f"{base}.gate.weight"] = (4, 24)
        for expert in range(4):
            shapes[f"{base}.experts.{expert}.w1.weight"] = (40, 24)
            shapes[f"{base}.experts.{expert}.w2.weight"] = (24, 40)
            shapes[f"{base}.experts.{expert}.w3.weight"] = (40, 24)
    return {**config, "num_local_experts": 4}, shapes


def _qwen_moe() -> tuple[dict[str, Any], Shapes]:
    config, shapes = _llama_like(qk_norms=True)
    shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for layer in range(3):
        base = f"model.layers.{layer}.mlp"
        shapes[f"{base}.gate.weight"] = (4, 24)
        for expert in range(4):
            shapes[f"{base}.experts.{expert}.gate_proj.weight"] = (10, 24)
            shapes[f"{base}.experts.{expert}.up_proj.weight"] = (10, 24)
            shapes[f"{base}.experts.{expert}.down_proj.weight"] = (24, 10)
    return {**config, "moe_intermediate_size": 10, "num_experts": 4}, shapes


def _gpt2() -> tuple[dict[str, Any], Shapes]:
    shapes: Shapes = {
        "transformer.wte.weight": (150, 24),
        "transformer.wpe.weight": (32, 24),
        "transformer.ln_f.weight": (24,),
        "transformer.ln_f.bias": (24,),
    }
    for layer in range(2):
        base = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes[f"{base}.{norm}.weight"] = shapes[f"{base}.{norm}.bias"] = (24,)
        for module, inside, outside in (
            ("attn.c_attn", 24, 72), ("attn.c_proj", 24, 24),
            ("mlp.c_fc", 24, 96), ("mlp.c_proj", 96, 24),
        ):  # fmt: skip
            shapes[f"{base}.{module}.weight"] = (inside, outside)
            shapes[f"{base}.{module}.bias"] = (outside,)
    return {"n_embd": 24, "n_head": 4, "n_layer": 2, "vocab_size": 150}, shapes


def _gpt_neox() -> tuple[dict[str, Any], Shapes]:
    shapes: Shapes = {
        "gpt_neox.embed_in.weight": (150, 24),
        "embed_out.weight": (150, 24),
        "gpt_neox.final_layer_norm.weight": (24,),
        "gpt_neox.final_layer_norm.bias": (24,),
    }
    for layer in range(2):
        base = f"gpt_neox.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{base}.{norm}.weight"] = shapes[f"{base}.{norm}.bias"] = (24,)
        for module, inside, outside in (
            ("attention.query_key_value", 24, 72), ("attention.dense", 24, 24),
            ("mlp.dense_h_to_4h", 24, 96), ("mlp.dense_4h_to_h", 96, 24),
        ):  # fmt: skip
            shapes[f"{base}.{module}.weight"] = (outside, inside)
            shapes[f"{base}.{module}.bias"] = (outside,)
    return {"hidden_size": 24, "num_attention_heads": 4, "vocab_size": 150}, shapes


def _deepseek() -> tuple[dict[str, Any], Shapes]:
    config = {
        "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 10,
        "n_shared_experts": 2, "n_routed_experts": 4, "first_k_dense_replace": 1,
        "num_hidden_layers": 3, "vocab_size": 150, "head_dim": 4,
    }  # fmt: skip
    shapes: Shapes = {
        "model.embed_tokens.weight": (150, 24),
        "model.norm.weight": (24,),
        "lm_head.weight": (150, 24),
    }
    for layer in range(3):
        base = f"model.layers.{layer}"
        shapes[f"{base}.input_layernorm.weight"] = (24,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (24,)
        attention: Shapes = {
            "q_a_proj": (12, 24), "q_a_layernorm": (12,), "q_b_proj": (48, 12),
            "kv_a_proj_with_mqa": (12, 24), "kv_a_layernorm": (8,), "kv_b_proj": (64, 8),
            "o_proj": (24, 32),
        }  # fmt: skip
        shapes |= {f"{base}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        mlps = {"mlp": 40}
        if layer >= 1:
            mlps = {"mlp.shared_experts": 20} | {f"mlp.experts.{n}": 10 for n in range(4)}
            shapes[f"{base}.mlp.gate.weight"] = (4, 24)
            shapes[f"{base}.mlp.gate.e_score_correction_bias"] = (4,)
        for mlp, ffn in mlps.items():
            shapes[f"{base}.{mlp}.gate_proj.weight"] = (ffn, 24)
            shapes[f"{base}.{mlp}.up_proj.weight"] = (ffn, 24)
            shapes[f"{base}.{mlp}.down_proj.weight"] = (24, ffn)
    return config, shapes


MODELS = (
    Model("llama", "llama", *_llama_like()),
    Model("llama-tied", "llama", *_llama_like(tied=True)),
    Model("mistral", "mistral", *_llama_like()),
    Model("mixtral", "mixtral", *_mixtral()),
    Model("qwen2", "qwen2", *_llama_like(biased=True)),
    Model("qwen3", "qwen3", *_llama_like(qk_norms=True, tied=True)),
    Model("qwen3-moe", "qwen3_moe", *_qwen_moe()),
    Model("gemma", "gemma", *_llama_like(tied=True)),
    Model("gemma3", "gemma3_text", *_llama_like(tied=True, qk_norms=True, gemma2=True)),
    Model("gpt2", "gpt2", *_gpt2()),
    Model("gpt-neox", "gpt_neox", *_gpt_neox()),
    Model("deepseek", "deepseek_v3", *_deepseek()),
)
BY_NAME = {model.name: model for model in MODELS}


def checkpoint_of(model: Model) -> tuple[dict[str, TensorSpec], dict[str, Array]]:
    """Return a checkpoint with Adam's state: each element of the model has a value of its own."""
    specs: dict[str, TensorSpec] = {}
    arrays: dict[str, Array] = {}
    count = 0
    for name, shape in model.shapes.items():
        size = int(np.prod(shape))
        values = np.arange(count, count + size, dtype=np.int32).reshape(shape)
        count += size
        for key, offset in (
            (f"model/{name}", 1), (f"optim/{name}/exp_avg", 10**8),
            (f"optim/{name}/exp_avg_sq", 2 * 10**8),
        ):  # fmt: skip
            arrays[key] = values + offset
            specs[key] = TensorSpec("int32", shape)
        arrays[f"optim/{name}/step"] = np.array(7.0, dtype=np.float32)
        specs[f"optim/{name}/step"] = TensorSpec("float32", ())
    return specs, arrays
