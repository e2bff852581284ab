"""Private names of torch.distributed, each in a function that says what nbgpu needs it for.

Where a version of torch lacks a name, the function does less, and says so in its docstring; none raises for
that.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import DebugLevel, Logger, get_debug_level, set_debug_level_from_env
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""The functions that dump the flight recorder, of builds with NCCL and of those without. They give JSON,
because what is unpickled can run anything."""

ALL_GATHER, REDUCE_SCATTER = "_allgather_base", "_reduce_scatter_base"
"""The methods of ProcessGroup that older versions of torch call for tensors in one piece."""

BROADCAST_BUFFERS = "_broadcast_coalesced"
"""The function of torch.distributed with which DDP broadcasts its buffers and parameters."""


def living_groups() -> list[Any]:
    """Return the process groups that torch knows now."""
    return list(distributed_c10d._world.pg_map)


def count_groups_from(number: int) -> None:
    """Let the next group have this number.

    torch numbers its groups, and ranks meet under the number, which is the group's name. It keeps that of a
    forming that failed on one rank only, which would never meet the others again.
    """
    distributed_c10d._world.group_count = number


def num_groups_made() -> int:
    """Return the number of the next group."""
    number: int = distributed_c10d._world.group_count
    return number


def make_group(arguments: Mapping[str, Any]) -> Any:
    """Make a group, of which this rank is a member, with the arguments that `wrap_making_of_groups` has seen,
    in the store of the default group that there is now."""
    assert dist.group.WORLD is not None, "there is a default group"
    _, store = distributed_c10d._world.pg_map[dist.group.WORLD]
    made, _ = distributed_c10d._new_process_group_helper(**{**arguments, "store": store})
    ranks = arguments["global_ranks_in_group"]
    distributed_c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made


def wrap_making_of_groups(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the one function that makes every group (`new_group`, DeviceMesh, FSDP) by `wrap` of it."""
    make_group = distributed_c10d._new_process_group_helper
    distributed_c10d._new_process_group_helper = functools.wraps(make_group)(wrap(make_group))


def wrap_broadcast_coalesced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function with which DDP broadcasts its buffers and parameters by `wrap` of it."""
    dist._broadcast_coalesced = wrap(dist._broadcast_coalesced)  # type: ignore[attr-defined]


def replace_builtin_hooks(register: Callable[[DistributedDataParallel, Any], None]) -> None:
    """Have DDP call `register` with itself and a `dist.BuiltinCommHookType` in place of registering a hook in
    C++."""
    DistributedDataParallel._register_builtin_comm_hook = register  # type: ignore[method-assign]


def builtin_hooks_registrar() -> Callable[[DistributedDataParallel, Any], None]:
    """Return the function that `replace_builtin_hooks` replaces."""
    registrar: Callable[[DistributedDataParallel, Any], None]
    registrar = DistributedDataParallel._register_builtin_comm_hook
    return registrar


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a DDP object has a hook in Python."""
    return bool(ddp._comm_hooks)


def forget_refused_hook(ddp: DistributedDataParallel) -> None:
    """Remove the newest hook from a DDP object's list, after C++ has refused it."""
    ddp._comm_hooks.pop()


def can_change_timeout() -> bool:
    """Whether the timeout of a group can be changed once it is made."""
    return hasattr(distributed_c10d, "_set_pg_timeout") and not compares_collectives()


def change_timeout(timeout: timedelta, group: Any = None) -> None:
    """Change the timeout of a group, by default the default one. Call where `can_change_timeout`."""
    distributed_c10d._set_pg_timeout(timeout, group)


def can_reconfigure(group: Any) -> bool:
    """Whether a group can be formed again in place, which takes torch 2.14."""
    return hasattr(dist, "_reconfigure") and bool(group.supports_reconfigure)


def reconfigure_handle(group: Any) -> str:
    """Return what the other ranks need of this one to form the group again in place."""
    handle: str = group.get_reconfigure_handle()
    return handle


def reconfigure(group: Any, number: int, handles: Sequence[str], timeout: timedelta) -> None:
    """Form a group again in place. A collective over its ranks.

    Args:
        group: one that can be reconfigured.
        number: of this forming, unique for the group.
        handles: what `reconfigure_handle` gave on each rank, in order.
        timeout: the time for the ranks to connect.
    """
    dist._reconfigure(number, list(handles), group, timeout).wait()  # type: ignore[attr-defined]


def num_collectives(group: Any) -> int:
    """Return how many collectives this rank has begun in a group."""
    number: int = group._get_sequence_number_for_group()
    return number


def abort_nccl(group: Any) -> None:
    """End the collectives of a group on GPUs; do nothing for others, which have no such backend."""
    with suppress(RuntimeError):
        backend = group._get_backend(torch.device("cuda"))
        if hasattr(backend, "abort"):
            backend.abort()


def compares_collectives() -> bool:
    """Whether torch compares the ranks' collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    is_detailed: bool = get_debug_level() == DebugLevel.DETAIL
    return is_detailed


def read_debug_level() -> None:
    """Read TORCH_DISTRIBUTED_DEBUG again, for groups that are made from now on."""
    set_debug_level_from_env()


class LoggerWithoutOptions(Logger):
    """DDP's logger without what it reads from the group's backend."""

    def set_construction_data_and_log(self, *_: Any) -> None:
        """Log nothing."""


def flight_recording() -> bytes | None:
    """Return torch's record of the last collectives as JSON; None before torch 2.9 where it was built without
    NCCL.

    A build with NCCL has two recorders, one for NCCL and one for all other backends, and the groups of a rank
    may be in both.
    """
    recordings = [
        json.loads(getattr(_distributed_c10d, name)()) for name in _DUMPS if hasattr(_distributed_c10d, name)
    ]
    if not recordings:
        return None
    # Each entry once, should two functions give the same recorder's.
    entries = {json.dumps(entry): entry for recording in recordings for entry in recording.get("entries", ())}
    together = {key: value for recording in reversed(recordings) for key, value in recording.items()}
    together["entries"] = sorted(entries.values(), key=lambda entry: int(entry.get("time_created_ns", 0)))
    return json.dumps(together).encode()


def root_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh that this one is a part of; None for a whole one, and where this torch cannot say
    it."""
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
    elif resources := getattr(device_mesh, "_mesh_resources", None):  # an older torch
        root = resources.get_root_mesh(mesh)
    else:
        # A line that makes the part from its own ranks is as good, and better than a group that is not formed
        # again.
        return None
    assert isinstance(root, DeviceMesh)
    return None if root is mesh or root == mesh else root


def mesh_of_sharded(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh that FSDP has sharded a module's parameters over; None for other modules."""
    state: Any = getattr(module, "_get_fsdp_state", None)
    if state is None or state()._fsdp_param_group is None:
        return None
    mesh = state()._fsdp_param_group.mesh_info.mesh
    assert isinstance(mesh, DeviceMesh)
    return mesh


def can_reset_sharded() -> bool:
    """Whether a sharded model can go on after a step that was cut short, which takes torch 2.13."""
    return hasattr(import_module("torch.distributed.fsdp").FSDPModule, "reset_iter_state")


def reset_sharded(module: nn.Module) -> None:
    """Have a sharded model forget a step that was cut short, and free the weights that it gathered.

    Nothing happens for a part of such a model, for one that has had no step, and where this torch cannot
    reset it.
    """
    state = module._get_fsdp_state()  # type: ignore[operator]
    if state._is_root is not True or not can_reset_sharded():
        return
    for part in state._state_ctx.all_states:
        for group in part._fsdp_param_groups:
            # FSDP would wait for what it gathers, in a group that has ended.
            group._all_gather_result = None
    module.reset_iter_state()  # type: ignore[operator]


def forget_layouts() -> None:
    """Have DTensor work out again how results are cut, which it keeps with the mesh of the first operands:
    an equal mesh that was made later would be taken for one whose groups have ended.

    Nothing happens where this torch cannot forget them.
    """
    # Without this import there is no DTensor.
    if "torch.distributed.tensor" in sys.modules:
        debug = import_module("torch.distributed.tensor.debug")
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def num_changes(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or what it is a view of, was changed in place."""
    return tensor._version


@dataclass(frozen=True)
class Sharding:
    """How FSDP shards a module."""

    original: type
    """The class that the module had before."""
    mesh: DeviceMesh | None
    """None for a module without parameters of its own to shard."""
    names: Sequence[str]
    """The parameters' names, as in the module's state_dict(); those that are tied have several."""
    reshard_after_forward: bool | int | None
    mp_policy: Any
    pin_memory: bool | None
    """For weights that wait in the CPU's memory: whether that is pinned. None for others."""
    group: Any
    """The object with its other settings; None without parameters."""


def sharding_of(module: nn.Module) -> Sharding | None:
    """Return how `fully_shard` shards a module; None where it was given several modules at once, several
    meshes or a part of a larger mesh."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13 there was one at most
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    if len(getattr(state, "_modules", (module,))) > 1 or len(groups) > 1:
        return None
    original = type(module).__bases__[1]
    after_forward = None if getattr(state, "_auto_reshard_after_forward", False) else True
    if not groups:
        return Sharding(original, None, [], after_forward, state._mp_policy, None, None)
    (group,) = groups
    if getattr(group.mesh_info, "is_spmd_mesh", False) or not hasattr(group.mesh_info, "shard_mesh_size"):
        return None
    if after_forward is not None:
        resharded = group.post_forward_mesh_info
        if resharded is None:
            after_forward = False
        elif resharded is not group.mesh_info:
            after_forward = resharded.shard_mesh_size
    prefixes = {below: f"{name}." if name else "" for name, below in module.named_modules()}
    names = []
    for parameter in group.fsdp_params:
        info = parameter._module_info
        owners = [info.module, *info.shared_modules]
        own_names = [info.param_name, *info.shared_param_names]
        names += [prefixes[owner] + name for owner, name in zip(owners, own_names, strict=True)]
    pin_memory = getattr(group.offload_policy, "pin_memory", None)
    return Sharding(original, group.mesh_info.mesh, names, after_forward, group.mp_policy, pin_memory, group)


def init_fake_group(rank: int, world_size: int) -> None:
    """Form a group in which every collective returns at once and does nothing: the stand-in of torch's own
    tests."""
    fake = import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake.FakeStore())


def nccl_model(gpu: str, gpus_per_node: int, has_nvlink: bool) -> Callable[[str, int, int], float] | None:
    """Return torch's model of NCCL: seconds for an operation, its bytes, and the number of ranks.

    torch asks the machine at hand for its GPUs. The model here is a second instance of torch's module that is
    told of other ones; the first one stays as it is. None where this version of torch lacks the model (before
    2.13 it knew one kind of node only).

    Args:
        gpu: 'V100', 'A100', 'H100' or 'B200'.
        gpus_per_node: 1 or more.
        has_nvlink: whether NVLink joins the GPUs of a node, else PCIe.
    """
    original = find_spec("torch._inductor.comm_analysis")
    assert original is not None
    assert original.origin is not None
    spec = spec_from_file_location("torch._inductor.comm_analysis_for_nbgpu", original.origin)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    names = ("estimate_nccl_collective_runtime_impl", "_has_nvlink", "get_gpu_type", "NVIDIA_GPU_TYPE")
    if not all(hasattr(module, name) for name in names):
        return None
    generations = {"V100": "VOLTA", "A100": "AMPERE", "H100": "HOPPER", "B200": "BLACKWELL"}
    kind = module.NVIDIA_GPU_TYPE[generations[gpu]]
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: gpus_per_node)
    module.torch = SimpleNamespace(cuda=cuda, _inductor=torch._inductor)
    module.get_gpu_type = lambda: kind
    module._has_nvlink = lambda: has_nvlink
    operations = {
        "all_reduce": module.NCCL_COLL.ALL_REDUCE,
        "all_gather": module.NCCL_COLL.ALL_GATHER,
        "reduce_scatter": module.NCCL_COLL.REDUCE_SCATTER,
    }

    def seconds(operation: str, num_bytes: int, ranks: int) -> float:
        milliseconds = module.estimate_nccl_collective_runtime_impl(num_bytes, ranks, operations[operation])
        return float(milliseconds) / 1000

    return seconds
