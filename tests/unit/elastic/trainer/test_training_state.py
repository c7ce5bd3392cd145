"""Claims about random numbers: a restored generator goes on where it was, one by one."""

import functools
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from keepstep.checkpoint.errors import LayoutMismatch
from keepstep.checkpoint.format.layout.boxes import Json
from keepstep.checkpoint.format.layout.descriptions import Average, Descriptions
from keepstep.checkpoint.format.layout.part_table import Part, PartTable
from keepstep.checkpoint.format.layout.source import BoxRequest, TensorSpec, slots_in
from keepstep.checkpoint.live.tensors import LiveState
from keepstep.elastic.data.position import IndexedPass, Position
from keepstep.elastic.data.sample_randomness import kept_generators, seed_generators
from keepstep.elastic.errors import UsageError
from keepstep.elastic.trainer.state import State
from keepstep.elastic.trainer.training_state import TrainingState


class Held:
    """One rank's capture, whole."""

    def __init__(self, live: LiveState) -> None:
        self.step = 3
        self.documents: Mapping[str, Json] = live.documents
        self.values = {tensor.key: tensor.data.detach().clone() for tensor in live.tensors}

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        return {
            key: TensorSpec(str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for key, value in self.values.items()
        }

    def slots(self, parameters: Collection[str]) -> Mapping[str, Mapping[str, TensorSpec]]:
        return slots_in(self.tensors, parameters)

    def known_keys(self) -> Collection[str]:
        return self.values.keys()

    def read(self, requests: Sequence[BoxRequest]) -> None:
        for request in requests:
            request.into[:] = self.values[request.key].numpy().tobytes()

    def describe(self) -> str:
        return "a test"


def training(rank: int = 0) -> TrainingState:
    state = State(nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return TrainingState(state, torch.device("cpu"), rank)


def drawn() -> tuple[float, float, float, float]:
    # A normal number leaves another one in the generator.
    return torch.rand(()).item(), random.random(), np.random.rand(), np.random.standard_normal()


def test_generators_go_on_where_they_were() -> None:
    state = training()
    state.start_fresh(seed=1)
    drawn()
    held = Held(state.capture(Position(3, 3)))
    expected = [drawn(), drawn()]
    restored = training().restore_from(held, seed=2)
    assert (restored, restored.stream) == (Position(3, 3), None)
    assert [drawn(), drawn()] == expected


@pytest.mark.parametrize("missing", ["cpu", "numpy"])
def test_generator_that_the_source_does_not_have_is_seeded_and_the_others_are_restored(
    missing: str,
) -> None:
    """As in a checkpoint of before NumPy's generator was stored."""
    state = training()
    state.start_fresh(seed=1)
    held = Held(state.capture(Position(3, 3)))
    expected = drawn()
    del held.values[f"rank/00000/rng/{missing}"]
    training().restore_from(held, seed=2)
    first = drawn()
    training().restore_from(held, seed=2)
    assert drawn() == first
    is_seeded = [one != other for one, other in zip(first, expected, strict=True)]
    assert is_seeded == [missing == "cpu", False, missing == "numpy", missing == "numpy"]


def test_numpy_generator_of_another_kind_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    ordinary = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(7))  # type: ignore[attr-defined]
    try:
        state = training()
        with kept_generators():
            seed_generators(3)
            before = np.random.rand()
        assert np.random.rand() == before
        held = Held(state.capture(Position(3, 3)))
        assert "rank/00000/rng/numpy" not in held.values
        assert "PCG64 of the script's own" in caplog.text
        assert state.restore_from(held, seed=2) == Position(3, 3)
    finally:
        np.random.set_bit_generator(ordinary)  # type: ignore[attr-defined]


class Packing(nn.Linear):
    """Computes an extra state whose size changes, and its weight in another data type."""

    history: bytes = b""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(list(self.history), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = bytes(state.tolist())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().to(torch.float16)


def test_a_job_gives_modules_what_their_state_dict_computes() -> None:
    def packing() -> TrainingState:
        state = State(
            nn.Sequential(Packing(2, 3)), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        )
        return TrainingState(state, torch.device("cpu"), 0)

    state = packing()
    held = None
    for history in (b"one", b"seven"):
        # New values at every step.
        state.model[0].history = history
        nn.init.normal_(state.model[0].weight)
        held = Held(state.capture(Position(3, 3)))
        held.read = functools.partial(read_boxes, held)  # type: ignore[method-assign]
    assert held is not None
    restored = packing()
    restored.restore_from(held, seed=2)
    assert restored.model[0].history == b"seven"
    expected = state.model[0].weight.half().float()
    assert torch.equal(restored.model[0].weight, expected)
    assert [tensor.key for tensor in state.replicable()] == ["model/0.weight", "model/0.bias"]


def padded(rows: int, device: str = "cpu") -> TrainingState:
    with torch.device(device):
        model = nn.Embedding(rows, 2)
    state = State(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        descriptions=Descriptions(padding={"weight": (3, 2)}),
    )
    return TrainingState(state, torch.device("cpu"), 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_padding_is_kept_unless_nothing_was_ever_written_to_it(device: str) -> None:
    state = padded(4)
    held = Held(state.capture(Position(3, 3)))
    held.read = functools.partial(read_boxes, held)  # type: ignore[method-assign]
    restored = padded(6, device)
    if device == "meta":
        # As memory that is used again may look.
        nn.init.constant_(restored.model.weight, math.nan)
    before = restored.model.weight.detach()[3:].clone()
    restored.restore_from(held, seed=2)
    assert torch.equal(restored.model.weight[:3], state.model.weight[:3])
    expected = torch.zeros(3, 2) if device == "meta" else before
    assert torch.equal(restored.model.weight[3:], expected)


def test_what_has_memory_in_a_model_on_the_meta_device_keeps_its_values() -> None:
    """Such as a table that `build` computes, and layers with the weights of another training."""
    model = nn.ModuleDict({"new": nn.Linear(2, 2, device="meta"), "pretrained": nn.Linear(40, 40)})
    model.register_buffer("frequencies", torch.arange(1000.0), persistent=False)
    before = model["pretrained"].weight.detach().clone()
    state = State(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    TrainingState(state, torch.device("cpu"), 0)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model["pretrained"].weight, before)
    assert torch.equal(model.frequencies, torch.arange(1000.0))


def test_tensors_of_several_modules_stay_shared_when_they_leave_the_meta_device() -> None:
    with torch.device("meta"):
        embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        for module in (embedding, head):
            module.register_buffer("scale", embedding._buffers.get("scale", torch.empty(3)))
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    state = State(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    training = TrainingState(state, torch.device("cpu"), 0)
    assert head.weight is embedding.weight
    assert head.scale is embedding.scale
    assert [name for name, _ in model.named_parameters()] == ["0.weight"]
    assert "model/1.weight" not in {tensor.key for tensor in training.capture(Position()).tensors}


def read_boxes(held: Held, requests: Sequence[BoxRequest]) -> None:
    for request in requests:
        box = held.values[request.key][request.box.slices].contiguous()
        request.into[:] = box.numpy().tobytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_where_a_snapshot_comes_from_and_all_have_the_configuration(rank: int) -> None:
    state = State(
        nn.Linear(2, 2), lambda parameters: torch.optim.SGD(parameters, lr=0.1), config={"width": 2}
    )
    documents = TrainingState(state, torch.device("cpu"), rank).capture(Position()).documents
    assert documents["config"] == {"width": 2}
    assert ("provenance" in documents) is (rank == 0)


def test_a_configuration_of_a_job_that_is_not_json_is_refused() -> None:
    state = State(nn.Linear(2, 2), torch.optim.SGD, config={"dtype": torch.float32})
    with pytest.raises(LayoutMismatch, match="config: a value of type dtype cannot be stored"):
        TrainingState(state, torch.device("cpu"), 0)


def test_ranks_that_the_source_does_not_have_draw_different_numbers() -> None:
    state = training()
    state.start_fresh(seed=1)
    held = Held(state.capture(Position(3, 3)))
    numbers = []
    for rank in (4, 5):
        training(rank).restore_from(held, seed=2)
        numbers.append(drawn())
    for one, other in zip(*numbers, strict=True):
        assert one != other


@pytest.mark.parametrize("seed", [300_000_000, 2**64 - 1, -(2**63)])
def test_every_seed_that_torch_takes_can_be_a_jobs(seed: int) -> None:
    numbers = []
    for rank in (4, 5):
        training(rank).start_fresh(seed)
        numbers.append(drawn())
    for one, other in zip(*numbers, strict=True):
        assert one != other


@pytest.mark.parametrize("seed", [0, 7, -7])
def test_small_seeds_give_the_numbers_that_they_have_always_given(seed: int) -> None:
    training(rank=2).start_fresh(seed)
    number = torch.rand(()).item()
    torch.manual_seed(seed * 1_000_003 * 65_537 + 3)
    assert torch.rand(()).item() == number


@pytest.mark.parametrize(
    ("device", "capturable", "may"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_optimizer_that_a_cuda_graph_may_replay_is_recognized(
    device: str, capturable: bool, may: bool
) -> None:
    """Its writes move no version counter, so a write during a copy would not be noticed."""
    state = State(nn.Linear(1, 1), functools.partial(torch.optim.AdamW, capturable=capturable))
    assert TrainingState(state, torch.device(device), 0).may_replay_writes is may


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_a_parameter_of_two_optimizers_is_refused_at_the_start(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """Both would store their slots and options under its name, and one would get the other's."""
    model = nn.Linear(2, 2)
    state = State(model, lambda parameters: [optimizer(parameters), optimizer([model.weight])])
    with pytest.raises(LayoutMismatch, match="weight is a parameter of two optimizers"):
        TrainingState(state, torch.device("cpu"), 0)


def test_slots_that_another_optimizer_has_kept_of_a_parameter_are_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    first = torch.optim.SGD([{"params": [model.weight]}, {"params": []}], momentum=0.9)
    second = torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9)
    second.param_groups.clear()
    training = TrainingState(State(model, lambda _: [first, second]), torch.device("cpu"), 0)
    for optimizer in (first, second):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        if optimizer is first:
            second.param_groups.append(first.param_groups.pop(0))
    with pytest.raises(LayoutMismatch, match="optim/weight/momentum_buffer is in the state twice"):
        training.capture(Position(1))


def test_fused_parts_of_a_job_are_those_of_its_state() -> None:
    model = nn.Linear(2, 2)
    state = State(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        descriptions=Descriptions(parts={"weight": PartTable(0, (Part("gate", 2), Part("up", 2)))}),
    )
    with pytest.raises(LayoutMismatch, match=r"model/weight: dimension 0 .* have 4 elements"):
        TrainingState(state, torch.device("cpu"), 0).capture(Position())


def test_position_is_restored_with_the_pass_that_it_is_in() -> None:
    stored = IndexedPass(begin=2, end=9, global_batch=4, samples=30)
    held = Held(training().capture(Position(3, 3, indexed_pass=stored)))
    assert training().restore_from(held, seed=2).indexed_pass == stored
    held = Held(training().capture(Position(3, 3)))
    assert training().restore_from(held, seed=2).indexed_pass is None


class Averages:
    """An average of the weights that a script keeps next to the model, padded as the model is."""

    def __init__(self, rows: int) -> None:
        self.weight = torch.rand(rows, 2)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.weight = state["weight"]


def averaging(rows: int) -> tuple[TrainingState, Averages]:
    averages = Averages(rows)
    state = State(
        nn.Embedding(rows, 2),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        extra={"ema": averages},
        descriptions=Descriptions(
            averages={"extra/ema/weight": Average("weight")}, padding={"*weight": (3, 2)}
        ),
    )
    return TrainingState(state, torch.device("cpu"), 0), averages


def test_what_is_said_of_extra_objects_is_stored_and_used() -> None:
    state, averages = averaging(4)
    for _ in range(2):
        held = Held(state.capture(Position(3, 3)))
        assert held.documents["averages"] == {"extra/ema/weight": {"of": "model/weight"}}
        assert held.documents["padding"].keys() == {"model/weight", "extra/ema/weight"}
    held.read = functools.partial(read_boxes, held)  # type: ignore[method-assign]
    other, restored = averaging(6)
    other.restore_from(held, seed=2)
    assert torch.equal(restored.weight[:3], averages.weight[:3])


def test_what_is_said_of_extra_objects_is_said_again_when_they_change() -> None:
    state, averages = averaging(4)
    state.capture(Position(3, 3))
    averages.weight = torch.rand(5, 2)
    with pytest.raises(LayoutMismatch, match=r"extra/ema/weight"):
        state.capture(Position(4, 4))


class Shadow:
    """An average of the weights of any names; its object may outlive a generation."""

    def __init__(self, *names: str) -> None:
        self.values: dict[str, Any] = {name: torch.zeros(2) for name in names}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def shadowing(shadow: Shadow, *, is_stage: bool = False) -> TrainingState:
    state = State(
        nn.Linear(2, 2),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        extra={"ema": shadow},
    )
    return TrainingState(state, torch.device("cpu"), 0, is_stage=is_stage)


@pytest.mark.parametrize(
    ("before", "after"), [((), ("a",)), (("a",), ("a", "b")), (("a", "b"), ("a",)), (("a",), ())]
)
def test_extra_object_whose_tensors_a_new_process_would_not_have_is_refused_at_a_snapshot(
    before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Else a recovery would find out, or the training would go on without them."""
    shadow = Shadow(*before)
    training = shadowing(shadow)
    training.capture(Position(1, 1))
    shadow.values = Shadow(*after).values
    changed = min(set(before) ^ set(after))
    with pytest.raises(UsageError, match=f"extra/ema/{changed}: .*; make all its tensors in build"):
        training.capture(Position(2, 2))


@pytest.mark.parametrize(("names", "lost"), [((), "a"), (("a",), "b")])
def test_tensors_of_a_snapshot_that_an_extra_object_has_no_place_for_are_reported(
    names: tuple[str, ...], lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They may have their place on another rank, so that none can tell by itself."""
    held = Held(shadowing(Shadow("a", "b")).capture(Position(3, 3)))
    shadowing(Shadow("a", "b")).restore_from(held, seed=2)
    assert not caplog.records
    shadowing(Shadow(*names)).restore_from(held, seed=2)
    assert f"extra/ema/{lost} is in step 3, but not among the tensors of 'ema'" in caplog.text


def test_extra_object_of_a_rank_or_stage_has_names_of_its_own() -> None:
    """The stored names are one rank's."""
    first = Shadow("first", "shared")
    first.values["first"] += 1
    held = Held(shadowing(first).capture(Position(3, 3)))
    trainer = held.documents["trainer"]
    assert trainer["extra_tensors"] == {"ema": ["extra/ema/first", "extra/ema/shared"]}
    trainer["extra_tensors"] = {"ema": ["extra/ema/last", "extra/ema/shared"]}
    restored = Shadow("first", "shared")
    shadowing(restored).restore_from(held, seed=2)
    assert torch.equal(restored.values["first"], torch.ones(2))
    shadowing(Shadow("shared"), is_stage=True).restore_from(held, seed=2)


def test_extra_objects_that_are_new_or_gone_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    held = Held(shadowing(Shadow("a")).capture(Position(3, 3)))
    training().restore_from(held, seed=2)
    assert "extra object 'ema': in the checkpoint, and not in State.extra" in caplog.text
    caplog.clear()
    plain = Held(training().capture(Position(3, 3)))
    shadowing(Shadow("a")).restore_from(plain, seed=2)
    assert "extra object 'ema': not in the checkpoint, keeps its initial state" in caplog.text


def test_tensors_of_an_extra_object_that_are_all_others_are_refused() -> None:
    held = Held(shadowing(Shadow("a")).capture(Position(3, 3)))
    with pytest.raises(LayoutMismatch, match="extra/ema/b: missing in step 3"):
        shadowing(Shadow("b")).restore_from(held, seed=2)


def scheduled(count: int) -> TrainingState:
    def optimizers(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in parameters]

    state = State(
        nn.Linear(2, 2), optimizers, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2)
    )
    training = TrainingState(state, torch.device("cpu"), 0)
    training.schedulers = training.schedulers[:count]
    return training


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (0, 1), (1, 0)])
def test_a_checkpoint_with_other_schedulers_is_refused(before: int, after: int) -> None:
    """Else a schedule would start over in the middle of a run, or be lost."""
    held = Held(scheduled(before).capture(Position(3, 3)))
    with pytest.raises(LayoutMismatch, match=f"state of {before} schedulers.* job has {after}"):
        scheduled(after).restore_from(held, seed=2)
    scheduled(before).restore_from(held, seed=2)


def test_schedulers_of_another_kind_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    before = scheduled(1)
    held = Held(before.capture(Position(3, 3)))
    held.documents["trainer"]["schedulers"][0]["max_lr"] = 1.0
    del held.documents["trainer"]["schedulers"][0]["gamma"]
    scheduled(1).restore_from(held, seed=2)
    assert "gamma of scheduler 0: not in the checkpoint, stays as it is" in caplog.text
    assert "max_lr of scheduler 0: in the checkpoint, and not known" in caplog.text


def test_a_checkpoint_that_no_job_stored_is_refused() -> None:
    held = Held(training().capture(Position(3, 3)))
    del held.documents["trainer"]
    with pytest.raises(LayoutMismatch, match=r"step 3 was not stored by a job.*start_from="):
        training().restore_from(held, seed=2)


def test_slots_of_a_parameter_that_no_optimizer_has_are_refused() -> None:
    def frozen(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(parameters)[:1])

    model = nn.Linear(2, 2)
    before = TrainingState(State(model, torch.optim.Adam), torch.device("cpu"), 0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before.optimizers[0].step()
    held = Held(before.capture(Position(3, 3)))
    after = TrainingState(State(nn.Linear(2, 2), frozen), torch.device("cpu"), 0)
    with pytest.raises(LayoutMismatch, match=r"optim/bias/exp_avg.*: in the source, but of no"):
        after.restore_from(held, seed=2)


def optimized(
    make: Callable[..., torch.optim.Optimizer],
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> TrainingState:
    state = State(nn.Linear(2, 2), functools.partial(make, **options), extra=extra or {})
    return TrainingState(state, torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.optim.AdamW, torch.optim.SGD),
        (torch.optim.SGD, torch.optim.AdamW),
        (torch.optim.AdamW, torch.optim.Adam),
        (torch.optim.Adagrad, torch.optim.RMSprop),
    ],
)
def test_state_of_another_kind_of_optimizer_is_refused(
    before: Callable[..., torch.optim.Optimizer], after: Callable[..., torch.optim.Optimizer]
) -> None:
    held = Held(optimized(before).capture(Position(3, 3)))
    with pytest.raises(LayoutMismatch, match="state of another kind of optimizer"):
        optimized(after).restore_from(held, seed=2)
    optimized(before).restore_from(held, seed=2)


def test_keys_that_a_script_adds_to_groups_may_have_other_names() -> None:
    before, after = optimized(torch.optim.SGD), optimized(torch.optim.SGD)
    before.optimizers[0].param_groups[0]["scale"] = 2.0
    after.optimizers[0].param_groups[0]["multiplier"] = 3.0
    after.restore_from(Held(before.capture(Position(3, 3))), seed=2)
    assert after.optimizers[0].param_groups[0]["multiplier"] == 3.0


def test_options_that_the_script_now_gives_otherwise_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = Held(optimized(torch.optim.AdamW, lr=0.5).capture(Position(3, 3)))
    edited = optimized(torch.optim.AdamW, lr=0.25, amsgrad=True)
    edited.restore_from(held, seed=2)
    assert "amsgrad false (the script gives true), lr 0.5 (the script gives 0.25)" in caplog.text
    caplog.clear()
    edited.optimizers[0].param_groups[0]["lr"] = 0.125
    edited.restore_from(held, seed=2)
    assert caplog.text == ""


def test_rate_that_a_scheduler_has_changed_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    before = scheduled(2)
    for scheduler in before.schedulers:
        scheduler.step()
        scheduler.step()
    scheduled(2).restore_from(Held(before.capture(Position(3, 3))), seed=2)
    assert caplog.text == ""


class Drawing:
    """Draws a random number when it is asked for its state, as StatefulDataLoader does."""

    def __init__(self) -> None:
        self.value, self.asked = 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        torch.rand(())
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def test_extra_object_is_not_asked_for_a_state_that_it_was_just_given() -> None:
    before = Drawing()
    before.value = 7
    held = Held(optimized(torch.optim.SGD, {"loader": before}).capture(Position(3, 3)))
    after = Drawing()
    training = optimized(torch.optim.SGD, {"loader": after})
    position = training.restore_from(held, seed=2)
    asked = after.asked
    again = Held(training.capture(position))
    assert (after.value, after.asked) == (7, asked)
    assert again.documents["trainer"] == held.documents["trainer"]
    assert all(torch.equal(again.values[key], held.values[key]) for key in held.values)
    after.value = 8
    later = training.capture(Position(4, 4))
    assert later.documents["trainer"]["extra"] == {"loader": {"value": 8}}
