"""Holds every private name of PyTorch in use, so that a new release means one file to read.

A private name may change in any release. `tests/unit/test_torch_internals.py` uses each in the
PyTorch that is installed, which is to be one of `SEEN_IN`, and finds private names that are used
elsewhere. Names that stand in files of other tools, such as
`torch._utils._rebuild_tensor_v2` in pickles, are data and not listed here.

Modules that take long to import are imported by the functions that need them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.nn.parameter import Parameter

SEEN_IN = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""Versions of PyTorch in which all of these names were tried."""

# --- tensors and modules


def own_parameters(module: nn.Module) -> dict[str, Parameter | None]:
    """Return a module's dictionary of its own parameters, without those of modules below it."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's dictionary of its own buffers."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's dictionary of the modules directly below it."""
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its `state_dict` leaves out."""
    return module._non_persistent_buffers_set


def state_dict_hooks(module: nn.Module) -> Mapping[int, Any]:
    """Return the hooks that run after a module's `state_dict`."""
    return module._state_dict_hooks


def load_state_dict_pre_hooks(module: nn.Module) -> Mapping[int, Any]:
    """Return the hooks that run before a module's `load_state_dict`."""
    return module._load_state_dict_pre_hooks


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer of a module, as `nn.Module.to` does."""
    module._apply(function)


def state_dict_versions(entries: Mapping[str, object]) -> object:
    """Return the modules' format versions of a `state_dict`, or None if it has none."""
    return getattr(entries, "_metadata", None)


def set_state_dict_versions(entries: Mapping[str, object], versions: object) -> None:
    """Set what `state_dict_versions` returns, which `load_state_dict` reads."""
    vars(entries)["_metadata"] = versions


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Returns how many in-place writes a tensor has had. It is called for each tensor in each step."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target in one call."""
    torch._foreach_copy_(list(targets), list(sources))


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that is made of other tensors."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def fake_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors have no memory. It takes seconds to import."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def pin_memory(batch: Any) -> Any:
    """Return a batch with its tensors copied to pinned memory, as a DataLoader does it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)


def data_loader_iterator() -> type:
    """Return the class of the iterators of a DataLoader."""
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


# --- sharded tensors


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return a DTensor's local tensor, the same object at every call, which `to_local` is not."""
    return tensor._local_tensor


def with_local_tensor(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor of this local tensor, with the shape and placement of another one."""
    from torch.distributed.tensor import DTensor

    spec = tensor._spec
    assert spec.tensor_meta is not None, "a tensor that exists has a shape"
    if local.dtype != spec.tensor_meta.dtype:
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = spec.shallow_copy_with_tensor_meta(meta)
    return DTensor(local, spec, requires_grad=False)


@cache
def strided_shard() -> type[_StridedShard]:
    """Return the class of FSDP's placement of a tensor that tensor parallelism has sharded."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def clear_sharding_caches() -> None:
    """Clear what DTensor has computed about operations and redistributions."""
    from torch.distributed.tensor._redistribute import (
        _gen_transform_infos,
        clear_redistribute_planner_cache,
    )
    from torch.distributed.tensor.debug import (
        _clear_fast_path_sharding_prop_cache,
        _clear_python_sharding_prop_cache,
    )

    _clear_python_sharding_prop_cache()
    _clear_fast_path_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()


# --- FSDP1

FLAT_PARAMETER = "_flat_param"
"""The name of the flat parameter in its module."""


def fsdp1_handle(module: nn.Module) -> Any | None:
    """Return the handle of an FSDP1 unit's flat parameter; None if it has no parameters."""
    return cast(Any, module)._handle


def flat_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a flat parameter, and any other tensor itself."""
    shard: torch.Tensor = getattr(tensor, "_local_shard", tensor)
    return shard


def is_gathered(flat: torch.Tensor) -> bool:
    """Return whether a flat parameter has memory for the whole parameters."""
    return hasattr(flat, "_full_param_padded")


def flat_names(flat: Any) -> Sequence[str]:
    """Return the names of the parameters in a flat parameter."""
    names: Sequence[str] = flat._fqns
    return names


def flat_places(flat: Any) -> list[tuple[Any, Any, Any, Any]]:
    """Return each parameter's shape, contiguity, extension and place in this rank's shard."""
    return list(
        zip(
            flat._shapes,
            flat._contiguities,
            flat._param_extensions,
            flat._shard_param_infos,
            strict=True,
        )
    )


def flat_infos(flat: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the modules' places of a flat parameter's parameters, and the shared ones."""
    return flat._param_infos, flat._shared_param_infos


def flat_views(flat: Any) -> list[torch.Tensor] | None:
    """Return the parameters that optimizers hold with `use_orig_params`; None without it."""
    views: list[torch.Tensor] | None = flat._params
    return views


# --- process groups and meshes


def group_names() -> dict[dist.ProcessGroup, str]:
    """Return the names of this process's groups."""
    from torch.distributed.distributed_c10d import _world

    return cast("dict[dist.ProcessGroup, str]", _world.pg_names)


def group_count() -> int:
    """Return how many groups this process has made; PyTorch names the next one by it."""
    from torch.distributed.distributed_c10d import _world

    return _world.group_count


def reset_group_count() -> None:
    """Let the next group have the first name again."""
    from torch.distributed.distributed_c10d import _world

    _world.group_count = 0


def default_store() -> Store:
    """Return the store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def device_types(group: dist.ProcessGroup) -> Sequence[torch.device]:
    """Return the devices that a group has a back end for."""
    return group._device_types


def back_end(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a group's back end, without the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    from torch.distributed import distributed_c10d

    wrapper = distributed_c10d._ProcessGroupWrapper  # type: ignore[attr-defined]
    back_end: Any = group._get_backend(device)
    while isinstance(back_end, wrapper):
        back_end = back_end.wrapped_pg
    return back_end


def mesh_group_names(mesh: DeviceMesh) -> list[str]:
    """Return the names of the groups of a mesh's dimensions."""
    return list(mesh._dim_group_names)


def mesh_groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """Return the groups that a mesh keeps, by name, where compiled code finds them.

    A mesh of PyTorch 2.10 keeps none: its groups are found by their names.
    """
    groups: dict[str, dist.ProcessGroup] = getattr(mesh, "_pg_registry", {})
    return groups


# --- checkpoints of PyTorch


def has_plan_caching(planner: object) -> bool:
    """Return whether a planner of DCP uses its last plan again."""
    return bool(getattr(planner, "_enable_plan_caching", False))


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested dictionaries, lists and tuples, and their structure."""
    from torch.utils._pytree import tree_flatten

    return tree_flatten(tree)


def unflatten_tree(leaves: Sequence[Any], structure: Any) -> Any:
    """Return what `flatten_tree` has flattened, with other leaves."""
    from torch.utils._pytree import tree_unflatten

    return tree_unflatten(leaves, structure)


def dcp_storage_info(path: str, offset: int, nbytes: int) -> object:
    """Return an entry's place in a file, from DCP's metadata."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, nbytes)


# --- processes and compiled code


def private_accelerator_name() -> str:
    """Return the name of the module of the accelerator that is built outside PyTorch."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name


def is_accelerator(module: ModuleType) -> bool:
    """Return whether a module of torch is one of an accelerator that notices forks."""
    return hasattr(module, "is_initialized") and hasattr(module, "_is_in_bad_fork")


def is_in_bad_fork(module: ModuleType) -> bool:
    """Return whether this process was forked after the accelerator was used."""
    return bool(module._is_in_bad_fork())


def drop_compiled_code() -> None:
    """Drop this process's compiled code and its CUDA graphs.

    Compiled code belongs to models and process groups that are gone, and finds new groups by the
    names of the old ones. Where there is a GPU, `torch._dynamo.reset` imports TorchInductor first,
    which took 3 s of a recovery: so nothing is reset unless something was compiled, even if FSDP2
    has imported `torch._dynamo`.
    """
    if "torch._dynamo" not in sys.modules:
        return
    try:
        # It has each function that Dynamo got, compiled or not.
        was_compiled = bool(torch._dynamo.convert_frame.input_codes.seen)
    except AttributeError:
        was_compiled = True  # Other versions of PyTorch may not have these names.
    if was_compiled or "torch._inductor.cudagraph_trees" in sys.modules:
        torch._dynamo.reset()
