"""Small checkpoints of every format that is read, to be changed."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep import checkpoint
from tests.unit.checkpoint.convert.read.test_hugging_face import CONFIG, SHARDED, folder, weights
from tests.unit.checkpoint.convert.read.test_state_dicts import optimizer_of

FIXTURES = Path(__file__).parents[1] / "foreign_fixtures"


class Harmless:
    """A class that is not there when the file is read."""


def _model() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "embed.weight": base,
        "head.weight": base,
        "norm.weight": base.T[1:3].bfloat16(),
        "steps": torch.tensor(3),
        "view": base.flatten()[3:20:4],
    }


def _optimizer() -> dict[str, Any]:
    state: dict[str, Any] = optimizer_of(
        [{"params": [("embed.weight", nn.Parameter(torch.ones(4, 6)))], "lr": 0.1}]
    )
    return state


def _training() -> dict[str, Any]:
    return {
        "model": _model(),
        "optimizer": _optimizer(),
        "step": 3,
        "rng": np.random.RandomState(1).get_state(),
        "more": [{"a": torch.ones(2)}, (1, 2.5, None, True, {"b"}, b"c")],
        "object": Harmless(),
    }


def _torch(directory: Path) -> None:
    torch.save(_training(), directory / "state.pt")


def _torch_legacy(directory: Path) -> None:
    torch.save(_training(), directory / "state.pt", _use_new_zipfile_serialization=False)


def _lightning(directory: Path) -> None:
    state = {
        "state_dict": _model(),
        "optimizer_states": [_optimizer()],
        "lr_schedulers": [{"last_epoch": 3}],
        "global_step": 3,
        "pytorch-lightning_version": "2.6",
    }
    torch.save(state, directory / "last.ckpt")


def _safetensors(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(weights("a", "b.c", "d"))


def _hugging_face(directory: Path) -> None:
    folder(directory, SHARDED)


def _hugging_face_torch(directory: Path) -> None:
    torch.save(_model(), directory / "pytorch_model.bin")
    (directory / "config.json").write_text(json.dumps(CONFIG))


def _trainer(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(weights("embed.weight", "norm"))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "trainer_state.json").write_text('{"global_step": 20, "log_history": [{"a": 1}]}')
    torch.save(_optimizer(), directory / "optimizer.pt")
    torch.save({"last_epoch": 20, "_last_lr": [0.5]}, directory / "scheduler.pt")
    torch.save({"numpy": np.random.RandomState(1).get_state()}, directory / "rng_state.pth")
    torch.save(Harmless(), directory / "training_args.bin")


def _accelerate(directory: Path) -> None:
    torch.save({"w": torch.ones(3)}, directory / "pytorch_model.bin")
    torch.save(_optimizer(), directory / "optimizer.bin")
    torch.save({"step": 7, "torch_manual_seed": torch.ones(2)}, directory / "random_states_0.pkl")


def _adapter(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(weights("base_model.lora_A.weight"))
    (directory / "adapter_config.json").write_text('{"r": 8, "peft_type": "LORA"}')


def _dcp(directory: Path) -> None:
    _save_dcp({**_training(), "object": 1}, directory)


def _torchtitan(directory: Path) -> None:
    state = {
        "embed.weight": torch.ones(4, 6),
        "optimizer": {
            "state.embed.weight.exp_avg": torch.ones(4, 6),
            "param_groups.embed.weight.lr": 0.5,
        },
        "train_state": {"step": torch.tensor(3)},
        "lr_scheduler": {"last_epoch": 3},
    }
    _save_dcp(state, directory)


def _save_dcp(state: dict[str, Any], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)


def _shards(directory: Path) -> None:
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0)])
        state = {"model": {"w": shard, "b": torch.ones(3)}, "step": 6, "of": ["a", rank]}
        torch.save(state, directory / f"state_rank{rank}.pt")
        dist.destroy_process_group()


def _keepstep(directory: Path) -> None:
    _save_keepstep(directory, 300, None)


def _keepstep_zstd(directory: Path) -> None:
    # Less than 1 MiB is not compressed.
    _save_keepstep(directory, 520, "zstd")


def _save_keepstep(directory: Path, extent: int, compression: Any) -> None:
    large = torch.arange(extent * extent, dtype=torch.float32).reshape(extent, extent)
    state = {"large": large, "small": torch.ones(3), "loss": 1.0}
    checkpoint.save(str(directory), state, step=1, compression=compression)


def _orbax_plain_nodes(directory: Path) -> None:
    """Write a tree as Orbax does, but with nodes that are not compressed, so changes reach them."""
    entries = {}
    for name in ("params.a", "params.b", "opt_state.mu.a"):
        store = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{directory}/"},
            "path": f"{name}/",
            "config": {"compression": None, "max_inline_value_bytes": 100,
                       "max_decoded_node_bytes": 400},
        }  # fmt: skip
        metadata = {"shape": [7, 9], "chunks": [4, 5], "compressor": {"id": "zstd", "level": 1}}
        array = tensorstore.open(
            {"driver": "zarr", "kvstore": store, "metadata": metadata}, create=True, dtype="int32"
        ).result()
        array.write(np.arange(63, dtype=np.int32).reshape(7, 9)).result()
        keys = [{"key": key, "key_type": 2} for key in name.split(".")]
        value = {"value_type": "jax.Array", "skip_deserialize": False}
        entries[name] = {"key_metadata": keys, "value_metadata": value}
    content = {"tree_metadata": entries, "use_ocdbt": True, "use_zarr3": False}
    (directory / "_METADATA").write_text(json.dumps(content))


def _copied(*path: str) -> Callable[[Path], None]:
    def copy(directory: Path) -> None:
        shutil.copytree(FIXTURES.joinpath(*path), directory, dirs_exist_ok=True)
        (directory / "expected.pt").unlink(missing_ok=True)

    return copy


SEEDS: dict[str, Callable[[Path], None]] = {
    "torch": _torch,
    "torch, before 1.6": _torch_legacy,
    "torch-shards": _shards,
    "lightning": _lightning,
    "safetensors": _safetensors,
    "huggingface": _hugging_face,
    "huggingface, torch": _hugging_face_torch,
    "trainer": _trainer,
    "accelerate": _accelerate,
    "peft": _adapter,
    "dcp": _dcp,
    "torchtitan": _torchtitan,
    "deepspeed, ZeRO 1": _copied("deepspeed", "zero1_fp32_2"),
    "deepspeed, ZeRO 2": _copied("deepspeed", "zero2_bf16_2"),
    "deepspeed, ZeRO 3": _copied("deepspeed", "zero3_bf16_2"),
    "deepspeed-universal, ZeRO 2": _copied("deepspeed", "zero2_bf16_2_universal"),
    "deepspeed-universal, ZeRO 3": _copied("deepspeed", "zero3_bf16_2_universal"),
    "keepstep": _keepstep,
    "keepstep, zstd": _keepstep_zstd,
    "orbax, manager": _copied("orbax", "manager"),
    "orbax, zarr3": _copied("orbax", "ocdbt_zarr3"),
    "orbax, folders": _copied("orbax", "folders"),
    "orbax, plain nodes": _orbax_plain_nodes,
}
"""Writers of a checkpoint to a directory, by the format's name and its variant."""


def write_seeds(root: Path) -> dict[str, Path]:
    """Write all checkpoints; return their directories."""
    made = {}
    for number, (name, write) in enumerate(SEEDS.items()):
        directory = root / f"{number:02}"
        directory.mkdir(parents=True)
        write(directory)
        made[name] = directory
    return made
