"""torchtitan's checkpoints, written by its own manager from its own models and optimizers.

Of each model: what is read, bit for bit; the presets against torchtitan's own conversion to Hugging
Face's names and back; and models that take what keepstep made of Hugging Face's files. Gradients
are random numbers: torchtitan's attention needs a GPU's compiler, and no check needs its results.

A projection of q, k and v that torchtitan has fused is three tensors in its files, but one in its
optimizer's state: the presets split that.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm

from keepstep import checkpoint
from tests.convert.checkpoints import convert, documents, left_out, read, rules_check
from tests.convert.checks import Checks, adam_state, assert_equal

REQUIREMENTS = ("torchtitan==0.3.0", "triton")

STEPS = 3
DIM, VOCABULARY = 32, 250
_ONES = {"weight": nn.init.ones_}
_NORMAL = {"weight": nn.init.normal_, "bias": nn.init.zeros_}


@dataclass(frozen=True, slots=True)
class Case:
    """A model of torchtitan.

    Attributes:
        name: its name here.
        preset: the preset for it.
        config: makes torchtitan's configuration of it.
        adapter: torchtitan's class that converts its names.
        hub_config: what of Hugging Face's configuration the rules need.
        is_fused: q, k and v are one parameter.
    """

    name: str
    preset: str
    config: Callable[[], Any]
    adapter: Any
    hub_config: dict[str, Any]
    is_fused: bool = False

    def built(self, seed: int) -> nn.Module:
        """Return the model with random parameters and buffers."""
        torch.manual_seed(seed)
        model: nn.Module = self.config().build()
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.normal_()
        return model


def _around(
    kind: Any, layers: Any, dim: int = DIM, vocabulary: int = VOCABULARY, **more: Any
) -> Any:
    """Return the configuration of a whole model around its layers."""
    return kind(
        dim=dim,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=_NORMAL
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=_ONES),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=_NORMAL),
        layers=layers,
        **more,
    )


def llama(is_fused: bool) -> Any:
    """Return the configuration of a Llama with grouped queries."""
    return _around(
        llama3.Llama3Model.Config,
        llama3._build_llama3_layers(
            n_layers=3, dim=DIM, n_heads=4, n_kv_heads=2, hidden_dim=48, fuse_qkv=is_fused,
            attn_backend="flex", rope=ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000.0),
        ),
    )  # fmt: skip


def small_llama() -> Any:
    """Return the configuration of a Llama of one layer, for files that tests read."""
    return _around(
        llama3.Llama3Model.Config,
        llama3._build_llama3_layers(
            n_layers=1, dim=16, n_heads=4, n_kv_heads=2, hidden_dim=12, fuse_qkv=True,
            attn_backend="flex", rope=ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0),
        ),
        dim=16,
        vocabulary=20,
    )  # fmt: skip


def qwen(is_fused: bool) -> Any:
    """Return the configuration of a tied Qwen 3."""
    return _around(
        qwen3.Qwen3Model.Config,
        qwen3._build_qwen3_layers(
            n_layers=3, dim=DIM, n_heads=4, n_kv_heads=2, head_dim=12, hidden_dim=48,
            fuse_qkv=is_fused, attn_backend="flex",
            rope=CosSinRoPE.Config(dim=12, max_seq_len=64, theta=10000.0),
        ),
        enable_weight_tying=True,
    )  # fmt: skip


def qwen_moe() -> Any:
    """Return the configuration of a Qwen 3 with experts."""
    return _around(
        qwen3.Qwen3Model.Config,
        qwen3._build_qwen3_moe_layers(
            n_layers=3, dim=DIM, n_heads=4, n_kv_heads=2, head_dim=12, moe_hidden_dim=20,
            num_experts=4, top_k=2, fuse_qkv=False, attn_backend="flex",
            moe_comm_backend="standard",
            rope=CosSinRoPE.Config(dim=12, max_seq_len=64, theta=10000.0),
        ),
    )  # fmt: skip


def deepseek(q_lora_rank: int) -> Any:
    """Return the configuration of a DeepSeek V3, with one dense layer."""
    return _around(
        deepseek_v3.DeepSeekV3Model.Config,
        deepseek_v3._build_dsv3_layers(
            n_layers=3, n_dense_layers=1, dim=DIM, n_heads=4, q_lora_rank=q_lora_rank,
            kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, mscale=1.0,
            dense_hidden_dim=48, moe_hidden_dim=20, num_experts=4, num_shared_experts=2,
            router_top_k=2, router_score_func="sigmoid", attn_backend="flex",
            moe_comm_backend="standard", non_blocking_capacity_factor=None,
            rope=ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0),
        ),
    )  # fmt: skip


_HEADS = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": DIM,
    "intermediate_size": 48, "vocab_size": VOCABULARY, "moe_intermediate_size": 20,
}  # fmt: skip
_LATENT = {**_HEADS, "first_k_dense_replace": 1, "n_shared_experts": 2}

CASES = (
    Case("llama", "llama", lambda: llama(False), llama3.Llama3StateDictAdapter, _HEADS),
    Case("llama, fused", "llama", lambda: llama(True), llama3.Llama3StateDictAdapter, _HEADS, True),
    Case(
        "qwen3, tied", "qwen3", lambda: qwen(False), qwen3.Qwen3StateDictAdapter,
        {**_HEADS, "head_dim": 12},
    ),
    Case(
        "qwen3, tied, fused", "qwen3", lambda: qwen(True), qwen3.Qwen3StateDictAdapter,
        {**_HEADS, "head_dim": 12}, True,
    ),
    Case(
        "qwen3-moe", "qwen3_moe", qwen_moe, qwen3.Qwen3StateDictAdapter,
        {**_HEADS, "head_dim": 12},
    ),
    Case(
        "deepseek", "deepseek_v3", lambda: deepseek(20), deepseek_v3.DeepSeekV3StateDictAdapter,
        _LATENT,
    ),
    Case(
        "deepseek, plain query", "deepseek_v3", lambda: deepseek(0),
        deepseek_v3.DeepSeekV3StateDictAdapter, _LATENT,
    ),
)  # fmt: skip


SMALL_CASE = Case(
    "small llama", "llama", small_llama, llama3.Llama3StateDictAdapter,
    {
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16,
        "intermediate_size": 12, "vocab_size": 20,
    },
    True,
)  # fmt: skip


class Values:
    """State that is values alone."""

    def __init__(self, **values: int) -> None:
        self._values = values

    def state_dict(self) -> dict[str, int]:
        """Return what to save."""
        return self._values

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what was saved."""
        self._values = state


def saved(case: Case, directory: Path) -> tuple[nn.Module, Any]:
    """Save a model after some steps with torchtitan's manager; return it and its optimizer."""
    model = case.built(0)
    settings = default_adamw(lr=0.01)
    settings.implementation = "for-loop"
    optimizers = settings.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=1).build(
        optimizers=optimizers, training_steps=10
    )
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizers.step()
        schedule.step()
    manager = CheckpointManager.Config(enable=True, interval=STEPS, keep_latest_k=0).build(
        dataloader=Values(dp_rank_0=7),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": Values(step=STEPS, ntokens_seen=99)},
        sd_adapter=None,
        base_folder=str(directory),
    )
    manager.save(STEPS)
    manager.close()
    (optimizer,) = optimizers
    return model, optimizer


def split(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by names of parameters as a model's state_dict would have them."""
    result = dict(state)
    for name, module in model.named_modules():
        if hasattr(module, "_split_qkv_on_save"):
            module._split_qkv_on_save(module, result, f"{name}.", {})
    return result


def check(checks: Checks, case: Case, directory: Path) -> None:
    """Check what is read of a model's checkpoint, and made of it."""
    model, optimizer = saved(case, directory)
    url, config = directory / "checkpoint", directory / "config.json"
    config.write_text(json.dumps(case.hub_config))
    live = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    moments = adam_state(model, optimizer)
    with checks(f"{case.name}: every tensor and moment is the live one, bit for bit"):
        tensors = {k: t for k, t in read(url).items() if k.startswith(("model/", "optim/"))}
        assert_equal(tensors, {**{f"model/{name}": t for name, t in live.items()}, **moments})
    with checks(f"{case.name}: step, schedule and options of the optimizer are carried"):
        assert convert(url, directory / "none", "--dry-run")["step"] == STEPS
        values = documents(url)["values"]
        assert values["train_state/ntokens_seen"] == 99, values
        assert values["lr_scheduler/last_epoch"] == STEPS, values
        groups = documents(url)["optim/groups"]
        assert {n for g in groups for n in g["parameters"]} == {
            name for name, _ in model.named_parameters()
        }
        assert set(left_out(url)) == set(), left_out(url)
    adapter = case.adapter(case.config(), None)
    expected = {name: value.contiguous() for name, value in adapter.to_hf(dict(live)).items()}
    tied = {"lm_head.weight"} - set(expected)
    dropped = {name for name in live if "expert_bias" in name and case.preset == "qwen3_moe"}
    with checks(f"{case.name}: every tensor is for one rule"):
        rules_check(url, f"{case.preset}:torchtitan:hf", "--config", config)
    with checks(f"{case.name}: by rules the model is what torchtitan's own conversion makes"):
        convert(
            url, directory / "hf", "--to", "huggingface", "--config", config,
            "--rules", f"{case.preset}:torchtitan:hf",
        )  # fmt: skip
        made = load_file(directory / "hf" / "model.safetensors")
        for name in tied:
            assert_equal(made.pop(name), made["model.embed_tokens.weight"])
        assert_equal(made, expected)
    with checks(f"{case.name}: and so does its optimizer's state"):
        convert(
            url, directory / "hub", "--config", config, "--rules", f"{case.preset}:torchtitan:hf"
        )
        got = read(directory / "hub")
        for slot in ("exp_avg", "exp_avg_sq"):
            state = {
                name: moments.get(f"optim/{name}/{slot}", tensor)
                for name, tensor in {**dict(model.named_parameters()), **live}.items()
            }
            # The adapter takes them apart; a module's own hooks do so for the fused ones.
            for name, tensor in adapter.to_hf(split(model, state)).items():
                key = f"optim/{name}/{slot}"
                has_state = not name.endswith("correction_bias")
                assert (key in got) == has_state, key
                if has_state:
                    assert_equal(got[key], tensor.contiguous(), key)
    with checks(f"{case.name}: from Hugging Face's names torchtitan's model loads all of it"):
        hub = directory / "hub-files"
        hub.mkdir()
        save_file(expected, hub / "model.safetensors", metadata={"format": "pt"})
        is_tied = bool(tied)
        (hub / "config.json").write_text(
            json.dumps({
                **case.hub_config, "tie_word_embeddings": is_tied,
                "architectures": ["Qwen3ForCausalLM"],
            })
        )  # fmt: skip
        convert(
            hub, directory / "model.pt", "--only", "model",
            "--rules", f"{case.preset}:hf:torchtitan",
        )  # fmt: skip
        fresh = case.built(1)
        state = torch.load(directory / "model.pt", weights_only=True)
        problems = fresh.load_state_dict(state, strict=False)
        assert set(problems.missing_keys) == dropped, problems.missing_keys
        assert not problems.unexpected_keys, problems.unexpected_keys
        for name, tensor in fresh.state_dict().items():
            if name not in dropped:
                assert_equal(tensor, live[name], name)
    if not case.is_fused:
        with checks(f"{case.name}: checkpoint.load fills torchtitan's model and optimizer"):
            fresh = case.built(1)
            named = [(name, p) for name, p in fresh.named_parameters() if p.requires_grad]
            fresh_optimizer = torch.optim.AdamW(named, lr=0.5)
            state = {"model": fresh, "optimizer": fresh_optimizer}
            assert checkpoint.load(str(url), state) == STEPS
            assert_equal(dict(fresh.state_dict()), live)
            assert_equal(adam_state(fresh, fresh_optimizer), moments)
            assert fresh_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def main() -> None:
    """Check all models."""
    logging.getLogger().setLevel(logging.ERROR)
    checks = Checks()
    for case in CASES:
        with checks.all_of(case.name) as directory:
            check(checks, case, directory)
    checks.finish()


if __name__ == "__main__":
    main()
