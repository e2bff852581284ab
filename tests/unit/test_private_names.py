"""The contract of private names: each one that nbgpu uses of another library is listed here, as it was tried.

It is the first to fail after an upgrade, with one list of what has moved.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import nbgpu
from nbgpu.machine.requirements import TRIED, newer_than_tried

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(nbgpu.__file__).parent

CONTRACT = """
accelerate.state:AcceleratorState
    _reset_state(reset_partial_state)
ipykernel.kernelbase:Kernel
    _abort_queues(self, subshell_id)
    _aborting
    _execute_sleep
    _input_request(self, prompt, ident, parent, password)
    _publish_execute_input(self, code, parent, execution_count)
    _publish_status(self, status, channel, parent)
    _supports_kernel_subshells
ipykernel.comm.comm:BaseComm
    _reply_subshell_for(self, data, default)
ipykernel.iostream:OutStream
    _flush_pending
ipykernel.zmqshell:ZMQInteractiveShell
    _last_traceback
    _last_traceback_during_displayhook
IPython.core.interactiveshell:InteractiveShell
    _showtraceback(self, etype, evalue, stb)
ipyparallel.client.client:Client
    _build_targets(self, targets)
    _config
    _connect(self, sshserver, ssh_kwargs, timeout)
    _context
    _extract_metadata(self, msg)
    _futures
    _handle_execute_reply(self, msg)
    _io_loop
    _mux_stream
    _outstanding_dict
    _query_socket
torch
    _C
    _inductor
    _GLOBAL_DEVICE_CONTEXT
torch._C
    _distributed_c10d
    _get_fp32_precision_getter
    _get_mkldnn_enabled
    _get_nnpack_enabled
    _len_torch_function_stack
    _set_fp32_precision_setter
    _set_mkldnn_enabled
torch._C._distributed_c10d
    DebugLevel
    Logger
    _dump_fr_trace_json
    _dump_nccl_trace_json
    get_debug_level
    set_debug_level_from_env
torch:Tensor
    _version
torch._C._distributed_c10d:ProcessGroup
    _allgather_base
    _get_backend
    _get_sequence_number_for_group
    _reduce_scatter_base
torch._C._distributed_c10d:Reducer
    _get_zeros_like_grad_buckets
    _push_all_rebuilt_params
    _rebuild_buckets
torch._inductor.comm_analysis
    _has_nvlink()
torch._subclasses.fake_tensor
    FakeTensorMode
torch.autograd.graph
    _engine_run_backward(t_outputs, args, kwargs)
torch.distributed
    _broadcast_coalesced
torch.distributed.device_mesh:DeviceMesh
    _get_root_mesh(self)
torch.distributed.distributed_c10d
    _new_process_group_helper(group_size, group_rank, global_ranks_in_group, backend, store, group_name, backend_options, timeout, pg_tag, device_id, group_desc[, enable_reconfigure])
    _set_pg_timeout(timeout, group)
    _world
torch.distributed.fsdp:FSDPModule
    _get_fsdp_state(self)
torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam
    _module_info
torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup
    _all_gather_result
torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState
    _auto_reshard_after_forward
    _is_root
    _state_ctx
    _fsdp_param_group
    _fsdp_param_groups
    _mp_policy
torch.distributed.tensor.debug
    _clear_sharding_prop_cache()
torch.nn.modules.batchnorm
    _BatchNorm
torch.nn.modules.module
    _WrappedHook
torch.nn.parallel:DistributedDataParallel
    _build_params_for_reducer(self)
    _comm_hooks
    _has_rebuilt_buckets
    _register_builtin_comm_hook(self, comm_hook_type)
torch.overrides
    _pop_mode()
    _push_mode(mode)
torch.storage:UntypedStorage
    _cdata
torch.utils
    _device
    _python_dispatch
torch.utils._python_dispatch
    TorchDispatchMode
    _disable_current_modes()
torch.utils._pytree
    tree_leaves(tree, is_leaf)
torch.utils.data.dataloader:_MultiProcessingDataLoaderIter
    _shutdown_workers(self)
"""
"""By owner (a module, or a class in one): the names, and the parameters where it is a function that Python
can read."""

ROOMS = {
    "accelerate": {"engine/variables/library_objects.py"},
    "ipykernel": {"client/ipykernel", "engine/ipykernel", "protocol/short_cuts.py"},
    "IPython": {"engine/ipykernel"},
    "ipyparallel": {"client/engines"},
    "torch": {
        "engine/group/torch_private.py",
        "engine/group/torch_settings.py",
        # Classes that torch documents how to derive from, in modules with a private name.
        "engine/dry_run/fake_steps.py",
        "engine/model/build.py",
        # One of the loader's, where its processes are ended, and one as the name of a frame in a stack.
        "engine/data/workers.py",
        "engine/ipykernel/stacks.py",
        # The class of a hook, by its name.
        "engine/saved_variables/shards.py",
    },
}
"""By library: where its private names may stand. `protocol/short_cuts.py` has what both sides do to
ipykernel's streams."""

ONLY_IN_SOME_VERSIONS = {
    "_reconfigure",
    "_mesh_resources",
    "_dump_nccl_trace_json",
    "_fsdp_param_group",
    "_group_end",  # of builds with NCCL, as the next
    "_group_start",
    "_fsdp_param_groups",
}
"""Names that are looked for, and left alone where they are not there."""

NOT_OF_THESE_LIBRARIES = {
    "_current_frames",  # Python's own, as the five below
    "_exit",
    "_getframe",
    "_load_unlocked",
    "_run",
    "_signal",
    "_repr_mimebundle_",  # how a thing says what it looks like in a page, a documented protocol
    "_jupyter_types_experimental",  # a key in the answer to a completion, which JupyterLab reads
    "_fields",  # of a namedtuple, documented
    "_timestamp",  # W&B's documented column
    "_ALLGATHER_BASE",  # what torch calls two collectives in its messages
    "_REDUCE_SCATTER_BASE",
    "_frombuffer",  # what NumPy writes into a pickle; nothing of that name is called
    "_target_",  # a key in MONAI's configuration files, documented
    "_SOCKET_IFNAME",  # ends of names
    "_hooks",
    "_is_fsdp_managed_module",  # attributes that FSDP gives to modules and tensors: they are left out where they are there
    "_fsdp_use_orig_params",
    "_is_flat_param",
    "_s",
    "_parameters",  # of a torch Module: which part of a value cannot travel is looked for there, and elsewhere where it is not
    "_buffers",
    "_modules",
}


def listed() -> list[tuple[str, str, str | None]]:
    """Owner, name and parameters of each private name in CONTRACT."""
    found, owner = [], ""
    for line in CONTRACT.strip().splitlines():
        if not line.startswith(" "):
            owner = line
            continue
        name, _, parameters = line.strip().removesuffix(")").partition("(")
        found.append((owner, name, parameters if line.endswith(")") else None))
    return found


def resolved(owner: str) -> Any:
    module, _, name = owner.partition(":")
    there: Any = import_module(module) if module != "torch._C" else torch._C
    return getattr(there, name) if name else there


def is_there(owner: Any, name: str) -> bool:
    """Whether an owner has a name, has a module of that name, or gives the name to its instances."""
    if hasattr(owner, name):
        return True
    if inspect.ismodule(owner):
        return find_spec(f"{owner.__name__}.{name}") is not None if hasattr(owner, "__path__") else False
    bases = [base for base in getattr(owner, "__mro__", ()) if base.__module__ != "builtins"]
    sources = (inspect.getsource(import_module(base.__module__)) for base in bases)
    return any(re.search(rf"\bself\.{name}(: [^=\n]+)? = ", source) for source in sources)


def parameters_of(function: Any) -> str:
    return ", ".join(inspect.signature(function).parameters)


def variants(parameters: str) -> set[str]:
    """The parameters with what stands in brackets, which only newer versions take, and without."""
    return {re.sub(r"\[.*?\]", "", parameters), re.sub(r"[\[\]]", "", parameters)}


def moved() -> Iterator[str]:
    """A line for each name that is not as it was tried."""
    for owner, name, parameters in listed():
        if owner.startswith("accelerate.") and find_spec("accelerate") is None:
            continue  # nbgpu does without it, and then does not use the name either
        try:
            there = resolved(owner)
        except (ImportError, AttributeError):
            yield f"{owner} is gone, and {name} with it"
            continue
        if not is_there(there, name):
            if name not in ONLY_IN_SOME_VERSIONS:
                yield f"{owner}.{name} is gone"
        elif parameters is not None and (now := parameters_of(getattr(there, name))) not in variants(
            parameters
        ):
            yield f"{owner}.{name} takes ({now}), and took ({parameters})"


def installed_versions() -> dict[str, Version]:
    return {name: Version(metadata.version(name)) for name in TRIED}


def test_private_names_are_as_they_were_tried() -> None:
    older = {n: v for n, v in installed_versions().items() if v.release[:2] < Version(TRIED[n]).release[:2]}
    if older:
        pytest.skip(f"not the versions that the list is of: {older}")
    assert not [*moved()], "\n".join(["private names of other libraries have moved:", *moved()])


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Private names that nbgpu's own code gives to something."""
    own = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in {"self", "cls"}
            ):
                own.add(node.attr)
    return own


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[A-Za-z]\w*", name))


def imported_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every private name that a module imports from another library, and in which line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("nbgpu"):
            is_inside = any(is_private(part) for part in (node.module or "").split("."))
            for alias in node.names:
                if is_inside or is_private(alias.name):
                    yield alias.name, node.lineno


def looked_up_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every private name that a module uses as an attribute or has as a string, and in which line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            yield node.value, node.lineno


def used() -> dict[str, list[str]]:
    """By private name of another library: every place where nbgpu uses it."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = own_names(trees)
    places: dict[str, list[str]] = {}
    for path, tree in trees.items():
        looked_up = [(name, line) for name, line in looked_up_names(tree) if name not in own]
        for name, line in [*imported_names(tree), *looked_up]:
            if name not in NOT_OF_THESE_LIBRARIES:
                places.setdefault(name, []).append(f"{path.relative_to(PACKAGE)}:{line}")
    return places


OF_ITS_SUBCLASSES = {
    "_abort_queues",
    "_config",
    "_connect",
    "_context",
    "_extract_metadata",
    "_futures",
    "_handle_execute_reply",
    "_make_io_loop",
    "_publish_execute_input",
    "_publish_status",
}
"""Names that nbgpu's own subclasses of ipyparallel's Client and kernel redefine, or that other classes of
nbgpu have, too."""


@pytest.mark.slow
def test_every_private_name_is_listed_and_every_listed_one_is_used() -> None:
    names = {name for _, name, _ in listed()} | ONLY_IN_SOME_VERSIONS
    places = used()
    assert {name: place for name, place in places.items() if name not in names} == {}
    assert names - set(places) - OF_ITS_SUBCLASSES == set()


@pytest.mark.slow
def test_each_library_has_rooms_for_its_private_names() -> None:
    libraries: dict[str, set[str]] = {}
    for owner, name, _ in listed():
        libraries.setdefault(name, set()).add(re.split(r"[.:]", owner)[0])
    outside = [
        f"{name} of {library} at {place}"
        for name, places in used().items()
        for library in libraries.get(name, ())
        for place in places
        if not any(place.startswith(room) for room in ROOMS[library])
    ]
    assert outside == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("kernel._secret()", ["_secret"]),
        ("getattr(kernel, '_secret', None)", ["_secret"]),
        ("from torch._inner import open", ["open"]),
        ("from torch import _inner", ["_inner"]),
        ("kernel.__dict__", []),
        ("from nbgpu.engine import _x", []),
    ],
)
def test_a_private_name_is_found(code: str, names: list[str]) -> None:
    tree = ast.parse(code)
    assert [name for name, _ in [*imported_names(tree), *looked_up_names(tree)]] == names


def test_a_name_that_has_moved_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from ipykernel.kernelbase import Kernel

    monkeypatch.setattr(Kernel, "_publish_status", lambda self, status: None)
    monkeypatch.delattr(Kernel, "_supports_kernel_subshells")
    assert [line for line in moved() if "kernelbase" in line] == [
        "ipykernel.kernelbase:Kernel._publish_status takes (self, status), and took (self, status, channel, parent)",
        "ipykernel.kernelbase:Kernel._supports_kernel_subshells is gone",
    ]


def test_the_versions_that_were_tried_are_those_of_the_constraints() -> None:
    pins = dict(
        line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().split() if "==" in line
    )
    assert {name: ".".join(pins[name].split(".")[:2]) for name in TRIED} == TRIED


def test_a_newer_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"ipykernel": "7.5.0", "ipython": "9.18.7", "ipyparallel": "9.1.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert [*newer_than_tried()] == [("ipykernel", "7.5.0", "7.4")]
