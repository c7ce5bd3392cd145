"""Computes like Megatron-Core from the tensors of its checkpoints, written from its model code.

Independent of the rules: fused QKV is cut by query group, a gated first matrix in halves. If
these logits are those of transformers' model, then every element has come to its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Tensors = Mapping[str, Tensor]


class MegatronModel:
    """Megatron's decoder over the tensors of a checkpoint, for one family of models.

    Args:
        tensors: by Megatron's names.
        config: transformers' configuration, for what Megatron takes from its command line.
    """

    def __init__(self, tensors: Tensors, config: Any) -> None:
        self._tensors = tensors
        self._config = config
        self._family: str = config.model_type
        self._is_gemma = self._family.startswith("gemma")
        self._has_biased_norms = self._family in ("gpt2", "gpt_neox")

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of sequences of tokens."""
        config = self._config
        hidden = self._tensors["embedding.word_embeddings.weight"][ids]
        if self._family == "gpt2":
            hidden = hidden + self._tensors["embedding.position_embeddings.weight"][: ids.shape[1]]
        if self._is_gemma:
            hidden = hidden * torch.tensor(config.hidden_size**0.5, dtype=hidden.dtype)
        for layer in range(config.num_hidden_layers):
            hidden = self._layer(layer, hidden)
        hidden = self._norm(hidden, "decoder.final_layernorm.")
        head = self._tensors.get("output_layer.weight")
        if head is None:
            head = self._tensors["embedding.word_embeddings.weight"]
        result = functional.linear(hidden, head)[..., : config.vocab_size]
        cap = getattr(config, "final_logit_softcapping", None)
        return cap * torch.tanh(result / cap) if cap else result

    def _layer(self, layer: int, hidden: Tensor) -> Tensor:
        inner = self._norm(hidden, "self_attention.linear_qkv.layer_norm_", layer)
        if self._family == "deepseek_v3":
            inner = self._norm(hidden, "input_layernorm.", layer)
            attention = self._latent_attention(layer, inner)
        else:
            attention = self._attention(layer, inner)
        if self._family == "gpt_neox" and self._config.use_parallel_residual:
            return hidden + attention + self._mlp(layer, self._second_norm(layer, hidden))
        if self._family in ("gemma2", "gemma3_text"):
            attention = self._norm(attention, "self_attention.linear_proj.post_layernorm.", layer)
        hidden = hidden + attention
        output = self._mlp(layer, self._second_norm(layer, hidden))
        if self._family in ("gemma2", "gemma3_text"):
            output = self._norm(output, "mlp.linear_fc2.post_layernorm.", layer)
        return hidden + output

    def _second_norm(self, layer: int, hidden: Tensor) -> Tensor:
        for name in ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."):
            if self._of_layer(layer, f"{name}weight") is not None:
                return self._norm(hidden, name, layer)
        raise AssertionError(f"layer {layer} has no norm before its MLP")

    def _attention(self, layer: int, hidden: Tensor) -> Tensor:
        config = self._config
        heads = config.num_attention_heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        fused = self._linear(layer, "self_attention.linear_qkv.", hidden)
        batch, length, rows = fused.shape
        head_dim = rows // (heads + 2 * groups)
        # Rows of each query group: its heads' queries, then one key, then one value.
        by_group = fused.view(batch, length, groups, heads // groups + 2, head_dim)
        query = by_group[..., :-2, :].reshape(batch, length, heads, head_dim)
        key, value = by_group[..., -2, :], by_group[..., -1, :]
        for part in ("q", "k"):
            weight = self._of_layer(layer, f"self_attention.{part}_layernorm.weight")
            if weight is not None and part == "q":
                query = self._scaled(query, weight)
            elif weight is not None:
                key = self._scaled(key, weight)
        if self._family != "gpt2":
            dim = self._rotary_dim(head_dim)
            base = self._rotary_base(layer)
            query, key = (_rotated_halves(part, dim, base) for part in (query, key))
        scale = head_dim**-0.5
        if self._family in ("gemma2", "gemma3_text"):
            scale = config.query_pre_attn_scalar**-0.5
        key, value = (part.repeat_interleave(heads // groups, dim=2) for part in (key, value))
        cap = getattr(config, "attn_logit_softcapping", None)
        mixed = _attend(query, key, value, scale, cap)
        return self._linear(layer, "self_attention.linear_proj.", mixed.flatten(2))

    def _latent_attention(self, layer: int, hidden: Tensor) -> Tensor:
        config = self._config
        batch, length, _ = hidden.shape
        heads, rope, plain = (
            config.num_attention_heads, config.qk_rope_head_dim, config.qk_nope_head_dim,
        )  # fmt: skip
        if config.q_lora_rank is None:
            query = self._linear(layer, "self_attention.linear_q_proj.", hidden)
        else:
            query = self._linear(layer, "self_attention.linear_q_down_proj.", hidden)
            query = self._norm(query, "self_attention.linear_q_up_proj.layer_norm_", layer)
            query = self._linear(layer, "self_attention.linear_q_up_proj.", query)
        query = query.view(batch, length, heads, plain + rope)
        down = self._linear(layer, "self_attention.linear_kv_down_proj.", hidden)
        latent, key_rope = down.split([config.kv_lora_rank, rope], dim=-1)
        latent = self._norm(latent, "self_attention.linear_kv_up_proj.layer_norm_", layer)
        up = self._linear(layer, "self_attention.linear_kv_up_proj.", latent)
        up = up.view(batch, length, heads, plain + config.v_head_dim)
        key_plain, value = up.split([plain, config.v_head_dim], dim=-1)
        base = self._rotary_base(layer)
        key_rope = _rotated_pairs(key_rope[:, :, None], base).expand(-1, -1, heads, -1)
        query = torch.cat([query[..., :plain], _rotated_pairs(query[..., plain:], base)], dim=-1)
        key = torch.cat([key_plain, key_rope], dim=-1)
        mixed = _attend(query, key, value, (plain + rope) ** -0.5, None)
        return self._linear(layer, "self_attention.linear_proj.", mixed.flatten(2))

    def _mlp(self, layer: int, hidden: Tensor) -> Tensor:
        if self._of_layer(layer, "mlp.router.weight") is None:
            return self._dense(
                hidden,
                self._of_layer(layer, "mlp.linear_fc1.weight"),
                self._of_layer(layer, "mlp.linear_fc2.weight"),
                self._of_layer(layer, "mlp.linear_fc1.bias"),
                self._of_layer(layer, "mlp.linear_fc2.bias"),
            )
        shares = self._shares(layer, hidden)
        output = torch.zeros_like(hidden)
        for expert in range(shares.shape[-1]):
            first, second = (
                self._of_layer(layer, f"mlp.experts.local_experts.{expert}.{linear}.weight")
                for linear in ("linear_fc1", "linear_fc2")
            )
            output += shares[..., expert, None] * self._dense(hidden, first, second)
        shared = self._of_layer(layer, "mlp.shared_experts.linear_fc1.weight")
        if shared is not None:
            output = output + self._dense(
                hidden, shared, self._of_layer(layer, "mlp.shared_experts.linear_fc2.weight")
            )
        return output

    def _shares(self, layer: int, hidden: Tensor) -> Tensor:
        """Return how much of each expert's output a token takes; most are zero."""
        config = self._config
        router = self._of_layer(layer, "mlp.router.weight")
        assert router is not None
        scores = functional.linear(hidden, router)
        bias = self._of_layer(layer, "mlp.router.expert_bias")
        if bias is None:
            scores = scores.softmax(-1)
            chosen = scores.topk(config.num_experts_per_tok, dim=-1).indices
            factor = 1.0
        else:
            scores = scores.sigmoid()
            chosen = (scores + bias).topk(config.num_experts_per_tok, dim=-1).indices
            factor = config.routed_scaling_factor
        kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return factor * kept / kept.sum(-1, keepdim=True)

    def _dense(
        self,
        hidden: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        first_bias: Tensor | None = None,
        second_bias: Tensor | None = None,
    ) -> Tensor:
        assert first is not None
        assert second is not None
        inner = functional.linear(hidden, first, first_bias)
        if self._family == "gpt2":
            inner = functional.gelu(inner, approximate="tanh")
        elif self._family == "gpt_neox":
            inner = functional.gelu(inner)
        else:
            # All rows of the gate come first.
            gate, up = inner.chunk(2, dim=-1)
            is_gelu = self._is_gemma
            gate = functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)
            inner = gate * up
        return functional.linear(inner, second, second_bias)

    def _rotary_dim(self, head_dim: int) -> int:
        if self._family != "gpt_neox":
            return head_dim
        return int(head_dim * self._parameters(0).get("partial_rotary_factor", 1.0))

    def _rotary_base(self, layer: int) -> float:
        return float(self._parameters(layer)["rope_theta"])

    def _parameters(self, layer: int) -> dict[str, Any]:
        parameters: dict[str, Any] = self._config.rope_parameters
        kinds = getattr(self._config, "layer_types", None)
        if kinds and kinds[layer] in parameters:
            inner: dict[str, Any] = parameters[kinds[layer]]
            return inner
        return parameters

    def _norm(self, hidden: Tensor, prefix: str, layer: int | None = None) -> Tensor:
        def found(leaf: str) -> Tensor | None:
            if layer is None:
                return self._tensors.get(f"{prefix}{leaf}")
            return self._of_layer(layer, f"{prefix}{leaf}")

        weight = found("weight")
        if weight is None:
            return hidden
        if self._has_biased_norms:
            eps = getattr(self._config, "layer_norm_epsilon", None) or self._config.layer_norm_eps
            return functional.layer_norm(hidden, weight.shape, weight, found("bias"), eps)
        return self._scaled(hidden, weight)

    def _scaled(self, hidden: Tensor, weight: Tensor) -> Tensor:
        eps = self._config.rms_norm_eps
        normal = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
        return normal * (1 + weight if self._is_gemma else weight)

    def _linear(self, layer: int, prefix: str, hidden: Tensor) -> Tensor:
        weight = self._of_layer(layer, f"{prefix}weight")
        assert weight is not None, prefix
        return functional.linear(hidden, weight, self._of_layer(layer, f"{prefix}bias"))

    def _of_layer(self, layer: int, name: str) -> Tensor | None:
        """Return a tensor of one layer; None if it has none."""
        return self._tensors.get(f"decoder.layers.{layer}.{name}")


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return causal attention of `[batch, length, heads, dim]`."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    length = query.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(mask, -torch.inf).softmax(-1), value)


def _angles(length: int, dim: int, base: float) -> Tensor:
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)[None, :, None]


def _rotated_halves(part: Tensor, dim: int, base: float) -> Tensor:
    """Rotate the first `dim` of each head: element i with element i + dim / 2."""
    angles = _angles(part.shape[1], dim, base)
    first, second, rest = part[..., : dim // 2], part[..., dim // 2 : dim], part[..., dim:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
            rest,
        ],
        dim=-1,
    )


def _rotated_pairs(part: Tensor, base: float) -> Tensor:
    """Rotate each head's elements 2i with 2i + 1."""
    angles = _angles(part.shape[1], part.shape[-1], base)
    even, odd = part[..., 0::2], part[..., 1::2]
    turned = torch.stack(
        [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], dim=-1
    )
    return turned.flatten(-2)
