"""Claims about state without tensors: JSON restores values and types."""

import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from keepstep.elastic.data.json_values import from_json_value, to_json_value
from keepstep.elastic.errors import UsageError

keys = (
    st.text(max_size=3)
    | st.sampled_from(["$pairs", "$float", "$tuple", "$tensor"])
    | st.integers()
    | st.floats(allow_nan=False)
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.tuples(inner, inner)
    ),
)


@given(values)
def test_values_are_restored_from_strict_json(value: Any) -> None:
    text = json.dumps(to_json_value("value", value), allow_nan=False)
    assert from_json_value(json.loads(text)) == value


def test_types_that_json_lacks_are_restored_from_a_fresh_value() -> None:
    value = {
        "milestones": Counter({3: 1, 8: 2}),
        "betas": (0.9, 0.95),
        "best": math.inf,
        ("a", 1): 2,
    }
    stored = json.loads(json.dumps(to_json_value("value", value)))
    restored = from_json_value(
        stored, {"milestones": Counter({5: 1}), "betas": (0.0, 0.0), "best": 1.0}
    )
    assert restored == value
    assert type(restored["milestones"]) is Counter
    assert type(restored["betas"]) is tuple


class Span(NamedTuple):
    begin: int
    end: int


class Bounded(dict[str, int]):
    """A mapping whose constructor takes something else."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit


class History(list[float]):
    """A list whose constructor takes something else."""

    def __init__(self, *, length: int) -> None:
        super().__init__()
        self.length = length


def test_subclasses_with_constructors_of_their_own_are_restored() -> None:
    bounded, history = Bounded(3), History(length=2)
    bounded["a"] = 1
    history.append(0.5)
    value = {
        "seen": defaultdict(int, {"easy": 3}),
        "nested": defaultdict(Counter, {"easy": Counter("aab")}),
        "ordered": OrderedDict(b=1, a=2),
        "span": Span(2, 5),
        "spans": [Span(0, 1)],
        "bounded": bounded,
        "history": history,
    }
    fresh = {
        "seen": defaultdict(int, {"old": 1}),
        "nested": defaultdict(Counter),
        "ordered": OrderedDict(),
        "span": Span(0, 0),
        "spans": [Span(0, 0)],
        "bounded": Bounded(3),
        "history": History(length=2),
    }
    stored = json.loads(json.dumps(to_json_value("value", value)))
    restored = from_json_value(stored, fresh)
    assert restored == value
    assert {key: type(item) for key, item in restored.items()} == {
        key: type(item) for key, item in value.items()
    }
    assert restored["seen"]["hard"] == 0
    assert type(restored["nested"]["easy"]) is Counter
    assert (restored["span"].end, restored["spans"][0].end) == (5, 1)
    assert (restored["bounded"].limit, restored["history"].length) == (3, 2)
    # What a value is like stays as it was: it may be the fresh object's own.
    assert fresh["seen"] == {"old": 1}
    assert fresh["nested"] == {}


@pytest.mark.parametrize(
    "value",
    [
        torch.get_rng_state(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros((0, 3), dtype=torch.int32),
        torch.arange(6).reshape(2, 3).T,
        np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        np.array(2.5),
        torch.arange(11).reshape(1, 11)[:, 3],
        torch.tensor([1 + 2j]).conj(),
    ],
)
def test_small_tensors_and_arrays_are_restored(value: Any) -> None:
    stored = json.loads(json.dumps(to_json_value("value", {"generator": value})))
    restored = from_json_value(stored)["generator"]
    assert type(restored) is type(value)
    assert (restored.dtype, restored.shape) == (value.dtype, value.shape)
    assert restored.tolist() == value.tolist()


def test_a_numpy_generator_is_restored() -> None:
    generator = np.random.default_rng(5)
    stored = json.loads(json.dumps(to_json_value("g", generator.bit_generator.state)))
    other = np.random.default_rng(6)
    other.bit_generator.state = from_json_value(stored)
    assert other.random() == generator.random()
    assert from_json_value(to_json_value("scalar", np.float32(0.5))) == 0.5


def test_a_large_tensor_among_other_values_is_refused() -> None:
    with pytest.raises(UsageError, match=r"state\['t'\] has 1048577 bytes, too many"):
        to_json_value("state", {"t": torch.zeros((1 << 20) + 1, dtype=torch.uint8)})


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(2).to_sparse(),
        "\ud800",
        {"\udfff": 1},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_json_cannot_hold_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(UsageError, match=r"extra 'c'\['rows'\]\[1\] is "):
        to_json_value("extra 'c'", {"rows": [1, value]})


def test_error_for_an_unsupported_type_names_its_place() -> None:
    with pytest.raises(UsageError, match=r"extra 'c'\['rows'\]\[1\] is of type object"):
        to_json_value("extra 'c'", {"rows": [1, object()]})


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.ConstantLR(optimizer, 0.1, 2),
                lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            milestones=[2],
        ),
    ],
)
def test_a_restored_scheduler_continues_where_it_was(make: Any) -> None:
    def fresh() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, make(optimizer)

    def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = fresh()
    run(optimizer, scheduler, 3)
    stored = json.loads(json.dumps(to_json_value("scheduler", scheduler.state_dict())))
    rate = optimizer.param_groups[0]["lr"]
    expected = run(optimizer, scheduler, 6)

    other, restored = fresh()
    restored.load_state_dict(from_json_value(stored, restored.state_dict()))
    other.param_groups[0]["lr"] = rate
    assert run(other, restored, 6) == expected
