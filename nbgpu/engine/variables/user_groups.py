"""The person's variables that belong to a process group, and for each a line of code that makes it again.

After a failure the groups are made again under their names (own_groups.py), and the variables can be used
further. Where that is not possible, as after a change of the number of ranks, the person is shown the line:
once when the group has ended, and again in place of torch's message where the variable is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nbgpu.engine.group import torch_private
from nbgpu.engine.ipykernel import ended_groups
from nbgpu.engine.variables.persons_objects import is_a, run_limited, walk_modules, walk_tensors

_Line = tuple[str, Iterable[Any]]
"""The line that makes a variable again, and the groups to which the variable belongs."""

_NEVER_MOVED = ""
"""Stands for the name of a group, in a variable that cannot be used on a group that was made again."""


@dataclass(frozen=True)
class Owned:
    """A variable that belongs to process groups."""

    name: str
    value: Any
    line: str
    """The line that makes it again."""
    groups: frozenset[str]
    """The names of its groups."""


def owned(variables: Mapping[str, Any]) -> list[Owned]:
    """Return each variable that belongs to a current process group, in the order in which to make them
    again."""
    # IPython keeps the values of cells under names such as _7.
    named = {name: value for name, value in variables.items() if not name.startswith("_")}
    meshes = {name: value for name, value in named.items() if is_a(value, DeviceMesh)}
    modules = [value for value in named.values() if is_a(value, nn.Module)]
    inner = {id(module) for whole in modules for module in walk_modules(whole) if module is not whole}
    # In the order in which the lines are to be run: an object comes after those that it is made from.
    describers: list[Callable[[str, Any], _Line | None]] = [
        _describe_group,
        # Whole meshes come first, because parts are taken from them.
        lambda name, value: _describe_mesh(name, value, meshes, is_part=False),
        lambda name, value: _describe_mesh(name, value, meshes, is_part=True),
        lambda name, value: None if id(value) in inner else _describe_sharded_model(name, value, meshes),
        lambda name, value: _describe_tensor(name, value, meshes),
        _describe_optimizer,
    ]
    variables_of_groups = []
    for describe, (name, value) in itertools.product(describers, named.items()):
        if (described := describe(name, value)) is not None:
            line, groups = described
            names = frozenset(getattr(group, "group_name", _NEVER_MOVED) for group in groups)
            variables_of_groups.append(Owned(name, value, line, names))
    return variables_of_groups


def lost(before: Iterable[Owned], moved: Collection[str]) -> list[str]:
    """Return the line of each variable that has a group that was not made again, and keep the line for
    messages about a later use of the variable.

    Args:
        before: the variables that belonged to the groups that have ended.
        moved: the names of the groups that were made again.
    """
    gone = [thing for thing in before if not thing.groups <= set(moved)]
    for thing in gone:
        ended_groups.note(thing.name, thing.value, thing.line)
    return [thing.line for thing in gone]


def _describe_group(name: str, value: Any) -> _Line | None:
    """Return the line for a variable that is a process group; None for any other variable."""
    if not is_a(value, dist.ProcessGroup) or value not in torch_private.living_groups():
        return None
    if value is dist.group.WORLD:
        return f"{name} = dist.group.WORLD", [value]
    return f"{name} = dist.new_group({dist.get_process_group_ranks(value)})", [value]


def _describe_mesh(name: str, value: Any, meshes: Mapping[str, DeviceMesh], is_part: bool) -> _Line | None:
    """Return the line for a DeviceMesh whose groups exist; None for any other variable.

    Args:
        name: the variable's name.
        value: its value.
        meshes: all variables that are meshes.
        is_part: whether to describe meshes that were sliced from another one, or those that were not.
    """
    if not is_a(value, DeviceMesh) or not (groups := _mesh_groups(value)):
        return None
    root = torch_private.root_mesh(value)
    if (root is not None) != is_part:
        return None
    if root is None or value.mesh_dim_names is None:
        return f"{name} = {_call(value)}", groups
    names = value.mesh_dim_names
    part = repr(names[0]) if len(names) == 1 else repr(tuple(names))
    return f"{name} = {_mesh_expression(root, meshes)}[{part}]", groups


def _mesh_expression(mesh: DeviceMesh, meshes: Mapping[str, DeviceMesh]) -> str:
    """Return the name of the variable that holds a mesh, or the call that makes the mesh if there is none."""
    return next((name for name, other in meshes.items() if other is mesh or other == mesh), _call(mesh))


def _call(mesh: DeviceMesh) -> str:
    """Return the call that makes a mesh."""
    shape = tuple(mesh.mesh.shape)
    names = "" if mesh.mesh_dim_names is None else f", mesh_dim_names={tuple(mesh.mesh_dim_names)}"
    return f"dist.device_mesh.init_device_mesh({mesh.device_type!r}, {shape}{names})"


def _describe_sharded_model(name: str, value: Any, meshes: Mapping[str, DeviceMesh]) -> _Line | None:
    """Return the line for a model that `fully_shard` has sharded; None for any other variable."""
    if not is_a(value, torch_private.if_imported(*torch_private.FSDP_MODULE)):
        return None
    mesh = _model_mesh(value)
    if mesh is None or not (groups := _mesh_groups(mesh)):
        return None
    line = (
        f"{name} = fully_shard({name}, mesh={_mesh_expression(mesh, meshes)}) of the model built again; "
        f"{name}.parameters() still holds this rank's shards, to_local() gives them"
    )
    return line, [*groups, *_stand_in_if_not_resettable()]


def _model_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which a model is sharded; None if it has none."""
    for tensor in walk_tensors(model):
        if (mesh := _dtensor_mesh(tensor)) is not None:
            return mesh
    # During a step the parameters may be gathered.
    for module in walk_modules(model):
        if (mesh := torch_private.mesh_of_sharded(module)) is not None:
            return mesh
    return None


def _describe_tensor(name: str, value: Any, meshes: Mapping[str, DeviceMesh]) -> _Line | None:
    """Return the line for a DTensor; None for any other variable."""
    mesh = _dtensor_mesh(value)
    if mesh is None or not (groups := _mesh_groups(mesh)):
        return None
    from torch.distributed.tensor import Partial

    made_on = _mesh_expression(mesh, meshes)
    size = f"shape={tuple(value.shape)}, stride={tuple(value.stride())}"
    # The repr of a Partial has its operation without quotes.
    placements = ", ".join(
        f"Partial({place.reduce_op!r})" if isinstance(place, Partial) else repr(place)
        for place in value.placements
    )
    return f"{name} = DTensor.from_local({name}.to_local(), {made_on}, [{placements}], {size})", groups


def _describe_optimizer(name: str, value: Any) -> _Line | None:
    """Return the line for an optimizer of DTensors; None for any other variable."""
    if not is_a(value, torch.optim.Optimizer):
        return None
    parameters, _ = optimizer_parameters(value)
    meshes = [mesh for tensor in parameters or [] if (mesh := _dtensor_mesh(tensor)) is not None]
    if not (groups := [group for mesh in meshes for group in _mesh_groups(mesh)]):
        return None
    return f"{name} = torch.optim.{type(value).__name__}(...) over the parameters of the model made again", [
        *groups,
        *_stand_in_if_not_resettable(),
    ]


def _stand_in_if_not_resettable() -> list[None]:
    """Return a stand-in for a group that is never made again if this version of torch cannot reset a sharded
    model after a step that was cut short: the model then counts as lost. Else return nothing."""
    return [] if torch_private.can_reset_sharded() else [None]


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> tuple[list[Any] | None, str]:
    """Return (the parameters of an optimizer, ''), or (None, the error) if they cannot be read: a person's
    class may compute them by its own code."""
    return run_limited(
        optimizer, lambda: [parameter for group in optimizer.param_groups for parameter in group["params"]]
    )


def _dtensor_mesh(value: Any) -> DeviceMesh | None:
    """Return the mesh over which a DTensor is distributed; None for any other value."""
    if not is_a(value, torch_private.if_imported(*torch_private.DTENSOR)):
        return None
    mesh = value.device_mesh
    assert isinstance(mesh, DeviceMesh)
    return mesh


def _mesh_groups(mesh: DeviceMesh) -> list[Any]:
    """Return the process groups of a mesh; none if one of them has ended."""
    try:
        groups = mesh.get_all_groups()
    except (RuntimeError, ValueError, KeyError):  # torch no longer has its groups
        return []
    living = torch_private.living_groups()
    return groups if all(group in living for group in groups) else []
