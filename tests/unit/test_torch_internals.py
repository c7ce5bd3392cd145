"""Claims about PyTorch's private names: each works in this release, and all are in one module."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Shard

import keepstep
from keepstep import torch_internals

ROOT = Path(keepstep.__file__).parent
CPU = torch.device("cpu")

OTHERS = {"_replace"}
"""Names of the standard library that the module uses, too."""


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        torch_internals.reset_group_count()


def test_the_installed_version_is_one_that_the_names_were_tried_in() -> None:
    """A new release: run this file with it, then add it."""
    assert ".".join(torch.__version__.split(".")[:2]) in torch_internals.SEEN_IN


def test_modules_show_their_own_dictionaries() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    inner = module[0]
    inner.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert torch_internals.own_modules(module) == {"0": inner}
    assert list(torch_internals.own_parameters(inner)) == ["weight", "bias"]
    assert "running_mean" in torch_internals.own_buffers(inner)
    assert torch_internals.non_persistent_buffers(inner) == {"scratch"}
    torch_internals.apply_to_tensors(module, torch.zeros_like)
    assert inner.weight.sum() == 0


def test_hooks_of_state_dicts_are_found() -> None:
    module = nn.Linear(1, 1)
    assert not torch_internals.state_dict_hooks(module)
    module.register_state_dict_post_hook(lambda *arguments: None)
    module.register_load_state_dict_pre_hook(lambda *arguments: None)
    assert len(torch_internals.state_dict_hooks(module)) == 1
    assert len(torch_internals.load_state_dict_pre_hooks(module)) == 1


def test_format_versions_go_with_a_state_dict() -> None:
    entries = nn.BatchNorm1d(2).state_dict()
    versions = torch_internals.state_dict_versions(entries)
    assert versions[""] == {"version": 2}  # type: ignore[index]
    copied = type(entries)(entries)
    torch_internals.set_state_dict_versions(copied, versions)
    assert torch_internals.state_dict_versions(copied) is versions
    assert torch_internals.state_dict_versions({}) is None


def test_writes_to_a_tensor_are_counted() -> None:
    tensor = torch.zeros(2)
    before = torch_internals.version_of(tensor)
    torch_internals.copy_all([tensor], [torch.ones(2)])
    assert torch_internals.version_of(tensor) == before + 1
    assert tensor.tolist() == [1, 1]


def test_subclasses_that_wrap_tensors_are_known(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1,))
    assert torch_internals.is_wrapper_subclass(DTensor.from_local(torch.zeros(1), mesh))
    assert not torch_internals.is_wrapper_subclass(torch.zeros(1))


def test_fake_tensors_have_no_memory() -> None:
    with torch_internals.fake_tensors():
        tensor = torch.zeros(2**40)
    assert type(tensor) is not torch.Tensor


def test_classes_of_data_loaders_and_of_dcp_are_there() -> None:
    loader = torch.utils.data.DataLoader([1, 2])
    assert isinstance(iter(loader), torch_internals.data_loader_iterator())
    assert callable(torch_internals.pin_memory)
    info = torch_internals.dcp_storage_info("a", 1, 2)
    assert (info.relative_path, info.offset, info.length) == ("a", 1, 2)  # type: ignore[attr-defined]
    planner = dist.checkpoint.DefaultSavePlanner(enable_plan_caching=True)
    assert torch_internals.has_plan_caching(planner)
    assert not torch_internals.has_plan_caching(dist.checkpoint.DefaultSavePlanner())


def test_trees_are_flattened_and_made_again() -> None:
    tree = {"a": [1, (None, "b")], "c": {}}
    leaves, structure = torch_internals.flatten_tree(tree)
    assert leaves == [1, None, "b"]
    assert torch_internals.unflatten_tree(leaves, structure) == tree


def test_local_tensors_of_sharded_ones_are_one_object(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(0)])
    local = torch_internals.local_tensor(tensor)
    assert local is torch_internals.local_tensor(tensor)
    other = torch_internals.with_local_tensor(tensor, torch.ones(4, 2, dtype=torch.float64))
    assert other.dtype == torch.float64
    assert other.placements == tensor.placements
    assert other.shape == tensor.shape
    torch_internals.clear_sharding_caches()


def test_strided_shards_have_a_dimension_and_a_factor() -> None:
    placement = torch_internals.strided_shard()(1, split_factor=2)
    assert isinstance(placement, Placement)
    assert (placement.dim, placement.split_factor) == (1, 2)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flat_parameters_say_what_lies_where(
    group: dist.ProcessGroup, use_orig_params: bool
) -> None:
    module = FullyShardedDataParallel(
        nn.Linear(3, 2), device_id=CPU, use_orig_params=use_orig_params
    )
    handle = torch_internals.fsdp1_handle(module)
    assert handle is not None
    flat = handle.flat_param
    assert list(torch_internals.flat_names(flat)) == ["weight", "bias"]
    shapes = [tuple(shape) for shape, *_ in torch_internals.flat_places(flat)]
    assert shapes == [(2, 3), (2,)]
    infos, shared = torch_internals.flat_infos(flat)
    assert [info.param_name for info in infos] == ["weight", "bias"]
    assert not shared
    assert (torch_internals.flat_views(flat) is not None) == use_orig_params
    assert torch_internals.flat_shard(flat).numel() >= 8
    torch_internals.is_gathered(flat)
    if not use_orig_params:
        names = {name.rpartition(".")[2] for name, _ in module.named_parameters()}
        assert names == {torch_internals.FLAT_PARAMETER}


def test_groups_are_named_and_counted(group: dist.ProcessGroup) -> None:
    assert list(torch_internals.group_names().values()) == [group.group_name]
    assert torch_internals.group_count() == 1
    torch_internals.default_store().set("key", "value")
    assert CPU in torch_internals.device_types(group)
    assert isinstance(torch_internals.back_end(group, CPU), dist.ProcessGroupGloo)
    mesh = init_device_mesh("cpu", (1,))
    assert torch_internals.mesh_group_names(mesh) == [group.group_name]
    if not torch.__version__.startswith("2.10."):
        assert group.group_name in torch_internals.mesh_groups(mesh)


def test_accelerators_are_known_by_name() -> None:
    assert torch_internals.private_accelerator_name() == "privateuseone"
    assert torch_internals.is_accelerator(torch.cuda)
    assert not torch_internals.is_in_bad_fork(torch.cuda)
    assert not torch_internals.is_accelerator(torch.fx)


def test_compiled_code_is_dropped() -> None:
    torch.compile(lambda tensor: tensor + 1, backend="eager")(torch.zeros(1))
    seen = torch._dynamo.convert_frame.input_codes.seen
    assert seen
    torch_internals.drop_compiled_code()
    assert not seen


def modules() -> Iterator[Path]:
    """Yield the files of all other modules. Links to folders are not followed by `rglob`."""
    for folder in (ROOT, *(path for path in ROOT.iterdir() if path.is_symlink())):
        yield from set(folder.rglob("*.py")) - {ROOT / "torch_internals.py"}


def used_names() -> set[str]:
    """Return the private names that the module uses."""
    tree = ast.parse(inspect.getsource(torch_internals))
    return set(private_names(tree)) - OTHERS


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes, and the private names imported from torch, of a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                yield from (part for part in module.split(".") if is_private(part))
                yield from (alias.name for alias in names if is_private(alias.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_other_module_uses_them() -> None:
    names = used_names()
    assert {"_parameters", "_local_tensor", "_world"} <= names
    breaches = []
    for path in modules():
        tree = ast.parse(path.read_text())
        own = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
        }
        breaches += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in private_names(tree)
            if name in names and name not in own
        ]
        breaches += [
            f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("torch")
            and any(
                map(is_private, [*(node.module or "").split("."), *(a.name for a in node.names)])
            )
        ]
    assert breaches == []
