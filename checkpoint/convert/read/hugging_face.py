"""Reads folders of Hugging Face: weights in safetensors or torch files, and a configuration.

The names are those on file, which may differ from those of the live model (transformers converts
some when it loads). Tied weights are on file once, or the second name is not there at all: the
config, or that a head is missing, says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from keepstep.checkpoint.convert.read.contents import Contents, mapping_of
from keepstep.checkpoint.convert.read.files import ForeignFiles, damaged
from keepstep.checkpoint.convert.read.foreign_source import ForeignCheckpoint
from keepstep.checkpoint.convert.read.safetensors_file import read_safetensors
from keepstep.checkpoint.convert.read.torch_file import read_torch_file
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.documents import CONFIG, SCALES
from keepstep.checkpoint.format.layout.quantized import scales_of_blocks

NOTES = "metadata"
"""Documents below this have the text that files of safetensors note by names, for each file."""

_STEMS = ("model.safetensors", "pytorch_model.bin")
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
    "gpt_neox.embed_in.weight",
    "model.decoder.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "transformer.word_embeddings.weight",
    "transformer.embed_tokens.weight",
    "shared.weight",
)
_MOST_JSON_NBYTES = 2**28


def read_safetensors_alone(files: ForeignFiles, name: str) -> ForeignCheckpoint:
    """Return the checkpoint that one file of safetensors has.

    Raises:
        CheckpointDamaged: the file contradicts itself.
    """
    file = files.file(name)
    contents = Contents(file.location, "safetensors")
    _add_safetensors(contents, files, name)
    return contents.checkpoint(0)


def read_hugging_face(files: ForeignFiles) -> ForeignCheckpoint:
    """Return the checkpoint of a folder with `model.safetensors`, its index, or their torch twins.

    Raises:
        CheckpointDamaged: files contradict each other.
        CheckpointMissing: a shard is not there.
    """
    contents = Contents(files.url, "Hugging Face")
    read = add_weights(contents, files)
    add_config(contents, files)
    for name in files.names:
        if name not in read and name != "config.json":
            contents.leave_out(name, "this file has no weights that the index names")
    return contents.checkpoint(0)


def add_weights(contents: Contents, files: ForeignFiles) -> set[str]:
    """Add the model's tensors of a folder; return the files that were read.

    Raises:
        CheckpointDamaged: the index and the shards contradict each other.
        CheckpointMissing: there are no weights, or a shard is not there.
    """
    for stem in _STEMS:
        index_name = f"{stem}.index.json"
        if index_name in files:
            return {index_name, *_add_shards(contents, files, index_name)}
        if stem in files:
            _add_file(contents, files, stem, None)
            return {stem}
    alone = [name for name in files.names if name.endswith(".safetensors") and "/" not in name]
    for name in alone:
        _add_file(contents, files, name, None)
    if not alone:
        files.file(_STEMS[0])
    return set(alone)


def add_named_file(contents: Contents, files: ForeignFiles, name: str) -> None:
    """Add the tensors of one file of safetensors or torch to the model.

    Raises:
        CheckpointDamaged: the file contradicts itself.
        CheckpointMissing: there is no such file.
    """
    _add_file(contents, files, name, None)


def add_config(contents: Contents, files: ForeignFiles) -> None:
    """Add config.json as a document, and what it implies: ties, and scales of quantized weights.

    Raises:
        CheckpointDamaged: it is no JSON object.
    """
    if "config.json" not in files:
        return
    config = read_json_object(files, "config.json")
    contents.add_document(CONFIG, config)
    names = {key.removeprefix("model/") for key in contents.tensors if key.startswith("model/")}
    tie = tied_head(config, names)
    if tie is not None:
        contents.tie(*tie)
    specs = {key: tensor.spec for key, tensor in contents.tensors.items()}
    if scales := scales_of_blocks(config, specs):
        contents.add_document(SCALES, scales)


def tied_head(config: Mapping[str, Json], names: set[str]) -> tuple[str, str] | None:
    """Return the output head that is not on file, and the embedding that it is, if it is tied.

    Args:
        config: the content of config.json.
        names: the names of the tensors on file.
    """
    head = "embed_out.weight" if config.get("model_type") == "gpt_neox" else "lm_head.weight"
    if any(name == head or name.endswith(f".{head}") for name in names):
        return None
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else {}
    # transformers leaves it out of the file where it is as its model's default is.
    tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    architectures = config.get("architectures")
    has_head = isinstance(architectures, list) and any(
        isinstance(name, str)
        and name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
        for name in architectures
    )
    if tied is False or not (has_head or (tied and architectures is None)):
        return None
    embedding = next((name for name in _EMBEDDINGS if name in names), None)
    return (head, embedding) if embedding is not None else None


def read_json_object(files: ForeignFiles, name: str) -> dict[str, Json]:
    """Return the JSON object that a file has.

    Raises:
        CheckpointDamaged: it has something else.
    """
    try:
        content = json.loads(files.read(name, _MOST_JSON_NBYTES))
    except (ValueError, RecursionError) as error:
        raise damaged(f"{files.url}/{name}", f"it is no JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise damaged(f"{files.url}/{name}", "it is no JSON object")
    return content


def _add_shards(contents: Contents, files: ForeignFiles, index_name: str) -> Sequence[str]:
    where = f"{files.url}/{index_name}"
    weight_map = mapping_of(read_json_object(files, index_name).get("weight_map"))
    if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise damaged(where, "its weight_map does not name files by tensors")
    shards = sorted(set(weight_map.values()))
    # A tensor of more bytes than a shard may have has its own shard, before those that precede it.
    contents.is_in_module_order = False
    for shard in shards:
        expected = {name for name, holder in weight_map.items() if holder == shard}
        _add_file(contents, files, shard, expected)
    return shards


def _add_file(
    contents: Contents, files: ForeignFiles, name: str, expected: set[str] | None
) -> None:
    """Add the tensors of one file, once it is shown to have those that the index names."""
    where = f"{files.url}/{name}"
    if name.endswith(".safetensors"):
        present = _add_safetensors(contents, files, name)
    else:
        tree = read_torch_file(files.file(name).whole)
        state = mapping_of(tree)
        if not state and tree != {}:
            raise damaged(where, "it has no tensors by name")
        for key, value in state.items():
            contents.add_model_array(key, value)
        present = set(state)
    if expected is not None and present != expected:
        missing, more = sorted(expected - present), sorted(present - expected)
        raise damaged(
            where,
            f"the index has {missing[:1] or 'nothing'} in it, which it lacks"
            if missing
            else f"it has {more[0]}, and the index does not say so",
        )


def _add_safetensors(contents: Contents, files: ForeignFiles, name: str) -> set[str]:
    """Add the tensors of one file of safetensors; return all their names."""
    read = read_safetensors(files.file(name))
    # The library sorts tensors by data types and names.
    contents.is_in_module_order = False
    for key, array in read.arrays.items():
        contents.add_model_array(key, array)
    for key, dtype in read.unsupported.items():
        contents.leave_out(
            f"model/{key}", f"its data type {dtype} cannot be stored", key=f"model/{key}"
        )
    # What the format of the tensors' framework is, says nothing here.
    notes = {key: text for key, text in read.metadata.items() if key != "format"}
    if notes:
        contents.add_document(f"{NOTES}/{name}", notes)
    return {*read.arrays, *read.unsupported}
