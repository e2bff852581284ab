"""Descriptions of this rank's variables that can be compared with the other ranks'."""

from __future__ import annotations

import fnmatch
import hashlib
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nbgpu.engine.ipykernel import shell
from nbgpu.engine.memory import usage as memory
from nbgpu.protocol.records import Variable

_FINGERPRINTS_TAKE_AT_MOST_S = 0.3
_NUM_ELEMENTS_COMPARED = 16_384
"""The number of evenly spaced elements of a tensor to compare: values that differ in training differ nearly
everywhere."""
_NUM_BYTES_COMPARED = 65_536
"""The number of bytes of a text to compare, from each end."""
_MAX_ITEMS_COMPARED = 1000
"""The largest number of items of a container that is compared."""
_DEPTH = 3
"""The depth to which nested containers are searched for tensors."""
_MAX_CONTENT_CHARS = 40

_SCALARS = (bool, int, float, complex, type(None))

_absent = object()


def describe(pattern: str) -> list[Variable]:
    """Describe the person's variables whose names match a pattern such as 'loss*', in the order of their
    names.

    Modules, names that begin with an underscore, and unchanged variables of nbgpu and IPython are left out
    (IPython's `%who` has the same rule).
    """
    variables, hidden = shell.current().user_ns, shell.current().user_ns_hidden
    deadline_s = time.monotonic() + _FINGERPRINTS_TAKE_AT_MOST_S
    return [
        _described(name, variables[name], deadline_s)
        for name in sorted(fnmatch.filter(variables, pattern))
        if not name.startswith("_")
        and variables[name] is not hidden.get(name, _absent)
        and not _is_imported(variables[name])
    ]


def _is_imported(value: Any) -> bool:
    """Return whether a value is a module, or a function or class that was not defined in a cell."""
    kind = type(value)  # an attribute of the value itself may raise
    if issubclass(kind, FunctionType | BuiltinFunctionType | type):
        return bool(value.__module__ != "__main__")
    return issubclass(kind, ModuleType)


def _described(name: str, value: Any, deadline_s: float) -> Variable:
    """Describe one variable, with a fingerprint if there is time left."""
    variable = Variable(name, type(value).__name__)
    try:
        variable = replace(variable, **_facts(value))
        if time.monotonic() < deadline_s:
            variable = replace(variable, fingerprint=_fingerprint(value, deadline_s))
    except Exception as error:  # noqa: BLE001 - a person's variable may be any object
        return replace(variable, content=f"cannot be read: {type(error).__name__}")
    return variable


def _facts(value: Any) -> dict[str, Any]:
    """Return the fields of a `Variable` that describe a value of this kind; none for other objects."""
    if isinstance(value, Tensor):
        return _facts_of_tensor(value)
    if isinstance(value, np.ndarray):
        return {"shape": str(value.shape), "dtype": str(value.dtype), "num_bytes": value.nbytes}
    if isinstance(value, nn.Module):
        return _facts_of_module(value)
    if isinstance(value, Optimizer):
        tensors = list(memory.parts_in(value, _DEPTH))
        num_parameters = sum(len(group["params"]) for group in value.param_groups)
        rates = ", ".join(f"{float(group['lr']):g}" for group in value.param_groups if "lr" in group)
        content = f"{_counted(num_parameters, 'parameter tensor')}, lr {rates}"
        return {
            "content": content,
            "device": _common(t.device for t in tensors),
            "num_bytes": _bytes(tensors),
        }
    if (pandas := sys.modules.get("pandas")) is not None and isinstance(
        value, pandas.DataFrame | pandas.Series
    ):
        return {"shape": str(value.shape), "num_bytes": int(np.sum(value.memory_usage(index=True)))}
    if isinstance(value, str | bytes):
        return {"content": _shortened(repr(value[:_MAX_CONTENT_CHARS]))}
    if isinstance(value, _SCALARS):
        return {"content": _shortened(repr(value))}
    if isinstance(value, type):
        return {"type": "class"}
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        tensors = list(memory.parts_in(value, _DEPTH))
        return {"content": _counted(len(value), "item"), "num_bytes": _bytes(tensors) if tensors else None}
    return {}


def _facts_of_tensor(value: Tensor) -> dict[str, Any]:
    """Return the fields of a `Variable` that describe a tensor; the bytes are those of this rank's part."""
    if is_lazy(value):
        return {"content": "no shape yet"}
    facts: dict[str, Any] = {
        "shape": str(tuple(value.shape)),
        "dtype": _plain(value.dtype),
        "device": str(value.device),
    }
    if value.layout is not torch.strided:
        return {**facts, "content": str(value.layout).removeprefix("torch.")}
    facts["num_bytes"] = _local(value).nbytes
    placements = getattr(value, "placements", None)  # only a DTensor has them: this rank has a part of it
    return facts if placements is None else {**facts, "content": ", ".join(map(repr, placements))}


def _facts_of_module(value: nn.Module) -> dict[str, Any]:
    """Return the fields of a `Variable` that describe a module: the type of a DDP object names the module
    inside."""
    parameters = list(value.parameters())
    if any(is_lazy(p) for p in parameters):
        return {"content": "no shapes yet"}
    tensors = [*parameters, *value.buffers()]
    # DistributedDataParallel holds the module that the person made.
    inner = getattr(value, "module", None)
    wraps = isinstance(value, nn.parallel.DistributedDataParallel)
    return {
        **({"type": f"{type(value).__name__}({type(inner).__name__})"} if wraps else {}),
        "dtype": _common(_plain(p.dtype) for p in parameters),
        "device": _common(t.device for t in tensors),
        "num_bytes": _bytes(tensors),
        "content": _counted(sum(p.numel() for p in parameters), "parameter"),
    }


def _fingerprint(value: Any, deadline_s: float) -> str:
    """Return a short hash of a value, for comparison over the ranks; empty for other kinds of objects, and
    after the deadline."""
    if isinstance(value, Tensor):
        return _fingerprint_of_tensors([value], deadline_s)
    if isinstance(value, nn.Module):
        return _fingerprint_of_tensors([*value.parameters(), *value.buffers()], deadline_s)
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(value, str | bytes):
        ends = value[:_NUM_BYTES_COMPARED], value[-_NUM_BYTES_COMPARED:]
        digest.update(repr((len(value), ends)).encode())
    elif isinstance(value, _SCALARS) or _is_short_and_plain(value):
        digest.update(repr(value).encode())
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufcSUmM":
        flat = value.reshape(-1)[:: max(1, value.size // _NUM_ELEMENTS_COMPARED)]
        digest.update(np.ascontiguousarray(flat).tobytes())
    elif isinstance(value, FunctionType | type):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for function in members:
            if isinstance(function, FunctionType):
                _add_code(digest, function.__code__)
    else:
        return ""
    return digest.hexdigest()


def _add_code(digest: Any, code: CodeType) -> None:
    """Add the bytecode, names and constants of a function to a digest, without its file and lines, which
    differ between ranks that have run different cells."""
    digest.update(code.co_code + repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        elif not isinstance(constant, frozenset):  # its order differs between processes
            digest.update(repr(constant).encode())


def _is_short_and_plain(value: Any) -> bool:
    """Return whether a value is a short list, tuple or dict of numbers: their `repr` is then cheap and
    complete."""
    if not isinstance(value, list | tuple | dict) or len(value) > _MAX_ITEMS_COMPARED:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(isinstance(item, _SCALARS) for item in items)


def _fingerprint_of_tensors(tensors: Iterable[Tensor], deadline_s: float) -> str:
    """Return a hash of some elements of each tensor; empty if one of them has no elements that can be
    compared, or after the deadline."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if time.monotonic() > deadline_s:
            return ""
        if (
            is_lazy(tensor)
            or hasattr(tensor, "placements")
            or tensor.layout is not torch.strided
            or tensor.is_meta
        ):
            return ""  # the parts of a DTensor differ by design, and other tensors cannot be read this way
        values = tensor.detach()
        if values.numel() > _NUM_ELEMENTS_COMPARED:
            # Chosen by index, because flattening would copy a tensor that is not contiguous.
            chosen = torch.linspace(
                0, values.numel() - 1, _NUM_ELEMENTS_COMPARED, dtype=torch.float64, device="cpu"
            )
            values = values[torch.unravel_index(chosen.long().to(values.device), values.shape)]
        digest.update(values.reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(_local(tensor).nbytes for tensor in tensors)


def _common(values: Iterable[Any]) -> str:
    """Return the value that all have in common, or 'several'."""
    distinct = {str(value) for value in values}
    return distinct.pop() if len(distinct) == 1 else ("several" if distinct else "")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CONTENT_CHARS else f"{text[: _MAX_CONTENT_CHARS - 3]}..."
