"""Makes the checkpoints that `convert.py` converts, with the tools that write them.

    python ops/bench/convert_sources.py DIRECTORY LAYERS WHAT...

Run where DeepSpeed and transformers are installed (tried with DeepSpeed 0.19.8, transformers 5.23
and PyTorch 2.13, on CPUs); `dcp` needs PyTorch alone. WHAT is any of `zero`, `huggingface`, `dcp`.
A Llama of LAYERS layers, in bfloat16, is trained for one step by two ranks with ZeRO 2.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn

RANKS = 2
VOCABULARY, HIDDEN, INNER, HEADS = 32000, 1024, 2816, 16


def model_of(layers: int) -> nn.Module:
    """Return a Llama with random weights, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def train(rank: int, directory: str, layers: int, port: int) -> None:
    """Train one step as one of the ranks, and save."""
    import deepspeed

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = model_of(layers)
    named = dict(model.named_parameters())
    plain = [value for name, value in named.items() if "norm" in name]
    decayed = [value for name, value in named.items() if "norm" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}], lr=1e-4
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
        },
    )
    ids = torch.arange(8).reshape(1, 8) + rank
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(directory)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def save_dcp(directory: Path, layers: int) -> None:
    """Write a model and its Adam state in float32, as `get_state_dict` names them."""
    shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCABULARY, HIDDEN))
    for layer in range(layers):
        inside = f"model.layers.{layer}"
        shapes |= {f"{inside}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        shapes |= {f"{inside}.mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        shapes[f"{inside}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    model = {name: torch.rand(shape) for name, shape in shapes.items()}
    state = {
        name: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.rand(shape),
            "exp_avg_sq": torch.rand(shape),
        }
        for name, shape in shapes.items()
    }
    groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "params": list(shapes)}]
    dcp.save(
        {"model": model, "optim": {"state": state, "param_groups": groups}},
        checkpoint_id=directory,
        no_dist=True,
    )


def main(root: Path, layers: int, wanted: list[str]) -> None:
    if "huggingface" in wanted:
        model_of(layers).save_pretrained(root / "huggingface")
    if "zero" in wanted:
        arguments = (str(root / "zero"), layers, free_port())
        mp.start_processes(train, args=arguments, nprocs=RANKS, start_method="spawn")
    if "dcp" in wanted:
        save_dcp(root / "dcp", layers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
