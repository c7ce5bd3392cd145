"""Measures how far the state of a training shrinks by compression, and at what speed.

`python ops/bench/compression.py --json [--quick]`. The last line is one JSON object.

A byte-level GPT learns the sources of Python's standard library with AdamW, once with all state in
float32 and once in bfloat16. Its weights and the two moments are compressed as checkpoints store
them, in cells of 128 KiB for each byte of an element: by zstd alone; with Blosc, by zstd and LZ4
over the bytes sorted by their significance (`shuffle-zstd-1` is what `checkpoint.save(...,
compression="zstd")` does), in blocks of a cell or of the size that Blosc chooses (`auto`), or over
bits sorted so; and by `shuffle-zstd-1` the difference to the state of some steps before, bit by bit
(`xor`) or of the integers that the bits stand for (`sub`).

`ratio` is bytes before over bytes after. Speeds are in GB (10^9 bytes) of uncompressed bytes a
second of processor time on one thread; those of differences have the time to take them too.
`delta_saves` is the share that differences save of what `shuffle-zstd-1` leaves of the state.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from numcodecs import blosc, zstd
from rich.console import Console
from rich.table import Table
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.gpt import GPT, GPTConfig, initialize
from examples.text import Windows, standard_library

PLANE_NBYTES = 128 * 2**10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("weights", "exp_avg", "exp_avg_sq")
BATCH = 4

Bytes = npt.NDArray[np.uint8]
State = Mapping[str, Bytes]
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to compress and decompress a cell, given the cell of the state before it."""

    compress: Callable[[Bytes, Bytes], bytes]
    decompress: Callable[[bytes, Bytes], Bytes]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON line on stdout.")
@click.option("--quick", is_flag=True, help="A smaller model and fewer steps.")
def main(as_json: bool, quick: bool) -> None:
    console = Console(stderr=as_json)
    config = GPTConfig(width=128 if quick else 256, layers=2)
    steps, distances = (60, (10, 50)) if quick else (200, (10, 100))
    results: Result = {"steps": steps}
    for name, dtype in DTYPES.items():
        states = train(config, dtype, steps, distances)
        results[name] = measure_all(states, steps, distances, dtype.itemsize)
        show(console, name, results[name])
    results["delta_saves"] = {
        name: {
            method: round(1 - whole["shuffle-zstd-1"]["ratio"] / result["ratio"], 4)
            for method, result in whole.items()
            if method.startswith(("xor", "sub"))
        }
        for name in DTYPES
        for whole in [results[name]["all"]]
    }
    console.print(results["delta_saves"])
    click.echo(json.dumps(results))


def train(
    config: GPTConfig, dtype: torch.dtype, steps: int, distances: tuple[int, ...]
) -> dict[int, State]:
    """Train, and return the state after `steps` steps and at these distances before it."""
    torch.manual_seed(0)
    # On busy cores several threads wait for each other.
    torch.set_num_threads(1)
    model = GPT(config)
    initialize(model)
    model.to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    windows = Windows(standard_library(), config.context)
    order = torch.randperm(len(windows)).tolist()
    states: dict[int, State] = {}
    for step in range(1, steps + 1):
        samples = [windows[order[(step * BATCH + n) % len(order)]] for n in range(BATCH)]
        inputs, targets = (torch.stack(parts) for parts in zip(*samples, strict=True))
        model((inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if steps - step in (0, *distances):
            states[step] = state_of(model, optimizer)
    return states


def state_of(model: GPT, optimizer: AdamW) -> State:
    """Return the bytes of all matrices, and of their moments."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return {
        kind: bytes_of(
            [p.detach() if kind == "weights" else optimizer.state[p][kind] for p in matrices]
        )
        for kind in KINDS
    }


def bytes_of(tensors: list[torch.Tensor]) -> Bytes:
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    values: Bytes = whole.view(torch.uint8).numpy().copy()
    return values


def measure_all(
    states: Mapping[int, State], steps: int, distances: tuple[int, ...], itemsize: int
) -> Result:
    """Measure all methods for each kind of state, and for all together."""
    # The first call of each method prepares what later ones have.
    for method in plain_methods(itemsize).values():
        measure(method, bytes(PLANE_NBYTES), bytes(PLANE_NBYTES), itemsize)
    results: Result = {"all": {}}
    for kind in KINDS:
        state = states[steps][kind].tobytes()
        results[kind] = {
            name: measure(method, state, state, itemsize)
            for name, method in plain_methods(itemsize).items()
        }
        for distance in distances:
            before = states[steps - distance][kind].tobytes()
            for name, method in delta_methods(itemsize).items():
                results[kind][f"{name}-{distance}"] = measure(method, state, before, itemsize)
    for name in results[KINDS[0]]:
        measured = [results[kind][name] for kind in KINDS]
        # All kinds have as many bytes.
        results["all"][name] = {
            field: round(len(KINDS) / sum(1 / result[field] for result in measured), 3)
            for field in measured[0]
        }
    return results


def plain_methods(itemsize: int) -> dict[str, Method]:
    whole = PLANE_NBYTES * itemsize
    codecs = {
        "shuffle-zstd-1": (b"zstd", 1, blosc.SHUFFLE, whole),
        "shuffle-zstd-3": (b"zstd", 3, blosc.SHUFFLE, whole),
        "shuffle-zstd-1-auto": (b"zstd", 1, blosc.SHUFFLE, blosc.AUTOBLOCKS),
        "bitshuffle-zstd-1": (b"zstd", 1, blosc.BITSHUFFLE, whole),
        "shuffle-lz4-1": (b"lz4", 1, blosc.SHUFFLE, whole),
    }
    return {
        "zstd-1": Method(
            lambda cell, _: zstd.compress(cell, 1),
            lambda data, _: np.frombuffer(zstd.decompress(data), np.uint8),
        ),
        **{
            name: Method(
                functools.partial(_shuffled, codec=codec, itemsize=itemsize),
                lambda data, _: np.frombuffer(blosc.decompress(data), np.uint8),
            )
            for name, codec in codecs.items()
        },
    }


def delta_methods(itemsize: int) -> dict[str, Method]:
    """Return methods that compress the difference to the state before."""
    integer = np.dtype(f"<u{itemsize}")
    codec = (b"zstd", 1, blosc.SHUFFLE, PLANE_NBYTES * itemsize)

    def method(take: Callable[[Any, Any], Any], restore: Callable[[Any, Any], Any]) -> Method:
        def compress(cell: Bytes, before: Bytes) -> bytes:
            difference = take(cell.view(integer), before.view(integer)).view(np.uint8)
            return _shuffled(difference, before, codec=codec, itemsize=itemsize)

        def decompress(data: bytes, before: Bytes) -> Bytes:
            difference = np.frombuffer(blosc.decompress(data), integer)
            restored: Bytes = restore(difference, before.view(integer)).view(np.uint8)
            return restored

        return Method(compress, decompress)

    return {
        "xor": method(np.bitwise_xor, np.bitwise_xor),
        "sub": method(np.subtract, np.add),
    }


def _shuffled(cell: Bytes, _: Bytes, *, codec: tuple[bytes, int, int, int], itemsize: int) -> bytes:
    compressed: bytes = blosc.compress(cell, *codec, itemsize)
    return compressed


def measure(method: Method, state: bytes, before: bytes, itemsize: int) -> Result:
    """Compress and decompress a state cell by cell, and check the result."""
    compressed: list[bytes] = []
    compress_s = decompress_s = 0.0
    for cell, cell_before in cells(state, before, itemsize):
        start_s = time.thread_time()
        compressed.append(method.compress(cell, cell_before))
        compress_s += time.thread_time() - start_s
    for data, (cell, cell_before) in zip(compressed, cells(state, before, itemsize), strict=True):
        start_s = time.thread_time()
        restored = method.decompress(data, cell_before)
        decompress_s += time.thread_time() - start_s
        assert np.array_equal(restored, cell)
    return {
        "ratio": round(len(state) / sum(map(len, compressed)), 4),
        "compress_gb_per_s": round(len(state) / compress_s / 1e9, 3),
        "decompress_gb_per_s": round(len(state) / decompress_s / 1e9, 3),
    }


def cells(state: bytes, before: bytes, itemsize: int) -> Iterator[tuple[Bytes, Bytes]]:
    cell_nbytes = PLANE_NBYTES * itemsize
    for start in range(0, len(state), cell_nbytes):
        part = slice(start, start + cell_nbytes)
        yield np.frombuffer(state[part], np.uint8), np.frombuffer(before[part], np.uint8)


def show(console: Console, name: str, result: Result) -> None:
    table = Table("ratio, GB/s, GB/s", *result, title=name)
    for method in result["all"]:
        table.add_row(
            method,
            *(
                f"{r['ratio']:.3f} {r['compress_gb_per_s']:.2f} {r['decompress_gb_per_s']:.2f}"
                for r in (result[kind][method] for kind in result)
            ),
        )
    console.print(table)


if __name__ == "__main__":
    # Blosc's own threads would be counted to nobody.
    blosc.use_threads = False
    main()
