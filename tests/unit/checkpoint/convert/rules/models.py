"""Small models of every family, as transformers wrote them: names, shapes, configuration.

`tests/foreign_fixtures/make_hugging_face.py` has taken them from files and live modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keepstep.checkpoint.format.layout.source import TensorSpec
from tests.unit.checkpoint.convert.rules.arrays import Array

Shapes = Mapping[str, tuple[int, ...]]

_NAMES = Path(__file__).parents[4] / "foreign_fixtures" / "hugging_face" / "names.json"


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        name: its name in the tests.
        family: what the configuration calls its family, which has a preset.
        config: its configuration.
        shapes: the tensors on file.
        live: those of the module in memory, tied ones once.
        lacking: spellings that have no names for some of them.
    """

    name: str
    family: str
    config: Mapping[str, Any]
    shapes: Shapes
    live: Shapes
    lacking: frozenset[str]


def _shapes(document: Mapping[str, list[int]]) -> Shapes:
    return {name: tuple(shape) for name, shape in document.items()}


MODELS = tuple(
    Model(
        name,
        one["preset"],
        one["config"],
        _shapes(one["file"]),
        _shapes(one["live"]),
        frozenset(one["lacking"]),
    )
    for name, one in json.loads(_NAMES.read_text()).items()
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
