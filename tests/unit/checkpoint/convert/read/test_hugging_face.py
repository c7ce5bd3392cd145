"""Folders of Hugging Face: shards, index, tied heads, and what contradicts what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.checkpoint.errors import CheckpointDamaged, CheckpointMissing
from tests.opened_checkpoints import open_foreign
from tests.unit.checkpoint.convert.read.test_safetensors_file import content_of
from tests.unit.checkpoint.convert.read.written import tensor_of

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def weights(*names: str) -> bytes:
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * n, 8 * n + 8]}
        for n, name in enumerate(names)
    }
    return content_of(header, np.arange(2 * len(names), dtype=np.float32).tobytes())


def folder(directory: Path, files: dict[str, Any]) -> str:
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (directory / name).write_bytes(data)
    return str(directory)


def index_of(weight_map: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"total_size": 24}, "weight_map": weight_map}


SHARDED = {
    "model-00001-of-00002.safetensors": weights("model.embed_tokens.weight", "b"),
    "model-00002-of-00002.safetensors": weights("c"),
    "model.safetensors.index.json": index_of({
        "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }),
    "config.json": {**CONFIG, "tie_word_embeddings": True},
    "tokenizer.json": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "config", "tied"),
    [
        (["model.embed_tokens.weight"], {**CONFIG, "tie_word_embeddings": True}, True),
        (["model.embed_tokens.weight"], CONFIG, True),
        (["model.embed_tokens.weight"], {**CONFIG, "tie_word_embeddings": False}, False),
        (["model.embed_tokens.weight", "lm_head.weight"], CONFIG, False),
        (["model.embed_tokens.weight"], {"architectures": ["LlamaModel"]}, False),
        (["other.weight"], CONFIG, False),
        (["transformer.wte.weight"], {"architectures": ["GPT2LMHeadModel"]}, True),
    ],
)
def test_head_is_tied_where_the_config_or_its_absence_says_so(
    tmp_path: Path, names: list[str], config: dict[str, Any], tied: bool
) -> None:
    url = folder(tmp_path, {"model.safetensors": weights(*names), "config.json": config})
    documents = open_foreign(url).documents
    assert documents.get("model/tied", {}) == ({"lm_head.weight": names[0]} if tied else {})


def test_notes_of_a_file_are_carried(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt", "base": "x"}}
    (tmp_path / "lora.safetensors").write_bytes(content_of(header, b""))
    documents = open_foreign(str(tmp_path / "lora.safetensors")).documents
    assert documents["metadata/lora.safetensors"] == {"base": "x"}


def test_shards_of_torch_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00001.bin")
    index = index_of({"a": "pytorch_model-00001-of-00001.bin"})
    source = open_foreign(folder(tmp_path, {"pytorch_model.bin.index.json": index}))
    assert tensor_of(source, "model/a").tolist() == [1, 1]


def changed_index(**changes: str) -> dict[str, Any]:
    weight_map = SHARDED["model.safetensors.index.json"]["weight_map"]
    return {**SHARDED, "model.safetensors.index.json": index_of({**weight_map, **changes})}


SECOND = "model-00002-of-00002.safetensors"
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lacking tensor": (changed_index(d=SECOND), CheckpointDamaged, "'d'.*which it lacks"),
    "tensor elsewhere": (changed_index(b=SECOND), CheckpointDamaged, "has b, and the index"),
    "lacking shard": (changed_index(c="none.safetensors"), CheckpointMissing, "none.safetensors"),
    "path": (changed_index(c="../../etc/passwd"), CheckpointMissing, "no file '../../etc/passwd'"),
    "absolute path": (changed_index(c="/etc/passwd"), CheckpointMissing, "no file '/etc/passwd'"),
    "no map": ({**SHARDED, "model.safetensors.index.json": {}}, CheckpointDamaged, "weight_map"),
    "no JSON": ({**SHARDED, "config.json": b"{"}, CheckpointDamaged, "config.json: it is no JSON"),
    "list": ({**SHARDED, "config.json": b"[]"}, CheckpointDamaged, "no JSON object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_contradict_each_other_are_refused(tmp_path: Path, name: str) -> None:
    files, error, reason = REFUSED[name]
    with pytest.raises(error, match=reason):
        open_foreign(folder(tmp_path, files))


def test_path_of_an_index_is_not_followed_even_if_there_is_a_file(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(weights("c"))
    with pytest.raises(CheckpointMissing, match=r"no file '\.\./secret\.safetensors'"):
        open_foreign(folder(inside, changed_index(c="../secret.safetensors")))


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    files = {"a.safetensors": weights("w"), "b.safetensors": weights("w"), "config.json": CONFIG}
    with pytest.raises(CheckpointDamaged, match="two tensors model/w"):
        open_foreign(folder(tmp_path, files))
