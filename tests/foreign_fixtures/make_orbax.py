"""Makes the checkpoints of Orbax in `tests/foreign_fixtures/orbax`, and what they hold.

Run where Orbax is installed (tried with 0.12.8 and jax 0.10.2, on CPUs):

    python tests/foreign_fixtures/make_orbax.py tests/foreign_fixtures

The state has what readers get wrong: arrays that are cut in both dimensions over four devices, odd
sizes, keys with dots and slashes, named tuples, tuples, empty states, scalars, text, 0-d arrays,
keys of random generators, and data types that NumPy lacks. What it holds is computed by NumPy alone
and is in `expected.pt`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEP = 3
SHAPES = {
    # Of this, a chunk of the moments is too large for a node of the store.
    ("embed", "table"): (52, 24),
    ("layers", "0", "attn.qkv", "kernel"): (6, 18),
    ("layers", "0", "attn.qkv", "bias"): (18,),
    ("mlp/~/linear", "w"): (5, 7),
    ("norm", "scale"): (5,),
}
CUTS = {(52, 24): ("x", "y"), (6, 18): (None, "y"), (18,): ("x",)}


class ScaleByAdamState(NamedTuple):
    """The state of optax' `scale_by_adam`, by its names."""

    count: Any
    mu: Any
    nu: Any


class EmptyState(NamedTuple):
    """The state of those parts of an optimizer of optax that keep none."""


class ScheduleState(NamedTuple):
    """The state of optax' `scale_by_schedule`."""

    count: Any


FEWER = tuple(SHAPES)[:1] + tuple(SHAPES)[2:3]


def values_of(
    seed: int, dtype: Any, paths: Iterable[tuple[str, ...]] = tuple(SHAPES)
) -> dict[tuple[str, ...], np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        path: generator.standard_normal(SHAPES[path]).astype(np.float32).astype(dtype)
        for path in paths
    }


def nested(values: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        holder = tree
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = value
    return tree


def on_devices(tree: Any, mesh: Mesh) -> Any:
    def put(value: np.ndarray) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*CUTS.get(value.shape, ()))))

    return jax.tree.map(put, tree)


def as_torch(value: np.ndarray) -> torch.Tensor:
    value = np.array(value)
    if value.dtype.type.__module__ == "ml_dtypes":
        dtype = getattr(torch, value.dtype.name)
        raw = {1: np.uint8, 2: np.uint16}[value.dtype.itemsize]
        return torch.from_numpy(value.view(raw)).view(dtype)
    return torch.from_numpy(value)


def training_state(
    mesh: Mesh, paths: Iterable[tuple[str, ...]] = tuple(SHAPES)
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what a training script has, and the tensors that it should be read as."""
    params = values_of(1, ml_dtypes.bfloat16, paths)
    moments = {"mu": values_of(2, np.float32, paths), "nu": values_of(3, np.float32, paths)}
    adam = ScaleByAdamState(np.array(STEP, np.int32), nested(moments["mu"]), nested(moments["nu"]))
    state = {
        "params": nested(params),
        "opt_state": (EmptyState(), (adam, EmptyState(), ScheduleState(np.array(7, np.int32)))),
        "rng": np.asarray(jax.random.key_data(jax.random.key(5))),
    }
    expected = {"rng": as_torch(state["rng"])}
    for path, value in params.items():
        name = ".".join(path)
        expected[f"model/{name}"] = as_torch(value)
        expected[f"optim/{name}/exp_avg"] = as_torch(moments["mu"][path])
        expected[f"optim/{name}/exp_avg_sq"] = as_torch(moments["nu"][path])
        expected[f"optim/{name}/step"] = torch.tensor(float(STEP))
    expected["opt_state/1/2/count"] = torch.tensor(7, dtype=torch.int32)
    return {**on_devices(state, mesh), "step": STEP, "note": "a text", "none": None}, expected


def all_types() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a tree of arrays of many data types, and the tensors that it should be read as."""
    names = (
        "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32",
        "bfloat16", "float8_e4m3fn", "float8_e5m2",
    )  # fmt: skip
    base = np.arange(15).reshape(3, 5)
    arrays = {name: base.astype(getattr(ml_dtypes, name, None) or np.dtype(name)) for name in names}
    arrays["zeros"] = np.zeros((40, 50), np.float32)
    arrays["scalar"] = np.array(1.5, np.float32)
    return arrays, {f"model/{name}": as_torch(value) for name, value in arrays.items()}


def write_steps(
    directory: Path, state: dict[str, Any], expected: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(
        directory, options=options, item_names=("state", "extra")
    ) as manager:
        for step, tree in {2: {"step": 2}, STEP: state}.items():
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(tree),
                    extra=ocp.args.JsonSave({"epoch": 2, "tokens": [128, 256]}),
                ),
                metrics={"loss": 0.5},
            )
        manager.wait_until_finished()
    return expected


def write_tree(directory: Path, tree: Any, **options: Any) -> None:
    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(tree))


def main(root: Path) -> None:
    directory = (root / "orbax").absolute()
    shutil.rmtree(directory, ignore_errors=True)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    whole = training_state(mesh)
    fewer = training_state(mesh, FEWER)
    expected = {"manager": write_steps(directory / "manager", *fewer)}
    for name, options in {
        "ocdbt": {},
        "ocdbt_zarr3": {"use_zarr3": True},
        "ocdbt_plain": {"use_compression": False},
        "ocdbt_zarr3_plain": {"use_zarr3": True, "use_compression": False},
        "folders": {"use_ocdbt": False},
        "folders_plain": {"use_ocdbt": False, "use_compression": False},
    }.items():
        # Folders have a file for each chunk.
        state, tensors = whole if options.get("use_ocdbt", True) else fewer
        write_tree(directory / name, state, **options)
        expected[name] = tensors
    arrays, tensors = all_types()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "types", arrays)
    expected["types"] = tensors
    torch.save(expected, directory / "expected.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
