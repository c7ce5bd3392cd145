"""Small models of transformers, of every family that has a preset, with random weights.

Nothing is downloaded: they are built from configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

transformers.utils.logging.disable_progress_bar()

_SIZES = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_OF_HEADS = {**_SIZES, "head_dim": 12}


@dataclass(frozen=True, slots=True)
class Family:
    """A model.

    Attributes:
        name: its name here.
        preset: the preset that is for it.
        config: makes its configuration.
        lacking: spellings of the preset whose frameworks do not have what this model has.
    """

    name: str
    preset: str
    config: Callable[[], Any]
    lacking: frozenset[str] = frozenset()

    def built(self, seed: int) -> nn.Module:
        """Return the model with random weights, norms and biases too, ready to be trained."""
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            self.config(), attn_implementation="eager"
        )
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                parameter.normal_(std=0.05)
                if parameter.dim() == 1:
                    parameter.add_(0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.05)
        return model.train()


def _config(name: str, sizes: dict[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**{**sizes, **more})


FAMILIES = (
    Family("llama", "llama", _config("LlamaConfig", _SIZES, tie_word_embeddings=False)),
    Family("llama-tied", "llama", _config("LlamaConfig", _OF_HEADS, tie_word_embeddings=True)),
    Family(
        "llama-biased",
        "llama",
        _config("LlamaConfig", _SIZES, attention_bias=True),
        frozenset({"torchtitan"}),
    ),
    Family("mistral", "mistral", _config("MistralConfig", _OF_HEADS, sliding_window=None)),
    Family(
        "mixtral",
        "mixtral",
        _config("MixtralConfig", _SIZES, num_local_experts=4, num_experts_per_tok=2),
    ),
    Family("qwen2", "qwen2", _config("Qwen2Config", _SIZES, tie_word_embeddings=False)),
    Family("qwen2-tied", "qwen2", _config("Qwen2Config", _SIZES, tie_word_embeddings=True)),
    Family("qwen3", "qwen3", _config("Qwen3Config", _OF_HEADS)),
    Family(
        "qwen3-moe",
        "qwen3_moe",
        _config(
            "Qwen3MoeConfig", _OF_HEADS,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[],
        ),
    ),
    Family("gemma", "gemma", _config("GemmaConfig", _OF_HEADS)),
    Family(
        "gemma2",
        "gemma2",
        _config("Gemma2Config", _OF_HEADS, query_pre_attn_scalar=16, sliding_window=64),
    ),
    Family(
        "gemma3",
        "gemma3_text",
        _config("Gemma3TextConfig", _OF_HEADS, query_pre_attn_scalar=16, sliding_window=64),
    ),
    Family(
        "gpt2",
        "gpt2",
        _config(
            "GPT2Config", {},
            vocab_size=250, n_embd=32, n_head=4, n_layer=3, n_positions=64, bos_token_id=1,
            eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
    ),
    Family(
        "gpt-neox",
        "gpt_neox",
        _config(
            "GPTNeoXConfig",
            {key: size for key, size in _SIZES.items() if key != "num_key_value_heads"},
            tie_word_embeddings=False,
        ),
    ),
    Family(
        "deepseek-v3",
        "deepseek_v3",
        _config(
            "DeepseekV3Config", {**_SIZES, "num_key_value_heads": 4},
            q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12,
            n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=1, moe_intermediate_size=20, norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
    ),
    Family(
        "deepseek-v3-plain-query",
        "deepseek_v3",
        _config(
            "DeepseekV3Config", {**_SIZES, "num_key_value_heads": 4},
            q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
            v_head_dim=12, n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2,
            n_group=1, topk_group=1, first_k_dense_replace=1, moe_intermediate_size=20,
        ),
    ),
)  # fmt: skip


def tokens(seed: int) -> torch.Tensor:
    """Return two sequences of tokens."""
    return torch.randint(3, 250, (2, 11), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module) -> torch.Tensor:
    """Return what a model says of some tokens."""
    model.eval()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tokens(7)).logits
    model.train()
    return result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Do training steps, with tokens that depend on the number of the step."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        ids = tokens(100 + step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a model's parameters and persistent buffers, tied ones once."""
    state: dict[str, torch.Tensor] = {}
    pointers: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.numel() and tensor.data_ptr() in pointers:
            continue
        pointers.add(tensor.data_ptr())
        state[name] = tensor.detach().clone()
    return state
