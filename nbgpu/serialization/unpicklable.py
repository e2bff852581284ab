"""Find the parts of a value that cannot be transferred between processes, and explain why."""

from __future__ import annotations

import difflib
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

_OF_IPYTHON = {"In", "Out", "exit", "quit", "open", "get_ipython"}
"""IPython's variables, which no user has assigned."""
_MAX_LINES = 10
"""The largest number of parts that one error names."""
_MAX_DEPTH = 50
"""The depth of nested parts down to which is searched."""

_OF_THE_GROUP = "belongs to the process group of the ranks"
_IN_MID_RUN = "is in mid-run"
_OF_ITS_PROCESS = "is of use in its own process only"
_REASONS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": f"{_OF_THE_GROUP}. {{instead}} {{path}}.module.state_dict()",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        f"{_OF_THE_GROUP}. {{instead}} a full state_dict()"
    ),
    "torch.distributed.device_mesh.DeviceMesh": _OF_THE_GROUP,
    "torch.distributed.tensor.DTensor": (
        "lies on several ranks. {instead} what full_tensor() returns, which is called on all of them"
    ),
    "torch.utils.data.dataloader._BaseDataLoaderIter": f"{_IN_MID_RUN}. {{instead}} the data, or the DataLoader",
    "torch.cuda.streams.Stream": _OF_ITS_PROCESS,
    "torch.cuda.streams.Event": _OF_ITS_PROCESS,
    "builtins.generator": f"{_IN_MID_RUN}. {{instead}} what it yields: list(...)",
    "builtins.coroutine": f"{_IN_MID_RUN}. {{instead}} what it returns: await ...",
    "builtins.async_generator": _IN_MID_RUN,
    "builtins.frame": _IN_MID_RUN,
    "builtins.traceback": _IN_MID_RUN,
    "builtins.module": "is code, which is imported where it is needed: %%distributed, then import",
    "_io._IOBase": "is open in its own process only. {instead} its path, or what is in it",
    "_socket.socket": "is open in its own process only",
    "_thread.lock": _OF_ITS_PROCESS,
    "_thread.RLock": _OF_ITS_PROCESS,
    "threading.Thread": _OF_ITS_PROCESS,
    "subprocess.Popen": _OF_ITS_PROCESS,
} | {
    # The module of these classes depends on torch's version.
    f"{module}.{name}": _OF_THE_GROUP
    for module in ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d")
    for name in ("ProcessGroup", "Store", "Work")
}
"""By the name of a class, why its values cannot be transferred, and an alternative. Names are used so that
nothing has to be imported."""

_PICKLES_AND_DOES_NOT_ARRIVE = {
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.tensor.DTensor",
}
"""Classes whose values can be pickled, but not unpickled in another process."""
_PARTS_OF_A_MODULE = ("_parameters", "_buffers", "_modules")


class Explained(Exception):
    """An error whose message is a complete explanation for a person.

    Args:
        reason: the message.
        about: the value that the message explains, whose parts are then not searched.
    """

    def __init__(self, reason: str, about: Any = None) -> None:
        super().__init__(reason)
        self.about = about


def unknown(names: Iterable[str], variables: Mapping[str, Any]) -> list[str]:
    """Return a line for each name without a variable, with similar names of variables."""
    candidates = [name for name in variables if not name.startswith("_") and name not in _OF_IPYTHON]
    lines = []
    for name in names:
        if name not in variables:
            similar = " or ".join(difflib.get_close_matches(name, candidates))
            hint = f". Did you mean {similar}?" if similar else ""
            lines.append(f"{name}: there is no variable of this name{hint}")
    return lines


def code_apart(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (functions and classes that were defined in a cell, all other values). The first are transferred
    as source code."""
    code = {
        name: value
        for name, value in values.items()
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__"
    }
    return code, {name: value for name, value in values.items() if name not in code}


def must_stay(value: Any) -> bool:
    """Return whether a value cannot be transferred although it can be pickled."""
    # This runs for every object, and all such classes are torch's, so others are skipped for speed.
    bases = (base for base in type(value).__mro__ if base.__module__.startswith("torch."))
    return any(_full_name(base) in _PICKLES_AND_DOES_NOT_ARRIVE for base in bases)


def described(
    values: Mapping[str, Any],
    refusal: Callable[[Any], Exception | None],
    cannot: str = "cannot travel",
    instead: str = "Send",
) -> list[str]:
    """Return a line for each part of the values that cannot be transferred: its path, its type and the
    reason.

    Args:
        values: the values by name.
        refusal: returns the error for a value that cannot be transferred, or None.
        cannot: the phrase for the failure, for messages.
        instead: the verb of the sentence with the alternative.
    """
    lines: list[str] = []
    seen: set[int] = set()

    def search(path: str, value: Any, depth: int = 0) -> None:
        """Add a line for each innermost part of a value that is refused, or for the value itself if none of
        its parts is."""
        if len(lines) > _MAX_LINES or id(value) in seen:
            return
        error = refusal(value)
        if error is None:
            return
        seen.add(id(value))
        num_lines_before = len(lines)
        is_explained = isinstance(error, Explained) and error.about is value
        if not must_stay(value) and not is_explained and depth < _MAX_DEPTH:
            for suffix, part in _parts(value):
                search(path + suffix, part, depth + 1)
        if len(lines) == num_lines_before:
            lines.append(f"{path}: {_kind(value)} {cannot}: {_reason(path, value, error, instead)}")

    for name, value in values.items():
        search(name, value)
    return lines[:_MAX_LINES] + ["and more"] * (len(lines) > _MAX_LINES)


def path_to(name: str, values: Mapping[str, Any]) -> str:
    """Return the path to the first value, or part of a value, that is the class or function of this qualified
    name, or an instance of the class; the names of all values if there is none."""
    seen: set[int] = set()

    def search(path: str, value: Any, depth: int = 0) -> Iterator[str]:
        for candidate in (value, type(value)):
            qualified = getattr(candidate, "__module__", ""), getattr(candidate, "__qualname__", "")
            if qualified == ("__main__", name):
                yield path
        if id(value) not in seen and depth <= _MAX_DEPTH:
            seen.add(id(value))
            for suffix, part in _parts(value):
                yield from search(path + suffix, part, depth + 1)

    paths = (path for item in values.items() for path in search(*item))
    return next(paths, ", ".join(values))


def _kind(value: Any) -> str:
    """Return the type of a value for messages, such as 'a lambda' or 'the class Net'."""
    if isinstance(value, FunctionType):
        return "a lambda" if value.__name__ == "<lambda>" else f"the function {value.__qualname__}"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else _full_name(kind)


def _reason(path: str, value: Any, error: Exception, instead: str) -> str:
    """Return why a value cannot be transferred: the reason for its class in _REASONS, or that of the error.

    Args:
        path: the Python expression of the value.
        value: the value.
        error: the error with which it was refused.
        instead: the verb of the sentence with the alternative, such as 'Send'.
    """
    if isinstance(error, Explained):
        return str(error)
    for base in type(value).__mro__:
        if _full_name(base) in _REASONS:
            return f"it {_REASONS[_full_name(base)].format(instead=instead, path=path)}"
    if isinstance(value, FunctionType | type) and "<" in value.__qualname__:
        return (
            "it has no name by which it would be found elsewhere. Define it with a name, at the top of a cell"
        )
    if isinstance(error, RecursionError):
        return "it is nested too deeply to be pickled"
    return f"{type(error).__name__}: {error}"


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with the Python expression that leads to it."""
    pandas = sys.modules.get("pandas")
    numpy = sys.modules.get("numpy")
    if isinstance(value, str | bytes | bytearray | int | float | complex | type | FunctionType | None):
        return
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.hasobject:
            yield from (
                (f"[{', '.join(map(str, index))}]", value[index]) for index in numpy.ndindex(value.shape)
            )
    elif pandas is not None and isinstance(value, pandas.DataFrame):
        yield from ((f"[{column!r}]", value[column]) for column in value.columns)
    elif pandas is not None and isinstance(value, pandas.Series):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{field}", part) for field, part in zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((" (one of its elements)", part) for part in value)
    else:
        if isinstance(value, dict):
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        yield from _parts_of_object(value)


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object that pickle would send: the arguments and the state of its
    `__reduce_ex__`."""
    try:
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - the value cannot be pickled, and the caller has the error
        return
    if isinstance(reduced, str):
        return
    # `reduced` is (callable, its arguments) and optionally the state and more.
    arguments, state = (*reduced[1:3], None)[:2]
    for index, part in enumerate(arguments):
        if not isinstance(part, type):
            yield f" (its part {index})", part
    for attributes in state if isinstance(state, tuple) else (state,):
        if not isinstance(attributes, dict):
            continue
        for name, part in attributes.items():
            if name in _PARTS_OF_A_MODULE and isinstance(part, dict):
                yield from ((f".{inner}", inner_part) for inner, inner_part in part.items())
            else:
                yield f".{name}", part
