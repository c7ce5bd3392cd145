"""Reads modules of DeepSpeed's pipelines: a file for each layer and rank of tensor parallelism.

A file has the layer's `state_dict`, without the name that the layer has in the module. A layer's
parameters are named by its number, those of tied layers by their key: `3.weight` and
`tied_modules.embed.weight`. The parameters that each stage trains say which it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keepstep.checkpoint.convert.read.arrays import FileArray
from keepstep.checkpoint.convert.read.contents import mapping_of
from keepstep.checkpoint.convert.read.deepspeed_files import Shape
from keepstep.checkpoint.convert.read.files import ForeignFiles
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.errors import FormatUnsupported

_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")

Layers = Mapping[int, Mapping[str, Any]]
"""The content of the layers' files, by the layers' numbers."""


def layer_names(files: ForeignFiles) -> dict[int, dict[int, str]]:
    """Return the names of the layers' files, by rank of tensor parallelism and layer.

    Raises:
        CheckpointMissing: a rank has no file of a layer that another has.
    """
    found: dict[int, dict[int, str]] = {}
    for name in files.names:
        if match := _LAYER.fullmatch(name):
            found.setdefault(int(match[2] or 0), {})[int(match[1])] = name
    layers = sorted({layer for row in found.values() for layer in row})
    for rank in range(max(found, default=-1) + 1):
        for layer in layers:
            if layer not in found.get(rank, {}):
                # The listing lacks it, so this says so.
                files.file(f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    return found


def read_layers(files: ForeignFiles, names: Mapping[int, str]) -> Layers:
    """Return what a rank's files of layers have.

    Raises:
        CheckpointDamaged: a file contradicts itself.
    """
    return {
        layer: mapping_of(read_torch_file(files.file(names[layer]).whole))
        for layer in sorted(names)
    }


def stage_modules(
    layers: Layers, trained: Sequence[Mapping[str, Shape | None]], url: str
) -> list[dict[str, Any]]:
    """Return the module's state of each stage of a pipeline, by the names in the module.

    Args:
        layers: of one rank of tensor parallelism.
        trained: names and shapes of the parameters that each stage trains, as this rank has them;
            None for a shape that is not known. Without names the first stage has all layers, by
            their numbers.

    Raises:
        FormatUnsupported: two tied layers have the same parameters, so nothing tells them apart.
    """
    known = {name: shape for stage in trained for name, shape in stage.items()}
    tied_keys = {match[1] for name in known if (match := _TIED.fullmatch(name))}
    modules: list[dict[str, Any]] = [{} for _ in trained]
    stage = 0
    for layer, state in layers.items():
        key = _tied_key(layer, state, known, tied_keys, url)
        if key is not None:
            of_key = {f"tied_modules.{key}.{name}": value for name, value in state.items()}
            for module, parameters in zip(modules, trained, strict=True):
                if any(name in parameters for name in of_key):
                    for name, value in of_key.items():
                        # Of a layer that is several times in the pipeline the first file counts.
                        module.setdefault(name, value)
            continue
        named = {f"{layer}.{name}": value for name, value in state.items()}
        # A layer that trains nothing belongs to the stage of the one before it.
        of_layer = (n for n, parameters in enumerate(trained) if parameters.keys() & named.keys())
        stage = next(of_layer, stage)
        modules[stage].update(named)
    return modules


def _tied_key(
    layer: int,
    state: Mapping[str, Any],
    known: Mapping[str, Shape | None],
    keys: Collection[str],
    url: str,
) -> str | None:
    """Return the key of the tied module that a layer is; None if it is a layer of its own."""
    if any(f"{layer}.{name}" in known for name in state):
        return None
    fitting = []
    for key in sorted(keys):
        prefix = f"tied_modules.{key}."
        parameters = {
            name.removeprefix(prefix): shape
            for name, shape in known.items()
            if name.startswith(prefix)
        }
        shapes = ((_shape(state.get(name)), shape) for name, shape in parameters.items())
        if all(own is not None and shape in (None, own) for own, shape in shapes):
            fitting.append(key)
    if len(fitting) > 1:
        raise FormatUnsupported(
            f"{url}: layer {layer} may be any of the tied layers {', '.join(fitting)}, whose "
            "parameters have the same names and shapes, and nothing says which; load it with the "
            "script that trained it, and save whole parameters"
        )
    return fitting[0] if fitting else None


def _shape(value: object) -> Shape | None:
    return value.shape if isinstance(value, FileArray) else None
