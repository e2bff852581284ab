"""Describe and rebuild values that are spread over the ranks: DTensors, meshes and models under FSDP.

Each rank writes its own part of a DTensor, and the parts are not exchanged, neither for saving nor for
loading. On another number of ranks, each reads its part from the files of all ranks that have some of it.
Only a mesh of several dimensions needs groups of its own, which the ranks form together while they load.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import ceil, prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbgpu.engine.group import torch_private
from nbgpu.serialization import unpicklable

_OF_FSDP, _OF_TENSOR_PARALLELISM = "torch.distributed.fsdp", "torch.distributed.tensor"
_BOOKKEEPING = ("__composable_api_", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Beginnings of the names of attributes that `fully_shard` gives to modules, and gives them again."""
_SETTINGS = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "reshard_after_backward": True,
    "gradient_divide_factor": None,
    "unshard_async_op": False,
    "unshard_in_backward": True,
    "force_sum_reduction_for_comms": False,
}
"""The settings that the methods `set_...` of a model under FSDP change, with their initial values."""


class Describing(Protocol):
    """The part of a Describer that is needed here."""

    nodes: list[dict[str, Any]]
    notes: list[str]

    def described(self, value: Any, path: str) -> Any:
        """Return a value as JSON."""


class Unsupported(unpicklable.Explained):
    """A value, or a part of one, cannot be described or rebuilt; the message has the reason."""


def has_description(value: Any) -> bool:
    """Return whether a value is a DTensor, a DeviceMesh or a model under `fully_shard`."""
    return isinstance(value, DeviceMesh) or _is_dtensor(value) or _is_fsdp(value)


def described(describer: Describing, value: Any, path: str) -> dict[str, Any] | None:
    """Return the description, a node in a rank's files, of a DTensor, a mesh or a model under FSDP; None for
    other values.

    Args:
        describer: describes the values in it.
        value: the value.
        path: the expression that leads to the value, such as 'model.weight'.

    Raises:
        Unsupported: the value cannot be described.
    """
    if isinstance(value, DeviceMesh):
        return _describe_mesh(value)
    if _is_dtensor(value):
        return _describe_dtensor(describer, value, path)
    if _is_fsdp(value):
        return _describe_fsdp(describer, value, path)
    if isinstance(value, nn.Module) and any(_hook_ids(value, _OF_TENSOR_PARALLELISM)):
        raise Unsupported(
            "it has hooks of parallelize_module or distribute_module. Save a variable with its state_dict(), whose "
            "tensors can be saved, and make the model again after loading",
            about=value,
        )
    return None


def own_attributes(value: Any, attributes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the attributes of an object without those that `fully_shard` has added: it adds them again after
    loading."""
    if not isinstance(value, nn.Module) or "torch.distributed.fsdp" not in sys.modules:
        return dict(attributes)
    added_hooks = set(_hook_ids(value, _OF_FSDP))
    kept = {}
    for name, part in attributes.items():
        if str(name).startswith(_BOOKKEEPING):
            continue
        if "_hooks" in str(name) and isinstance(part, dict) and added_hooks & part.keys():
            part = type(part)({key: hook for key, hook in part.items() if key not in added_hooks})
        kept[name] = part
    return kept


def _describe_mesh(mesh: Any) -> dict[str, Any]:
    """Return the node of a mesh over all ranks in their order; Unsupported for other meshes."""
    if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise Unsupported(
            "it does not span all ranks in their order. Make it again after loading, with the cell that made it",
            about=mesh,
        )
    names = mesh.mesh_dim_names
    return {
        "is": "mesh",
        "device": mesh.device_type,
        "shape": list(mesh.mesh.shape),
        "names": None if names is None else list(names),
    }


def _describe_dtensor(describer: Describing, value: Any, path: str) -> dict[str, Any]:
    """Return the node of a DTensor: this rank's part, the mesh, the placements, and shape and strides of the
    whole."""
    local = value.detach().to_local()
    if local.device.type != value.device_mesh.device_type:
        raise Unsupported(
            f"its part is on {local.device.type}, and its mesh on {value.device_mesh.device_type}",
            about=value,
        )
    placements = [_placement(placement, value) for placement in value.placements]
    part = describer.described(local, path)
    if any(placement[0] == "shard" for placement in placements):
        describer.nodes[part["#"]]["is_part"] = True
    return {
        "is": "dtensor",
        "path": path,
        "local": part,
        "mesh": describer.described(value.device_mesh, f"{path}.device_mesh"),
        "placements": placements,
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "is_parameter": isinstance(value, nn.Parameter),
        "requires_grad": value.requires_grad,
        "grad": describer.described(value.grad if value.is_leaf else None, f"{path}.grad"),
    }


def _placement(placement: Any, owner: Any) -> list[Any]:
    """Return a placement as JSON: how a DTensor lies on the ranks along one dimension of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if type(placement) is Shard:
        return ["shard", placement.dim]
    if type(placement) is Replicate:
        return ["replicate"]
    if type(placement) is Partial:
        return ["partial", placement.reduce_op]
    raise Unsupported(f"its placement is {placement}", about=owner)


def _describe_fsdp(describer: Describing, module: Any, path: str) -> dict[str, Any]:
    """Return the node of a model under `fully_shard`: its class before, its attributes, and the settings of
    FSDP."""
    sharding = torch_private.fsdp_sharding(module)
    if sharding is None:
        raise Unsupported(
            "fully_shard was given several modules at once, or several meshes, for it. Save a variable with its "
            "state_dict(), whose tensors can be saved, and make the model again after loading",
            about=module,
        )
    # After a forward pass without a backward pass the modules have the whole parameters, and the optimizer
    # has the parts.
    module.reshard()
    if changed := [
        name for name, first in _SETTINGS.items() if getattr(sharding.group, name, first) != first
    ]:
        describer.notes.append(
            f"{path}: what was set with its set_... methods is not saved ({', '.join(changed)}). "
            "Set it again after loading"
        )
    attributes = own_attributes(module, vars(module))
    # The paths make the tensors' names in the file those of state_dict().
    parameters = {
        name: describer.described(module.get_parameter(name), f"{path}.{name}") for name in sharding.names
    }
    return {
        "is": "fsdp",
        "class": describer.described(sharding.original, f"{path}.__class__"),
        "parameters": [[name, part] for name, part in parameters.items()],
        "mesh": describer.described(sharding.mesh, f"{path}.mesh"),
        "reshard_after_forward": sharding.reshard_after_forward,
        "mp_policy": describer.described(asdict(sharding.mp_policy), f"{path}.mp_policy"),
        "offload": None if sharding.pin_memory is None else {"pin_memory": sharding.pin_memory},
        "attributes": attributes,
    }


def rebuilt_mesh(node: Mapping[str, Any], saved_by: int) -> Any:
    """Return the mesh of a description. A mesh of one dimension spans as many ranks as there are now; one of
    several needs the number of ranks that saved it.

    Args:
        node: the description.
        saved_by: the number of ranks that saved it.
    """
    world_size = dist.get_world_size()
    shape = tuple(node["shape"])
    if len(shape) == 1:
        shape = (world_size,)
    elif saved_by != world_size:
        in_words = " x ".join(map(str, shape))
        raise Unsupported(f"its mesh is {in_words}, for {saved_by} ranks and not for {world_size}")
    names = None if node["names"] is None else tuple(node["names"])
    return init_device_mesh(node["device"], shape, mesh_dim_names=names)


def rebuilt_dtensor(node: Mapping[str, Any], local: Tensor, mesh: Any, grad: Any) -> Any:
    """Return the DTensor of a description. No collective.

    Args:
        node: the description.
        local: this rank's part.
        mesh: the DTensor's mesh.
        grad: the DTensor's gradient; None for none.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    kinds: Mapping[str, Callable[..., Any]] = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    tensor: Any = DTensor.from_local(
        local.detach(),
        mesh,
        [kinds[kind](*arguments) for kind, *arguments in node["placements"]],
        run_check=False,
        shape=torch.Size(node["shape"]),
        stride=tuple(node["stride"]),
    )
    if node["is_parameter"]:
        tensor = nn.Parameter(tensor, node["requires_grad"])
    else:
        tensor.requires_grad_(node["requires_grad"])
    if grad is not None:
        tensor.grad = grad
    return tensor


def reshard(
    readers: Sequence[Callable[[str], Tensor | None]], node: Mapping[str, Any], rank: int, world_size: int
) -> Tensor:
    """Return a rank's part of a DTensor that another number of ranks has saved, put together from the
    overlapping pieces of the saved parts.

    Args:
        readers: for each rank that has saved, a function that returns its part of the DTensor with a path, or
            None if the rank has no such DTensor.
        node: the DTensor's description.
        rank: the rank.
        world_size: the number of ranks now.

    Raises:
        Unsupported: the DTensor is sharded in a way that does not fit another number of ranks.
    """
    if node["placements"] == [["replicate"]]:
        part = readers[0](node["path"])
        assert part is not None
        return part
    shape: list[int] = node["shape"]
    contiguous = [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    ((kind, *arguments), *others) = node["placements"]
    if kind != "shard" or others or (node["stride"] != contiguous and 0 not in shape):
        raise Unsupported(
            f"{node['path']} was saved by {len(readers)} ranks, is neither cut along one dimension nor equal on "
            f"all of them, so that another number of ranks ({world_size}) cannot have it"
        )
    (dimension,) = arguments
    length = shape[dimension]
    begin, end = _range(length, rank, world_size)
    pieces: list[Tensor] = []
    for saved_by, read_part in enumerate(readers):
        first, last = _range(length, saved_by, len(readers))
        overlap_begin, overlap_end = max(begin, first), min(end, last)
        num_overlapping = max(0, overlap_end - overlap_begin)
        # A rank whose own part is empty takes an empty piece, which has the dtype and the device.
        if num_overlapping or (begin >= end and not pieces):
            part = read_part(node["path"])
            if part is None or part.shape[dimension] != last - first:
                raise Unsupported(
                    f"the part of {node['path']} that rank {saved_by} saved is not the one needed"
                )
            offset = overlap_begin - first if num_overlapping else 0
            pieces.append(part.narrow(dimension, offset, num_overlapping))
    return torch.cat(pieces, dimension).contiguous()


def shard_again(
    module: Any,
    parameters: Mapping[str, Any],
    node: Mapping[str, Any],
    mesh: Any,
    mp_policy: Mapping[str, Any],
) -> None:
    """Apply `fully_shard` to a rebuilt module, with the rebuilt DTensors as its parameters.

    Args:
        module: the module as it was before `fully_shard`; its submodules are sharded already.
        parameters: the DTensors of the parameters that FSDP manages, by name.
        node: the description.
        mesh: the mesh.
        mp_policy: the arguments of the mixed precision policy.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )
    from torch.distributed.tensor import Shard

    # FSDP shards parameters without memory, and adopts the saved parts afterwards, so that no rank ever holds
    # the whole ones.
    outlines = {
        id(tensor): nn.Parameter(
            torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad
        )
        for tensor in parameters.values()
    }
    for name, tensor in parameters.items():
        owner, _, own_name = name.rpartition(".")
        module.get_submodule(owner)._parameters[own_name] = outlines[id(tensor)]
    dimensions = {
        outlines[id(tensor)]: placement.dim
        for tensor in parameters.values()
        for placement in tensor.placements
        if isinstance(placement, Shard)
    }
    offload = node["offload"]
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": node["reshard_after_forward"],
        "shard_placement_fn": lambda parameter: Shard(dimensions[parameter]),
        "mp_policy": MixedPrecisionPolicy(**mp_policy),
        "offload_policy": OffloadPolicy() if offload is None else CPUOffloadPolicy(**offload),
    }
    if ignored := {parameter for parameter in module.parameters() if parameter not in dimensions}:
        arguments["ignored_params"] = ignored
    # Older versions of torch have fewer arguments.
    accepted = inspect.signature(fully_shard).parameters
    fully_shard(module, **{name: value for name, value in arguments.items() if name in accepted})
    # The module's own load_state_dict may be the person's.
    nn.Module.load_state_dict(module, dict(parameters), strict=False, assign=True)


def _range(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (first, last + 1) of the indices that a rank has along a sharded dimension of this length, as
    torch.chunk divides it."""
    size = ceil(length / world_size)
    return min(rank * size, length), min((rank + 1) * size, length)


def _hook_ids(module: nn.Module, library: str) -> Iterator[int]:
    """Yield the ids of a module's hooks that a package of torch has registered.

    Args:
        module: the module.
        library: the beginning of the name of the package.
    """
    for name, hooks in vars(module).items():
        if "_hooks" in name and isinstance(hooks, dict):
            yield from (
                number for number, hook in hooks.items() if _defining_module(hook).startswith(library)
            )


def _defining_module(hook: Any) -> str:
    """Return the name of the Python module that defines a hook; wrappers around the hook do not count."""
    while True:
        if isinstance(hook, partial):
            hook = hook.func
        elif type(hook).__name__ == "_WrappedHook":  # torch's, around hooks of state_dict
            hook = hook.hook
        else:
            return getattr(hook, "__module__", None) or ""


def _is_dtensor(value: Any) -> bool:
    return type(value) in torch_private.if_imported(*torch_private.DTENSOR)


def _is_fsdp(value: Any) -> bool:
    return isinstance(value, torch_private.if_imported(*torch_private.FSDP_MODULE))
