"""Claims about the lines that the guides show: they work as they stand, and a worker may be lost.

What a guide's lines leave to the reader, such as the model, is the framework's smallest example.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.adaptive_timeouts import patient

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KILLED_AT = 5

DISTURBANCE = """
import os
import signal
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0


def local(parameter):
    parameter = parameter.detach()
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def end_step(optimizer, *_):
    global steps
    if os.environ["RANK"] != "1":
        return
    steps += 1
    weights = [local(p).double().sum().item() for p in optimizer.param_groups[0]["params"]]
    with Path("weights").open("a") as lines:
        print(sum(weights).hex(), file=lines)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and steps == int(os.environ["KILLED_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(end_step)
"""

TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

torch.manual_seed(0)
tokens = torch.randint(0, 64, (640, 16))
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)
trainer = ProtectedTrainer(
    model=LlamaForCausalLM(config),
    args=TrainingArguments(output_dir="output", num_train_epochs=3),
    train_dataset=[{"input_ids": ids, "labels": ids} for ids in tokens],
)
trainer.train()
"""

LIGHTNING = """
import torch
from lightning.pytorch import LightningModule


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 16)

    def training_step(self, batch, number):
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
dataset = torch.randn(640, 16)
module = Module()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
dataset = list(enumerate(torch.randn(160, 16)))
model = nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
"""

TORCHTITAN = """
import os

import numpy as np
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from keepstep.integrations.torchtitan.tokens import TokenIds

own = f"{os.getpid()}.npy"
np.save(own, np.random.default_rng(0).integers(0, 2048, 5000, dtype=np.uint16))
os.replace(own, "tokens.npy")
guides = llama


def llama():
    config, small = guides(), llama3_debugmodel()
    config.model_spec, config.loss = small.model_spec, small.loss
    config.tokenizer = TokenIds.Config()
    config.training.seq_len, config.training.steps = 16, 20
    config.training.local_batch_size, config.training.global_batch_size = 4, 16
    config.training.mixed_precision_param = "float32"
    config.lr_scheduler.warmup_steps = 2
    config.debug.seed = 7
    config.parallelism.spmd_backend = "partial_dtensor"
    config.optimizer.implementation = "for-loop"
    model = config.model_spec.model
    del model.layers[1:]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return config
"""

EXAMPLES = {
    "attach": ("attach.md", "Attach a loop that owns its objects", "", ""),
    "transformers": ("integrations.md", "Hugging Face Trainer", "", TRANSFORMERS),
    "lightning": ("integrations.md", "Lightning", LIGHTNING, ""),
    "accelerate": ("integrations.md", "Accelerate", ACCELERATE, ""),
    "torchtitan": ("integrations.md", "torchtitan", "", TORCHTITAN),
}
"""By framework, the guide, its heading, and what comes before and after the lines under it."""


def blocks(guide: str, heading: str) -> tuple[str, str]:
    """Return the code and the commands that a guide shows first under a heading."""
    text = (ROOT / "docs" / guide).read_text()
    _, _, section = re.split(rf"^(#+) {heading}\n", text, maxsplit=1, flags=re.MULTILINE)
    shown = re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    code = next(code for language, code in shown if language == "python")
    commands = next(code for language, code in shown if not language)
    return code, commands.replace("\\\n", " ")


def on_one_node(commands: str) -> list[str]:
    """Return a guide's line of `keepstep run`, for one node of two workers."""
    line = next(line for line in commands.splitlines() if line.startswith("keepstep run "))
    line = re.sub(r"--(nnodes|store) +\S+ *", "", line)
    _, *arguments = shlex.split(re.sub(r"(--nproc-per-node) +\S+", r"\1 2", line))
    return [sys.executable, "-m", "keepstep", *arguments]


def run(directory: Path, script: str, command: list[str], killed_at: int) -> str:
    """Run a script as train.py, or as the module that torchtitan reads; return what is printed."""
    directory.mkdir()
    (directory / "disturbance.py").write_text(DISTURBANCE)
    for name in ("train.py", "configs.py"):
        (directory / name).write_text(f"import disturbance\n{script}")
    done = subprocess.run(
        ["env", f"KILLED_AT={killed_at}", *command],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(180),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=[] if name == "attach" else pytest.mark.frameworks)
        for name in EXAMPLES
    ],
)
def test_lines_of_the_guide_lose_a_worker_and_end_with_the_weights_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    if framework != "attach":
        pytest.importorskip(framework)
    if framework == "torchtitan":
        monkeypatch.setenv("PYTHONPATH", str(HERE / "torchtitan_on_cpus"))
    guide, heading, before, after = EXAMPLES[framework]
    lines, commands = blocks(guide, heading)
    script, command = f"{before}\n{lines}\n{after}", on_one_node(commands)
    run(tmp_path / "undisturbed", script, command, killed_at=0)
    output = run(tmp_path / "disturbed", script, command, killed_at=KILLED_AT)
    assert output.count("training goes on after step") == 1, output
    undisturbed, disturbed = (
        (tmp_path / name / "weights").read_text().splitlines()
        for name in ("undisturbed", "disturbed")
    )
    # The step that was interrupted, and those whose snapshots were not complete yet.
    again = len(disturbed) - len(undisturbed)
    assert 0 <= again < KILLED_AT, "training began from its start"
    assert disturbed[:KILLED_AT] == undisturbed[:KILLED_AT]
    assert disturbed[KILLED_AT:] == undisturbed[KILLED_AT - again :]


def test_every_example_of_the_guides_is_run_and_its_extra_exists() -> None:
    headings = set()
    for guide in ("attach.md", "integrations.md"):
        text = (ROOT / "docs" / guide).read_text()
        for heading, section in re.findall(r"^#+ (.*)\n((?:(?!^#).*\n)*)", text, re.MULTILINE):
            if "```python" in section:
                headings.add((guide, heading))
    assert headings == {(guide, heading) for guide, heading, *_ in EXAMPLES.values()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for framework, (guide, heading, *_) in EXAMPLES.items():
        if framework != "attach":
            assert f"pip install '.[{framework}]'" in blocks(guide, heading)[1]
            assert framework in project["optional-dependencies"]
