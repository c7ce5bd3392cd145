"""Each format is told from the names of its files and a few bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keepstep.checkpoint.convert.read.recognition import recognize, recognize_all
from keepstep.checkpoint.errors import FormatUnsupported
from keepstep.checkpoint.format.layout.location import Format

ZIP = b"PK\x03\x04 archive/data.pkl"
DEEPSPEED_1 = [
    "latest",
    "global_step3/mp_rank_00_model_states.pt",
    "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_to_fp32.py",
]
DEEPSPEED_3 = [
    "latest",
    "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt",
    "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt",
]
SHARDS = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
TRAINER = ["model.safetensors", "config.json", "optimizer.pt", "trainer_state.json"]
MEGATRON = ["common.pt", "metadata.json", ".metadata", "__0_0.distcp"]

CASES: list[tuple[list[str], dict[str, bytes], Format, str]] = [
    (["step-00000010-000003/manifest.json"], {}, Format.UNIVERSAL, ""),
    (["a.pt"], {"a.pt": ZIP}, Format.TORCH_SAVE, ""),
    (["a.bin"], {"a.bin": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."}, Format.TORCH_SAVE, ""),
    (["a.ckpt"], {"a.ckpt": ZIP + b"pytorch-lightning_version"}, Format.LIGHTNING, ""),
    (["a"], {"a": b"\x02\0\0\0\0\0\0\0{}"}, Format.SAFETENSORS, ""),
    (SHARDS, {}, Format.HUGGING_FACE, ""),
    (["config.json", "model.safetensors"], {}, Format.HUGGING_FACE, ""),
    (["config.json", "a-1.safetensors", "a-2.safetensors"], {}, Format.HUGGING_FACE, ""),
    (["adapter_config.json", "adapter_model.safetensors"], {}, Format.ADAPTER, ""),
    (TRAINER, {}, Format.TRAINER, ""),
    ([f"checkpoint-{n}/{name}" for n in (90, 100) for name in TRAINER], {}, Format.TRAINER,
     "checkpoint-100/"),
    (["model.safetensors", "optimizer.bin", "random_states_0.pkl"], {}, Format.ACCELERATE, ""),
    ([".metadata", "__0_0.distcp"], {".metadata": b"\x80\x02"}, Format.DCP, ""),
    (["checkpoint/step-3/.metadata", "checkpoint/step-20/.metadata"],
     {"checkpoint/step-20/.metadata": b"train_state.step"}, Format.TORCHTITAN,
     "checkpoint/step-20/"),
    (MEGATRON, {"metadata.json": b'{"sharded_backend": "torch_dist"}'}, Format.MEGATRON_CORE, ""),
    (["latest_checkpointed_iteration.txt", *(f"iter_0000003/{name}" for name in MEGATRON),
      *(f"iter_0000009/{name}" for name in MEGATRON)],
     {"latest_checkpointed_iteration.txt": b"3",
      "iter_0000003/metadata.json": b'{"sharded_backend": "torch_dist"}'},
     Format.MEGATRON_CORE, "iter_0000003/"),
    (["latest_checkpointed_iteration.txt", "release/mp_rank_00_001/model_optim_rng.pt"],
     {"latest_checkpointed_iteration.txt": b"release"}, Format.MEGATRON_LM, "release/"),
    (DEEPSPEED_1, {"latest": b"global_step3"}, Format.DEEPSPEED, "global_step3/"),
    (DEEPSPEED_3, {"latest": b"global_step3"}, Format.DEEPSPEED, "global_step3/"),
    (["global_step3_universal/zero/a.weight/fp32.pt",
      "global_step3_universal/mp_rank_00_model_states.pt", "latest_universal"],
     {"latest_universal": b"global_step3_universal"}, Format.DEEPSPEED_UNIVERSAL,
     "global_step3_universal/"),
    (["_METADATA", "manifest.ocdbt"], {}, Format.ORBAX, ""),
    (["3/_CHECKPOINT_METADATA", "3/state/_METADATA"], {}, Format.ORBAX, "3/"),
    (["3/_METADATA", "20/_METADATA"], {}, Format.ORBAX, "20/"),
    (["_CHECKPOINT_METADATA", "state2/_METADATA", "state/_METADATA"], {}, Format.ORBAX, ""),
    (["3/_METADATA", "20.orbax-checkpoint-tmp/_METADATA"], {}, Format.ORBAX, "3/"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "contents", "form", "directory"), CASES)
def test_formats_are_told_apart(
    names: list[str], contents: dict[str, bytes], form: Format, directory: str
) -> None:
    def head(name: str, nbytes: int) -> tuple[bytes, int]:
        content = contents.get(name, b"")
        return content[:nbytes], len(content)

    found = recognize("url", sorted(names), head)
    assert (found.format, found.directory) == (form, directory)


def test_a_step_is_chosen_by_the_number_of_its_directory() -> None:
    names = ["latest", *(f"global_step{n}/mp_rank_00_model_states.pt" for n in (2, 3, 20))]

    def directory(step: int | None) -> str:
        return recognize("url", names, lambda name, n: (b"global_step3", 0), step).directory

    assert [directory(step) for step in (None, 2, 20, 4)] == [
        "global_step3/", "global_step2/", "global_step20/", "global_step3/",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "contents"),
    [
        (["README.md"], {}),
        (["a.gguf"], {"a.gguf": b"GGUF"}),
        (["latest"], {"latest": b"../elsewhere"}),
        (["metadata.json"], {"metadata.json": b"[" * 4000}),
        (["x" * 5000 + "/a"], {}),
    ],
)
def test_what_is_looked_for_is_told(names: list[str], contents: dict[str, bytes]) -> None:
    with pytest.raises(FormatUnsupported, match=r"no checkpoint was recognized.*\(DCP\)"):
        recognize("url", names, lambda name, n: (contents.get(name, b"")[:n], 0))


class CountedNames(list[str]):
    """Names that count how often all of them are gone through."""

    passes = 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return super().__iter__()


def test_the_names_are_gone_through_as_often_however_many_checkpoints_there_are() -> None:
    """A run may have thousands of folders: to filter all names for each would take hours."""
    passes = []
    for count in (3, 200):
        directories = [f"checkpoint-{number}/" for number in range(count)]
        names = CountedNames(f"{directory}{name}" for directory in directories for name in TRAINER)
        found = recognize_all("url", names, lambda name, n: (b"", 0))
        assert [each.directory for each in found] == directories[::-1]
        passes.append(names.passes)
    assert passes[0] == passes[1] > 0
