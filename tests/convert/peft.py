"""PEFT's adapter folders: LoRA, of a whole head and without one, in safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from keepstep import checkpoint
from tests.convert.checkpoints import convert, documents, left_out, of_model, read
from tests.convert.checks import Checks, assert_close, assert_equal
from tests.convert.families import FAMILIES, logits, train

REQUIREMENTS = ("transformers==5.23.0", "peft==0.21.2")
ENVIRONMENT = "hugging_face"

# On file the adapter's name is left out of its tensors' names.
LIVE = """
[[rule]]
match = "{module...}.lora_{part:A|B}.weight"
rename = "{module}.lora_{part}.default.weight"

[[rule]]
match = "{module...}.lora_embedding_{part:A|B}"
rename = "{module}.lora_embedding_{part}.default"

[[rule]]
match = "{module...}.lora_magnitude_vector"
rename = "{module}.lora_magnitude_vector.default.weight"

[[rule]]
match = "base_model.model.lm_head.weight"
rename = "base_model.model.lm_head.modules_to_save.default.weight"
"""

KINDS: dict[str, dict[str, Any]] = {
    "LoRA of attention": {"target_modules": ["q_proj", "v_proj"]},
    "LoRA with a saved head": {
        "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"],
    },
    "DoRA": {"target_modules": ["k_proj"], "use_dora": True},
}  # fmt: skip


def adapted(kind: str) -> nn.Module:
    """Return a model with an adapter that has been trained."""
    family = next(family for family in FAMILIES if family.name == "llama")
    base = family.built(0)
    torch.manual_seed(3)
    model: nn.Module = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **KINDS[kind])
    )
    return model


def check(checks: Checks, kind: str, directory: Path) -> None:
    """Train an adapter, save it with PEFT, and check what is read of its folder."""
    model = adapted(kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    train(model, torch.optim.AdamW(trained, lr=0.01), 3)
    wanted = logits(model)
    folder = directory / "adapter"
    model.save_pretrained(str(folder))
    weights = load_file(folder / "adapter_model.safetensors")
    with checks(f"{kind}: every tensor is read bit for bit, as named on file"):
        assert_equal(of_model(read(folder)), weights)
    with checks(f"{kind}: the adapter's configuration is carried, left out is the README"):
        assert documents(folder)["adapter_config"]["r"] == 4
        assert set(left_out(folder)) <= {"README.md"}, left_out(folder)
    with checks(f"{kind}: what keepstep writes PEFT loads, with the same logits"):
        written = directory / "written"
        written.mkdir()
        (written / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
        convert(folder, directory / "universal")
        convert(directory / "universal", written / "adapter_model.safetensors")
        assert_equal(load_file(written / "adapter_model.safetensors"), weights)
        base = next(family for family in FAMILIES if family.name == "llama").built(0)
        assert_close(logits(PeftModel.from_pretrained(base, str(written))), wanted)
    with checks(f"{kind}: by rules the names are the live module's, which checkpoint.load fills"):
        (directory / "live.toml").write_text(LIVE)
        convert(folder, directory / "live", "--rules", directory / "live.toml")
        fresh = adapted(kind)
        names = of_model(read(directory / "live"))
        expected = {
            name: value.detach() for name, value in model.named_parameters() if value.requires_grad
        }
        assert_equal(names, expected)
        checkpoint.load(str(directory / "live"), {"model": fresh}, strict=False)
        assert_close(logits(fresh), wanted)


def main() -> None:
    """Check all kinds of adapters."""
    checks = Checks()
    for kind in KINDS:
        with checks.all_of(kind) as directory:
            check(checks, kind, directory)
    checks.finish()


if __name__ == "__main__":
    main()
