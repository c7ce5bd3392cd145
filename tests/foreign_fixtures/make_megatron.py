"""Makes the checkpoints of Megatron in `tests/foreign_fixtures/megatron`, and what they hold.

Run where Megatron-Core and psutil are installed (tried with 0.16.1 and torch 2.13, on CPUs):

    python tests/foreign_fixtures/make_megatron.py tests/foreign_fixtures

The models have what readers get wrong: fused and gated matrices, padded vocabularies, tied
embeddings, layers on several pipeline stages, experts on several ranks. Parameters and gradients
are given numbers by their names, so that plain AdamW on unsharded float32 copies has the state that
Megatron must arrive at, bit for bit; it is in `expected.pt`. Megatron's layers, optimizers and
writers of checkpoints are its own; the files of one rank each are written as Megatron-LM's
`training/checkpointing.py` does, which is not in Megatron-Core.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tarfile
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
from megatron_on_cpu import join_gloo, patch

STEPS = 3
HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, VOCABULARY, PADDED, POSITIONS = 8, 4, 2, 4, 12, 27, 32, 8
LR, DECAY = 0.02, 0.1


@dataclass(frozen=True)
class Case:
    """One checkpoint: how its model is, and how it was trained and saved."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    vp: int | None = None
    layers: int = 2
    dtype: torch.dtype = torch.bfloat16
    gated: bool = True
    tied: bool = False
    experts: int | None = None
    distributed: str | None = None
    """The format of the distributed optimizer's state; None for an optimizer on each rank."""
    per_rank: bool = False
    """Whether each rank writes a file of its own, as Megatron-LM did before Megatron-Core."""
    apart: bool = False
    """Whether each layer has tensors of its own."""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


CASES = {
    "core_fp32_tp2": Case(tp=2, dtype=torch.float32),
    "core_bf16_tp2_pp2": Case(tp=2, pp=2, gated=False, tied=True),
    "core_bf16_full": Case(tp=2, dp=2, distributed="fully_reshardable"),
    "core_bf16_dp": Case(tp=2, dp=2, pp=1, distributed="dp_reshardable"),
    "core_bf16_dp_pp2": Case(pp=2, dp=1, gated=False, tied=True, distributed="dp_reshardable"),
    "core_moe_ep2": Case(dp=2, ep=2, experts=4, distributed="fully_reshardable"),
    "core_apart": Case(dp=1, pp=2, dtype=torch.float32, apart=True),
    "lm_bf16_tp2_pp2": Case(tp=2, pp=2, gated=True, tied=True, per_rank=True),
    "lm_fp32_pp2_vp2": Case(tp=1, pp=2, vp=2, layers=4, dtype=torch.float32, gated=False,
                            per_rank=True),
    "lm_fp32_tp2": Case(tp=2, dtype=torch.float32, layers=1, per_rank=True),
}  # fmt: skip


def numbers(name: str, shape: tuple[int, ...], turn: int) -> torch.Tensor:
    """Return numbers that all data types have, the same wherever they are made."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + turn)
    return torch.randint(-8, 9, shape, generator=generator).float() / 8


def has_decay(name: str, shape: tuple[int, ...]) -> bool:
    return not name.endswith(".bias") and len(shape) > 1


def expected(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state that training arrives at, from plain AdamW on float32 copies."""
    masters = {name: numbers(name, shape, 0).requires_grad_() for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [masters[n] for n, s in shapes.items() if has_decay(n, s)],
             "weight_decay": DECAY},
            {"params": [masters[n] for n, s in shapes.items() if not has_decay(n, s)],
             "weight_decay": 0.0},
        ],
        lr=LR,
    )  # fmt: skip
    for step in range(STEPS):
        for name, master in masters.items():
            master.grad = numbers(name, shapes[name], step + 1)
        optimizer.step()
    state = {}
    for name, master in masters.items():
        state[f"model/{name}"] = master.detach().to(dtype)
        if dtype != torch.float32:
            state[f"optim/{name}/master_param"] = master.detach()
        for slot in ("exp_avg", "exp_avg_sq"):
            state[f"optim/{name}/{slot}"] = optimizer.state[master][slot]
    return state


class Names:
    """Names of a rank's parameters in the whole model, and the rank's part of each."""

    def __init__(self, case: Case, chunks: list[Any]) -> None:
        from megatron.core import parallel_state as ranks

        self._case = case
        self._rank = ranks.get_tensor_model_parallel_rank()
        self._first_expert = ranks.get_expert_model_parallel_rank() * (
            (case.experts or 0) // case.ep
        )
        self.of: dict[torch.nn.Parameter, str] = {}
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                self.of[parameter] = self._global(chunk, name)

    def _global(self, chunk: Any, name: str) -> str:
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + self._first_expert)
        return ".".join(parts)

    def shape(self, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        shape = list(parameter.shape)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= self._case.tp
        return tuple(shape)

    def part(self, parameter: torch.nn.Parameter, turn: int) -> torch.Tensor:
        """Return this rank's part of the numbers of a parameter."""
        name = self.of[parameter]
        tied = "output_layer.weight" if self._case.tied else None
        whole = numbers(
            "embedding.word_embeddings.weight" if name == tied else name,
            self.shape(parameter), turn,
        )  # fmt: skip
        if not getattr(parameter, "tensor_model_parallel", False):
            return whole
        dim = parameter.partition_dim
        if self._case.gated and ".linear_fc1." in name:
            halves = [half.chunk(self._case.tp, dim)[self._rank] for half in whole.chunk(2, dim)]
            return torch.cat(halves, dim)
        return whole.chunk(self._case.tp, dim)[self._rank]


def build(case: Case) -> tuple[list[Any], Any, Any]:
    """Return the model's chunks on this rank, wrapped, and the optimizer and scheduler."""
    from megatron.core import parallel_state as ranks
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = {}
    if case.experts:
        more = {
            "num_moe_experts": case.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN,
            "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
        }  # fmt: skip
    config = TransformerConfig(
        num_layers=case.layers, hidden_size=HIDDEN, num_attention_heads=HEADS,
        num_query_groups=GROUPS, kv_channels=HEAD_DIM, ffn_hidden_size=FFN,
        tensor_model_parallel_size=case.tp, pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp, expert_model_parallel_size=case.ep,
        gated_linear_unit=case.gated, add_bias_linear=not case.gated,
        activation_func=torch.nn.functional.silu if case.gated else torch.nn.functional.gelu,
        normalization="RMSNorm" if case.gated else "LayerNorm",
        bf16=case.dtype == torch.bfloat16, params_dtype=case.dtype, pipeline_dtype=case.dtype,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, gradient_accumulation_fusion=False,
        hetereogenous_dist_checkpoint=case.apart, **more,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=case.experts, moe_grouped_gemm=False, normalization=config.normalization
    )
    first, last = ranks.is_pipeline_first_stage, ranks.is_pipeline_last_stage
    chunks = []
    for chunk in range(case.vp or 1):
        stage = {"vp_stage": chunk} if case.vp else {}
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=PADDED,
            max_sequence_length=POSITIONS,
            pre_process=first(ignore_virtual=False, **stage),
            post_process=last(ignore_virtual=False, **stage),
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope" if case.gated else "learned_absolute", **stage,
        )  # fmt: skip
        if case.dtype == torch.bfloat16:
            model.bfloat16()
        chunks.append(model)
    wrapped = [
        DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(
                use_distributed_optimizer=case.distributed is not None,
                grad_reduce_in_fp32=True,
            ),
            module=model,
        )
        for model in chunks
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=LR, min_lr=LR / 10, weight_decay=DECAY, clip_grad=0.0,
            bf16=case.dtype == torch.bfloat16, params_dtype=case.dtype,
            use_distributed_optimizer=case.distributed is not None,
        ),
        wrapped,
    )  # fmt: skip
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=LR / 10, lr_warmup_steps=0, lr_decay_steps=100,
        lr_decay_style="constant", start_wd=DECAY, end_wd=DECAY, wd_incr_steps=100,
        wd_incr_style="constant",
    )  # fmt: skip
    return wrapped, optimizer, scheduler


def arguments(case: Case) -> argparse.Namespace:
    """Return the arguments that Megatron-LM would have stored."""
    return argparse.Namespace(
        num_layers=case.layers, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS,
        group_query_attention=True, num_query_groups=GROUPS, kv_channels=HEAD_DIM,
        vocab_size=VOCABULARY, padded_vocab_size=PADDED, max_position_embeddings=POSITIONS,
        tensor_model_parallel_size=case.tp, pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp, expert_model_parallel_size=case.ep,
        untie_embeddings_and_output_weights=not case.tied, swiglu=case.gated,
        num_experts=case.experts, transformer_impl="local", params_dtype=case.dtype,
        **case.arguments,
    )  # fmt: skip


def generators() -> dict[str, Any]:
    """Return the state of random numbers, as Megatron-LM stores it."""
    return {
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
    }


def train(rank: int, case: Case, directory: str, port: int) -> None:
    patch()
    join_gloo(rank, case.world, port)
    from megatron.core import parallel_state as ranks

    ranks.initialize_model_parallel(
        tensor_model_parallel_size=case.tp, pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp, expert_model_parallel_size=case.ep,
    )  # fmt: skip
    wrapped, optimizer, scheduler = build(case)
    chunks = [chunk.module for chunk in wrapped]
    names = Names(case, chunks)
    with torch.no_grad():
        for parameter in names.of:
            parameter.copy_(names.part(parameter, 0))
    optimizer.reload_model_params()
    for step in range(STEPS):
        for parameter in names.of:
            parameter.main_grad.copy_(names.part(parameter, step + 1))
        optimizer.step()
        scheduler.step(1)
    state = {
        "args": arguments(case), "checkpoint_version": 3.0, "iteration": STEPS,
        "num_floating_point_operations_so_far": 1000, "opt_param_scheduler": scheduler.state_dict(),
    }  # fmt: skip
    shapes = {name: names.shape(parameter) for parameter, name in names.of.items()}
    of_all: list[dict[str, tuple[int, ...]]] = [{} for _ in range(case.world)]
    torch.distributed.all_gather_object(of_all, shapes)
    (save_per_rank if case.per_rank else save_core)(case, directory, chunks, optimizer, state)
    if rank == 0:
        merged = {name: shape for shapes in of_all for name, shape in shapes.items()}
        if case.tied:
            merged.pop("output_layer.weight", None)
        torch.save(expected(merged, case.dtype), f"{directory}/expected.pt")
        Path(directory, "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)


def save_core(case: Case, directory: str, chunks: list[Any], optimizer: Any, state: Any) -> None:
    """Write a folder of torch_dist."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ranks
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True}
    if case.distributed is not None:
        metadata["distrib_optim_sharding_type"] = case.distributed
    state["model"] = chunks[0].sharded_state_dict(metadata=metadata)
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=metadata)
    state["rng_state"] = ShardedObject(
        "rng_state", [generators()],
        (case.pp, case.tp),
        (ranks.get_pipeline_model_parallel_rank(), ranks.get_tensor_model_parallel_rank()),
        replica_id=ranks.get_data_parallel_rank(with_context_parallel=True),
    )  # fmt: skip
    target = Path(directory, f"iter_{STEPS:07d}")
    target.mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(
        state, str(target),
        TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
        content_metadata=metadata,
    )  # fmt: skip


def save_per_rank(
    case: Case, directory: str, chunks: list[Any], optimizer: Any, state: Any
) -> None:
    """Write a file for each rank of model parallelism."""
    from megatron.core import parallel_state as ranks

    name = f"mp_rank_{ranks.get_tensor_model_parallel_rank():02d}"
    if case.pp > 1:
        name += f"_{ranks.get_pipeline_model_parallel_rank():03d}"
    keys = ["model"] if len(chunks) == 1 else [f"model{n}" for n in range(len(chunks))]
    for key, chunk in zip(keys, chunks, strict=True):
        state[key] = chunk.state_dict_for_save_checkpoint()
    state["optimizer"] = optimizer.state_dict()
    state["rng_state"] = [generators()]
    target = Path(directory, f"iter_{STEPS:07d}", name)
    target.mkdir(parents=True)
    torch.save(state, target / "model_optim_rng.pt")


def main(root: Path, chosen: list[str]) -> None:
    for number, name in enumerate(chosen or CASES):
        case = CASES[name]
        with tempfile.TemporaryDirectory() as directory:
            arguments = (case, directory, 29610 + number)
            mp.start_processes(train, args=arguments, nprocs=case.world, start_method="spawn")
            pack(Path(directory), root / "megatron" / f"{name}.tar.xz")
        print(name, flush=True)


def pack(directory: Path, target: Path) -> None:
    """Write a folder as one file: most of it is what zips have between tensors."""
    target.parent.mkdir(exist_ok=True)
    with tarfile.open(target, "w:xz") as archive:
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(directory)))
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(entry, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
