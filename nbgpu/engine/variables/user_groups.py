"""The person's variables that belong to a process group that ends, and the line that makes each again.

DDP objects are moved to the new group (replicas.py). Meshes, groups and sharded objects refer to the old
group in more places than can be reached, so that nbgpu only lists them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbgpu.engine.group import torch_private


def how_to_make_again(variables: Mapping[str, Any]) -> list[str]:
    """Return a line for each variable that belongs to a current process group, in the order in which to make
    them again.

    Variables of groups that ended earlier were listed then, and are left out.
    """
    # IPython keeps values of cells in `_` and `_8`, which nobody makes again.
    variables = {name: value for name, value in variables.items() if not re.fullmatch(r"_+\d*", name)}
    meshes = {name: value for name, value in variables.items() if isinstance(value, DeviceMesh)}
    groups = [line for name, value in variables.items() if (line := _of_group(name, value))]
    # Whole meshes come first, because parts are taken from them.
    whole = [
        _of_mesh(name, mesh, meshes)
        for name, mesh in meshes.items()
        if _lives(mesh) and not torch_private.root_of(mesh)
    ]
    parts = [
        _of_mesh(name, mesh, meshes)
        for name, mesh in meshes.items()
        if _lives(mesh) and torch_private.root_of(mesh)
    ]
    modules = [value for value in variables.values() if isinstance(value, nn.Module)]
    inner = {id(module) for whole_one in modules for module in whole_one.modules() if module is not whole_one}
    models = [
        line
        for name, value in variables.items()
        if id(value) not in inner and (line := _of_sharded_model(name, value, meshes))
    ]
    tensors = [line for name, value in variables.items() if (line := _of_tensor(name, value, meshes))]
    optimizers = [line for name, value in variables.items() if (line := _of_optimizer(name, value))]
    return [*groups, *whole, *parts, *models, *tensors, *optimizers]


def _of_group(name: str, value: Any) -> str | None:
    if not isinstance(value, dist.ProcessGroup) or value not in torch_private.living_groups():
        return None
    if value is dist.group.WORLD:
        return f"{name} = dist.group.WORLD"
    return f"{name} = dist.new_group({dist.get_process_group_ranks(value)})"


def _of_mesh(name: str, mesh: DeviceMesh, meshes: Mapping[str, DeviceMesh]) -> str:
    root = torch_private.root_of(mesh)
    if root is None or mesh.mesh_dim_names is None:
        return f"{name} = {_call(mesh)}"
    names = mesh.mesh_dim_names
    part = repr(names[0]) if len(names) == 1 else repr(tuple(names))
    return f"{name} = {_named(root, meshes) or _call(root)}[{part}]"


def _call(mesh: DeviceMesh) -> str:
    """Return the call that makes a mesh."""
    shape = tuple(mesh.mesh.shape)
    names = "" if mesh.mesh_dim_names is None else f", mesh_dim_names={tuple(mesh.mesh_dim_names)}"
    return f"dist.device_mesh.init_device_mesh({mesh.device_type!r}, {shape}{names})"


def _of_sharded_model(name: str, value: Any, meshes: Mapping[str, DeviceMesh]) -> str | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without this import there is no such model
    if fsdp is None or not isinstance(value, fsdp.FSDPModule):
        return None
    assert isinstance(value, nn.Module)
    mesh = _mesh_of_model(value)
    if mesh is None or not _lives(mesh):
        return None
    return (
        f"{name} = fully_shard({name}, mesh={_named(mesh, meshes) or _call(mesh)}) of the model built again; "
        f"{name}.parameters() still holds this rank's shards, to_local() gives them"
    )


def _mesh_of_model(model: nn.Module) -> DeviceMesh | None:
    for tensor in chain(model.parameters(), model.buffers()):
        if (mesh := _mesh_of(tensor)) is not None:
            return mesh
    # During a step the parameters may be gathered.
    for module in model.modules():
        if (mesh := torch_private.mesh_of_sharded(module)) is not None:
            return mesh
    return None


def _of_tensor(name: str, value: Any, meshes: Mapping[str, DeviceMesh]) -> str | None:
    mesh = _mesh_of(value)
    if mesh is None or not _lives(mesh):
        return None
    made_on = _named(mesh, meshes) or _call(mesh)
    size = f"shape={tuple(value.shape)}, stride={tuple(value.stride())}"
    placements = ", ".join(map(repr, value.placements))
    return f"{name} = DTensor.from_local({name}.to_local(), {made_on}, [{placements}], {size})"


def _of_optimizer(name: str, value: Any) -> str | None:
    if not isinstance(value, torch.optim.Optimizer):
        return None
    if not any((mesh := _mesh_of(tensor)) is not None and _lives(mesh) for tensor in _parameters(value)):
        return None
    return f"{name} = torch.optim.{type(value).__name__}(...) over the parameters of the model made again"


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _mesh_of(value: Any) -> DeviceMesh | None:
    """Return the mesh that a tensor is distributed over."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(value, tensors.DTensor):
        return None
    mesh = value.device_mesh
    assert isinstance(mesh, DeviceMesh)
    return mesh


def _lives(mesh: DeviceMesh) -> bool:
    """Whether the groups of a mesh still exist."""
    try:
        groups = mesh.get_all_groups()
    except (RuntimeError, ValueError, KeyError):  # torch no longer has its groups
        return False
    return any(group in torch_private.living_groups() for group in groups)


def _named(mesh: DeviceMesh, meshes: Mapping[str, DeviceMesh]) -> str | None:
    """Return the name of the variable that holds a mesh."""
    return next((name for name, other in meshes.items() if other is mesh or other == mesh), None)
