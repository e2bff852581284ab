"""Private names of torch.distributed, each in a function that says what nbgpu needs it for.

Where a function can do without a name that a version of torch lacks, it does less, and its docstring says so.
"""

from __future__ import annotations

import functools
import json
import os
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
from torch.distributed import constants, device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""The functions that dump the flight recorder, of builds with NCCL and of those without. They give JSON,
because what is unpickled can run anything."""

_ABORTS_TOGETHER = (2, 22)
"""The first version of NCCL that aborts several communicators at once."""

ALL_GATHER, REDUCE_SCATTER = "_allgather_base", "_reduce_scatter_base"
"""The methods of ProcessGroup that older versions of torch call for tensors in one piece."""

BROADCAST_BUFFERS = "_broadcast_coalesced"
"""The function of torch.distributed with which DDP broadcasts its buffers and parameters."""


def living_groups() -> list[Any]:
    """Return the process groups that torch knows now."""
    return list(distributed_c10d._world.pg_map)


def set_group_count(number: int) -> None:
    """Set the number of the next group.

    torch counts its groups, and the number is the name under which the ranks of a group meet. A forming that
    failed on one rank only leaves the ranks with different counts, so that they would never meet again.
    """
    distributed_c10d._world.group_count = number


def group_count() -> int:
    """Return torch's count of its groups, which is the number of the next one."""
    number: int = distributed_c10d._world.group_count
    return number


def make_group(arguments: Mapping[str, Any]) -> Any:
    """Make a group that has this rank as a member once more.

    `new_group` is not called, because it would choose another name, and needs every rank to take part.

    Args:
        arguments: those of torch's `_new_process_group_helper` at the first time (`wrap_making_of_groups`).
            The store of the present default group replaces theirs.
    """
    assert dist.group.WORLD is not None, "there is a default group"
    _, store = distributed_c10d._world.pg_map[dist.group.WORLD]
    made, _ = distributed_c10d._new_process_group_helper(**{**arguments, "store": store})
    # The helper leaves to its callers the table that translates global ranks into the group's.
    ranks = arguments["global_ranks_in_group"]
    distributed_c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made


def wrap_making_of_groups(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the one function that makes every group (`new_group`, DeviceMesh, FSDP)."""
    make_group = distributed_c10d._new_process_group_helper
    distributed_c10d._new_process_group_helper = functools.wraps(make_group)(wrap(make_group))


def wrap_broadcast_coalesced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function with which DDP broadcasts its buffers and parameters."""
    dist._broadcast_coalesced = wrap(dist._broadcast_coalesced)  # type: ignore[attr-defined]


def replace_builtin_hooks(register: Callable[[DistributedDataParallel, Any], None]) -> None:
    """Replace the method of DDP that registers a hook in C++ by `register`, which gets the DDP object and a
    `dist.BuiltinCommHookType`."""
    DistributedDataParallel._register_builtin_comm_hook = register  # type: ignore[method-assign]


def builtin_hooks_registrar() -> Callable[[DistributedDataParallel, Any], None]:
    """Return the function that `replace_builtin_hooks` replaces."""
    registrar: Callable[[DistributedDataParallel, Any], None]
    registrar = DistributedDataParallel._register_builtin_comm_hook
    return registrar


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Return whether a DDP object has a hook in Python."""
    return bool(ddp._comm_hooks)


def forget_refused_hook(ddp: DistributedDataParallel) -> None:
    """Remove the newest hook from a DDP object's list, after C++ has refused it."""
    ddp._comm_hooks.pop()


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Have DDP rebuild its buckets now, and not before the next forward pass: it orders the parameters as the
    first backward pass has computed their gradients. A collective."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True


def bucket_order(ddp: DistributedDataParallel) -> list[int]:
    """Return the final order of the parameters in DDP's buckets, as positions in the order of the module.

    The order is saved with the state of a run, and `initialise_ddp` gives it to a later DDP object, so that
    the gradients are added up in the same sequence: another sequence changes the last bit of a step.

    Empty where DDP keeps its first order, as with find_unused_parameters, and where the device has no memory
    left for the copies of the buckets from which the order is read.
    """
    if not ddp._has_rebuilt_buckets:
        return []
    parameters, _ = DistributedDataParallel._build_params_for_reducer(ddp)
    positions = {id(parameter): position for position, parameter in enumerate(parameters)}
    try:
        # The only function of the reducer that shows its buckets: as new ones, filled with zeros.
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
    except torch.OutOfMemoryError:
        return []
    return [positions[id(parameter)] for bucket in buckets for parameter in bucket.parameters()]


def initialise_ddp(
    ddp: DistributedDataParallel, module: nn.Module, order: Sequence[int], **arguments: Any
) -> None:
    """Initialise a DDP object whose buckets have the order of an earlier object from the first step on.

    The order decides in which sequence the gradients of the ranks are added up, and with three or more ranks
    another sequence gives another last bit.

    Args:
        ddp: a new object, or one to initialise again.
        module: the module of both objects.
        order: the `bucket_order` of the earlier object. An empty one, or one of other parameters, leaves the
            order to DDP.
        arguments: those of DDP.
    """
    is_in_order = False

    def build_in_order() -> tuple[list[Any], list[bool]]:
        """Return DDP's parameters and whether their gradients are sparse, in the given order if the order
        fits them."""
        nonlocal is_in_order
        parameters, expect_sparse = DistributedDataParallel._build_params_for_reducer(ddp)
        is_in_order = sorted(order) == list(range(len(parameters))) and not ddp.find_unused_parameters
        if not is_in_order:
            return parameters, expect_sparse
        return [parameters[n] for n in order], [expect_sparse[n] for n in order]

    # DDP's constructor calls this method for the list of parameters that it fills the buckets with. An entry
    # in the object's `__dict__` takes the place of the method.
    vars(ddp)["_build_params_for_reducer"] = build_in_order
    try:
        ddp.__init__(module, **arguments)  # type: ignore[misc]
    finally:
        del vars(ddp)["_build_params_for_reducer"]
    if is_in_order:
        # DDP takes this for the order of a first backward pass, and its next forward pass fills the buckets
        # in it.
        ddp.reducer._push_all_rebuilt_params()
        ddp._has_rebuilt_buckets = True


def can_change_timeout() -> bool:
    """Return whether the timeout of a group can be changed once it is made."""
    return hasattr(distributed_c10d, "_set_pg_timeout") and not compares_collectives()


def change_timeout(timeout: timedelta, group: Any = None) -> None:
    """Change the timeout of a group, by default the default one. Call where `can_change_timeout`."""
    distributed_c10d._set_pg_timeout(timeout, group)


def can_reconfigure(group: Any) -> bool:
    """Return whether a group can be formed again in place, which takes torch 2.14, and gloo or nccl2."""
    return hasattr(dist, "_reconfigure") and all(backend.supports_reconfigure for backend in _backends(group))


def uses_nccl2() -> bool:
    """Return whether groups over NCCL use torch's second backend for it, as the engines' environment variable
    TORCH_DIST_USE_NCCL2 asks."""
    return os.environ.get("TORCH_DIST_USE_NCCL2") == "1" and hasattr(_distributed_c10d, "ProcessGroupNCCL2")


def reconfigure_handle(group: Any) -> str:
    """Return the addresses of a group's backends on this rank, as JSON, at which the other ranks reach this
    rank when the group is formed again in place."""
    return json.dumps([backend.get_reconfigure_handle() for backend in _backends(group)])


def _backends(group: Any) -> list[Any]:
    """Return a group's backends, in the same order on all ranks.

    A group on GPUs has gloo beside NCCL, and torch reconfigures one backend at a time.
    """
    backends: list[Any] = []
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError):  # the group has none for these tensors
            backend = group._get_backend(torch.device(kind))
            if not any(backend is other for other in backends):
                backends.append(backend)
    return backends


def reconfigure(group: Any, number: int, handles: Sequence[str], timeout: timedelta) -> None:
    """Form a group again in place. A collective over its ranks.

    Args:
        group: one that can be reconfigured.
        number: identifies this forming; no two of a group have the same.
        handles: the `reconfigure_handle` of each rank, in order of rank.
        timeout: the time for the ranks to connect.
    """
    handles_by_rank = [json.loads(handle) for handle in handles]
    for index, backend in enumerate(_backends(group)):
        options = distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]
        options.uuid, options.timeout = number, timeout
        options.handles = [handles_of_rank[index] for handles_of_rank in handles_by_rank]
        backend.reconfigure(options).wait()


def num_collectives(group: Any) -> int:
    """Return how many collectives this rank has begun in a group."""
    number: int = group._get_sequence_number_for_group()
    return number


def group_name(group: Any) -> str:
    """Return a group's name, which is the same on all its ranks."""
    name: str = distributed_c10d._world.pg_names[group]
    return name


def group_ranks(group_name: str) -> list[int]:
    """Return the global ranks of the members of a group, by the group's name; none for a group that has
    ended."""
    world = distributed_c10d._world
    groups = [group for group, name in world.pg_names.items() if name == group_name]
    return [rank for group in groups for rank in world.pg_group_ranks[group]]


def default_timeouts() -> tuple[timedelta | None, ...]:
    """Return the timeouts that torch gives to groups that are made without one: of gloo, and of NCCL."""
    return constants.default_pg_timeout, constants.default_pg_nccl_timeout


def records_gloo() -> bool:
    """Return whether the flight recorder has gloo's collectives; it has since torch 2.9."""
    return hasattr(_distributed_c10d, "_dump_fr_trace_json")


def unfinished_groups() -> dict[str, str]:
    """Return the number of the collective that ended last, for each group in which a later one has not ended.

    The key of a group is the name of its flight recorder and the number that the recorder gives the group.
    """
    return {
        f"{name}/{group}": status["last_completed_collective"]
        for name, recording in _recordings(includeCollectives=False).items()
        for group, status in recording.get("pg_status", {}).items()
        if status["last_completed_collective"] != status["last_enqueued_collective"]
    }


@dataclass(frozen=True)
class CollectiveInFlight:
    """A collective that this rank has begun and that has not ended."""

    group: str
    """The name of its group."""
    is_default_group: bool
    backend: str
    """'gloo' or 'nccl'."""
    operation: str
    number: int
    """Counts the collectives of its group on this rank, from 1, or its sends and receives."""
    is_p2p: bool
    """Whether it is a send or a receive."""
    shapes: str
    """The shapes and dtypes of its inputs, as '[3, 4] Float'."""

    def describe(self) -> str:
        """Return a text such as 'all_reduce of [3, 4] Float, collective 7 of the default group'."""
        inputs = f" of {self.shapes}" if self.shapes else ""
        kind = "transfer" if self.is_p2p else "collective"
        group = "the default group" if self.is_default_group else f"the group {self.group!r}"
        return f"{self.operation}{inputs}, {kind} {self.number} of {group}"


def collectives_in_flight() -> dict[str, CollectiveInFlight]:
    """Return the oldest collective that has not ended of each group, by the group's key in
    `unfinished_groups`. Takes some tens of ms, because torch writes all entries as JSON."""
    world: Any = dist.group.WORLD
    default = distributed_c10d._world.pg_names.get(world)
    oldest: dict[str, CollectiveInFlight] = {}
    for name, recording in _recordings(onlyActive=True).items():
        for entry in recording.get("entries", ()):
            # gloo's collectives stay 'scheduled'.
            if not entry["retired"] and entry["state"] != "completed":
                group, _ = entry["process_group"]
                backend, _, operation = entry["profiling_name"].partition(":")
                is_p2p = bool(entry["is_p2p"])
                number = entry["p2p_seq_id" if is_p2p else "collective_seq_id"]
                inputs = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
                shapes = ", ".join(f"{size} {dtype}" for size, dtype in inputs)
                # The recorder lists its entries from the oldest on, so the first one of a group stays.
                oldest.setdefault(
                    f"{name}/{entry['pg_id']}",
                    CollectiveInFlight(group, group == default, backend, operation, number, is_p2p, shapes),
                )
    return oldest


def _recordings(**options: bool) -> dict[str, dict[str, Any]]:
    """Return the content of each of torch's flight recorders, by the name of the function that dumps it."""
    return {
        name: json.loads(getattr(_distributed_c10d, name)(**options))
        for name in _DUMPS
        if hasattr(_distributed_c10d, name)
    }


def abort_nccl(groups: Sequence[Any]) -> None:
    """End the collectives of groups on GPUs. Groups without such a backend are left alone.

    An abort may wait for all that runs on the GPU, and so for ever for the kernel of another group. NCCL 2.22
    and later aborts all communicators together whose aborts stand between ncclGroupStart and ncclGroupEnd
    (https://github.com/pytorch/pytorch/issues/119797).
    """
    backends = []
    for group in groups:
        with suppress(RuntimeError):
            backends.append(group._get_backend(torch.device("cuda")))
    backends = [backend for backend in backends if hasattr(backend, "abort")]
    # ncclGroupStart and ncclGroupEnd belong to no communicator, so any one of the backends can call them.
    starter = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if len(backends) == 1 or (starter is not None and torch.cuda.nccl.version() < _ABORTS_TOGETHER):
        starter = None
    if starter is not None:
        starter._group_start()
    try:
        for backend in backends:
            with suppress(RuntimeError):
                backend.abort()
    finally:
        if starter is not None:
            starter._group_end()


def compares_collectives() -> bool:
    """Return whether torch compares the ranks' collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    is_detailed: bool = get_debug_level() == DebugLevel.DETAIL
    return is_detailed


def read_debug_level() -> None:
    """Read TORCH_DISTRIBUTED_DEBUG again, for groups that are made from now on."""
    set_debug_level_from_env()


class LoggerWithoutOptions(Logger):
    """DDP's logger that does not read the options of the group's backend."""

    def set_construction_data_and_log(self, *_: Any) -> None:
        """Log nothing."""


def flight_recording() -> bytes | None:
    """Return torch's record of the last collectives as JSON; None before torch 2.9 where it was built without
    NCCL.

    A build with NCCL has two recorders, one for NCCL and one for all other backends, and the groups of a rank
    may be in both.
    """
    recordings = list(_recordings().values())
    if not recordings:
        return None
    # Each entry once, should both functions dump the same recorder.
    entries = {json.dumps(entry): entry for recording in recordings for entry in recording.get("entries", ())}
    together = {key: value for recording in reversed(recordings) for key, value in recording.items()}
    together["entries"] = sorted(entries.values(), key=lambda entry: int(entry.get("time_created_ns", 0)))
    return json.dumps(together).encode()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the root mesh that a DeviceMesh was sliced from; None for a mesh that was not sliced, and where
    this version of torch cannot say."""
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
    elif resources := getattr(device_mesh, "_mesh_resources", None):  # an older torch
        root = resources.get_root_mesh(mesh)
    else:
        # The mesh counts as one that was not sliced, so that it is made again by itself.
        return None
    assert isinstance(root, DeviceMesh)
    return None if root is mesh or root == mesh else root


def mesh_of_sharded(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh that FSDP has sharded a module's parameters over; None for other modules."""
    # Looked up in the class: a person's module may have a __getattr__ of its own.
    state: Any = getattr(type(module), "_get_fsdp_state", None)
    if state is None or state(module)._fsdp_param_group is None:
        return None
    mesh = state(module)._fsdp_param_group.mesh_info.mesh
    assert isinstance(mesh, DeviceMesh)
    return mesh


def can_reset_sharded() -> bool:
    """Return whether a sharded model can go on after a step that was cut short, which takes torch 2.13."""
    return hasattr(import_module("torch.distributed.fsdp").FSDPModule, "reset_iter_state")


def reset_sharded(module: nn.Module) -> None:
    """Reset a model under `fully_shard` after a step that was cut short: drop the step, and free the gathered
    weights.

    Nothing happens for a part of such a model, for one that has had no step, and where this version of torch
    cannot reset it.
    """
    state = module._get_fsdp_state()  # type: ignore[operator]
    if state._is_root is not True or not can_reset_sharded():
        return
    for part in state._state_ctx.all_states:
        for group in part._fsdp_param_groups:
            # FSDP would wait for the result of an all_gather in a group that has ended.
            group._all_gather_result = None
    module.reset_iter_state()  # type: ignore[operator]


def forget_layouts() -> None:
    """Clear DTensor's cache of sharding decisions. It has the mesh of the first operands, whose groups may
    have ended, and would return that mesh for operands on a later, equal mesh.

    Nothing happens where this version of torch has no function for that.
    """
    # Without this import there is no DTensor.
    if "torch.distributed.tensor" in sys.modules:
        debug = import_module("torch.distributed.tensor.debug")
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


DTENSOR = "torch.distributed.tensor", "DTensor"
FSDP_MODULE = "torch.distributed.fsdp", "FSDPModule"


def if_imported(module: str, name: str) -> tuple[type, ...]:
    """Return a class of torch for `isinstance`, in a tuple that is empty if no code has imported the class's
    module: then there is no object of the class."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def num_changes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, directly or through a view: torch's version counter."""
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


def fsdp_sharding(module: nn.Module) -> Sharding | None:
    """Return how `fully_shard` shards a module, from FSDP's private state, so that the module can be sharded
    again; None where it was given several modules at once, several meshes or a part of a larger mesh, or was
    only replicated."""
    # FSDP keeps the settings of one call in a group of parameters.
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13 there was one at most
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    if len(getattr(state, "_modules", (module,))) > 1 or len(groups) > 1:
        return None
    # fully_shard has made a class from FSDPModule and the module's own.
    original = type(module).__bases__[1]
    # None: FSDP decides by itself, and keeps the weights of the root whole.
    after_forward = None if getattr(state, "_auto_reshard_after_forward", False) else True
    if not groups:
        return Sharding(original, None, [], after_forward, state._mp_policy, None, None)
    (group,) = groups
    # A part of a larger mesh (dp_mesh_dims), or a mesh that only replicates (`replicate`).
    if getattr(group.mesh_info, "is_spmd_mesh", False) or not hasattr(group.mesh_info, "shard_mesh_size"):
        return None
    # After the forward pass: no mesh if weights stay whole, another one if fewer ranks share them.
    if after_forward is not None:
        resharded = group.post_forward_mesh_info
        if resharded is None:
            after_forward = False
        elif resharded is not group.mesh_info:
            after_forward = resharded.shard_mesh_size
    # Parameters are named as in the whole module; one that is tied has a name in each owner.
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


def make_fake_group() -> dist.ProcessGroup:
    """Make a group of the backend 'fake' over all ranks, beside their real group. A collective."""
    import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    made = dist.new_group(backend="fake")
    assert isinstance(made, dist.ProcessGroup), "this rank is among all ranks"
    return made


def nccl_model(gpu: str, gpus_per_node: int, has_nvlink: bool) -> Callable[[str, int, int], float] | None:
    """Return torch's model of the speed of NCCL: a function from an operation, its bytes and the number of
    ranks to seconds. None if this version of torch lacks the model (before 2.13 it knew one kind of node
    only).

    torch's module asks the machine for its GPUs. So a second instance of the module is loaded, whose
    functions for that are replaced; torch's own instance stays as it is.

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
