"""Put values together again from their description.

Without the person's trust no code of the folder runs: no pickle is opened, no definition of a cell is run,
and only modules are imported that this rank has imported already or that belong to nbgpu's own libraries.
"""

from __future__ import annotations

import base64
import functools
import io
import pickle
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.group import torch_private
from nbgpu.engine.saved_variables import shards, tables
from nbgpu.engine.saved_variables.describing import OWN_DEVICE, find_qualified, is_described_by_attributes
from nbgpu.engine.saved_variables.rank_files import Stored
from nbgpu.engine.variables import definitions
from nbgpu.protocol.records import Definition
from nbgpu.serialization import tensors
from nbgpu.serialization.tensors import TensorForm

_RUNS_CODE = frozenset(
    [
        "code",
        "ctypes",
        "importlib",
        "multiprocessing",
        "os",
        "pdb",
        "pickle",
        "posix",
        "posixsubprocess",
        "pty",
        "runpy",
        "shutil",
        "socket",
        "subprocess",
        "sys",
        "timeit",
    ]
)
"""The modules of the standard library with functions and classes that run programs or other code, or change
files; with each goes the module in C behind it, such as `_pickle`."""
_LIBRARIES = ("torch", "monai", "numpy", "pandas", "scipy", "einops", "nibabel", "nbgpu")
"""The packages that nbgpu itself needs, whose import runs nothing of the folder."""
_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_MADE_FROM_PARTS: Mapping[str, Callable[..., Any]] = {"range": range, "slice": slice, "complex": complex}
"""The classes whose values are saved by the arguments of their constructors."""


class NeedsTrust(Exception):
    """A value cannot be rebuilt without running code of the folder; the message names the code."""


class NotRebuilt(Exception):
    """A value cannot be rebuilt here; the message says why."""


@contextmanager
def _person_code(kind: type) -> Iterator[None]:
    """Run code of a person's class in this block: an error that the code raises becomes NotRebuilt."""
    try:
        yield
    except Exception as error:
        raise NotRebuilt(f"{kind.__qualname__} raised {type(error).__name__}: {error}") from error


class Rebuilder:
    """Rebuilds values from a rank's files.

    Args:
        stored: the content of the files.
        variables: the rank's variables, in which functions and classes are looked up.
        device: the rank's device.
        trust: whether code of the folder may run.
        of_all_ranks: the files of all ranks, where another number of them saved; called when a part of
            another rank is needed. It may raise DataError.
    """

    def __init__(
        self,
        stored: Stored,
        variables: dict[str, Any],
        device: torch.device,
        trust: bool,
        of_all_ranks: Callable[[], Sequence[Stored]] | None = None,
    ) -> None:
        self._stored = stored
        self._variables = variables
        self._device = device
        self._trust = trust
        self._of_all_ranks = of_all_ranks
        self._built: dict[int, Any] = {}
        self._storages: dict[tuple[str, torch.device], torch.UntypedStorage] = {}

    def value(self, described: Any) -> Any:
        """Return the value of a description.

        Args:
            described: a plain JSON value, or a reference to a node.

        Raises:
            NeedsTrust: the value cannot be rebuilt without running code of the folder, and there is no trust.
            NotRebuilt: the value cannot be rebuilt here.
        """
        if not isinstance(described, dict):
            return described
        number = described["#"]
        if number not in self._built:
            try:
                self._build(number)
            except BaseException:
                # Another value that refers to it must not get half of it.
                self._built.pop(number, None)
                raise
        return self._built[number]

    def _build(self, number: int) -> None:
        """Rebuild the value of a node, and keep it by the node's number."""
        node = self._stored.nodes[number]
        # A container is kept before its contents are rebuilt, because they may refer to it.
        empty = {"list": list, "dict": dict, "OrderedDict": OrderedDict, "set": set}.get(node["is"])
        if empty is not None:
            self._built[number] = empty()
            self._fill(self._built[number], node)
        elif node["is"] == "tensor":
            # Its attributes may lead back to it, as from a weight to its model.
            self._built[number] = self._in_storage(node["form"], self._named_device(node["device"]))
            self._complete_tensor(self._built[number], node)
        elif node["is"] in ("object", "fsdp"):
            self._built[number] = self._make_empty(node)
            self._restore_state(self._built[number], node)
            if node["is"] == "fsdp":
                self._shard(self._built[number], node)
        else:
            try:
                self._built[number] = self._rebuild(node)
            except shards.Unsupported as error:
                raise NotRebuilt(str(error)) from None

    def _make_empty(self, node: Mapping[str, Any]) -> Any:
        """Make an object without its attributes.

        Raises:
            NeedsTrust: without trust, for a class whose objects are never saved by their attributes. A
                folder could name any class that is imported, such as one whose objects remove a file, named
                by an attribute, when they end.
        """
        kind = self.value(node["class"])
        if not (self._trust or is_described_by_attributes(kind)):
            raise NeedsTrust(f"an object of {kind.__module__}.{kind.__qualname__}")
        with _person_code(kind):
            return kind.__new__(kind)

    def _fill(self, container: Any, node: Mapping[str, Any]) -> None:
        """Put the content into a container that was built empty."""
        if node["is"] == "list":
            container.extend(self.value(item) for item in node["items"])
        elif node["is"] == "set":
            container.update(self.value(item) for item in node["items"])
        else:
            for key, item in node["items"]:
                container[self.value(key)] = self.value(item)

    def _rebuild(self, node: Mapping[str, Any]) -> Any:
        """Return the value of a node that does not refer to itself, by the node's kind."""
        kind = node["is"]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.value(item) for item in node["items"]])
        if kind in _MADE_FROM_PARTS:
            return _MADE_FROM_PARTS[kind](*(self.value(part) for part in node["parts"]))
        rebuild: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
            "array": self._array,
            "bytearray": lambda node: bytearray(base64.b64decode(node["base64"])),
            "bytes": lambda node: base64.b64decode(node["base64"]),
            "ddp": self._ddp,
            "defaultdict": self._defaultdict,
            "definition": self._definition,
            "device": lambda node: self._named_device(node["name"]),
            "dtype": lambda node: getattr(torch, node["name"]),
            "float": lambda node: float(node["text"]),
            "generator": self._generator,
            "imported": self._imported,
            "module": lambda node: self._imported_module(node["name"]),
            "dtensor": self._dtensor,
            "mesh": lambda node: shards.rebuilt_mesh(node, self._num_saved_ranks()),
            "path": lambda node: Path(node["text"]),
            "pickle": self._pickle,
            "scalar": lambda node: self.value(node["array"])[()],
            "table": lambda node: tables.rebuilt(self.value(node["table"])),
        }
        if kind not in rebuild:
            raise NotRebuilt(f"this nbgpu does not know {kind!r}, which a newer one has written")
        return rebuild[kind](node)

    def _defaultdict(self, node: Mapping[str, Any]) -> Any:
        pairs = [(self.value(key), self.value(item)) for key, item in node["items"]]
        return defaultdict(self.value(node["factory"]), pairs)

    def _named_device(self, name: str) -> torch.device:
        """Return a device by its name in the description; this rank's own device if there is no such GPU."""
        if name == OWN_DEVICE:
            return self._device
        device = torch.device(name)
        is_there = device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()
        return device if is_there else self._device

    def _complete_tensor(self, tensor: Tensor, node: Mapping[str, Any]) -> None:
        """Give a tensor its gradient and the attributes that a person has set on it."""
        if node["grad"] is not None:
            tensor.grad = self.value(node["grad"])
        if "attributes" in node:
            vars(tensor).update(self.value(node["attributes"]))

    def _array(self, node: Mapping[str, Any]) -> Any:
        flat = self._in_storage(node["form"], torch.device("cpu")).numpy().reshape(-1)
        return flat.view(np.dtype(node["dtype"])).reshape(node["shape"], order=node["order"])

    def _in_storage(self, form: Mapping[str, Any], device: torch.device) -> Tensor:
        """Return the tensor of a form, a view of the storage of its block."""
        block = form["block"]
        shape, stride = tuple(form["shape"]), tuple(form["stride"])
        rebuilt = TensorForm(**{**form, "block": 0, "shape": shape, "stride": stride})
        return tensors.in_storage(rebuilt, None if block is None else self._storage(block, device), device)

    def _storage(self, block: str, device: torch.device) -> torch.UntypedStorage:
        """Return the bytes of a block on a device. Tensors that shared a storage when they were saved get the
        same one."""
        if (block, device) not in self._storages:
            content = self._stored.tensors[block].reshape(-1).view(torch.uint8).to(device)
            self._storages[block, device] = content.untyped_storage()
        return self._storages[block, device]

    def _dtensor(self, node: Mapping[str, Any]) -> Any:
        """Return a DTensor from this rank's own part, or on another number of ranks from pieces of all ranks'
        parts."""
        mesh = self.value(node["mesh"])
        if self._of_all_ranks is None:
            local = self.value(node["local"])
        else:
            local = shards.reshard(self._part_readers, node, mesh.get_rank(), mesh.size())
        return shards.rebuilt_dtensor(node, local, mesh, self.value(node["grad"]))

    def _num_saved_ranks(self) -> int:
        """Return the number of ranks that have saved the variables."""
        return dist.get_world_size() if self._of_all_ranks is None else len(self._part_readers)

    @functools.cached_property
    def _part_readers(self) -> list[Callable[[str], Tensor | None]]:
        """For each rank that has saved, the function that reads its parts of DTensors."""
        assert self._of_all_ranks is not None
        return [_part_reader(stored, self._variables, self._device) for stored in self._of_all_ranks()]

    def _shard(self, module: Any, node: Mapping[str, Any]) -> None:
        """Apply `fully_shard` to a rebuilt model as it was when it was saved."""
        parameters = {name: self.value(part) for name, part in node["parameters"]}
        mesh = self.value(node["mesh"])
        try:
            shards.shard_again(module, parameters, node, mesh, self.value(node["mp_policy"]))
        except Exception as error:
            raise NotRebuilt(f"fully_shard failed on this rank: {type(error).__name__}: {error}") from error

    def _generator(self, node: Mapping[str, Any]) -> torch.Generator:
        generator = torch.Generator(self._named_device(node["device"]))
        generator.set_state(self.value(node["state"]))
        return generator

    def _imported(self, node: Mapping[str, Any]) -> Any:
        """Return a function or class by its module and name.

        Without trust, built-in functions such as `eval` and what the modules of `_RUNS_CODE` define, such as
        `os.system`, are refused by whatever name the folder reaches them: an object that has one as an
        attribute would call it.
        """
        module, name = node["module"], node["name"]
        imported = find_qualified(self._imported_module(module), name)
        if imported is None:
            raise NotRebuilt(f"{module} has no {name} here: is it another version?")
        if not self._trust:
            defined_in = (getattr(imported, "__module__", None) or module).partition(".")[0]
            is_builtin = isinstance(imported, BuiltinFunctionType) and defined_in == "builtins"
            if is_builtin or defined_in.removeprefix("_") in _RUNS_CODE:
                raise NeedsTrust(f"{module}.{name}")
        return imported

    def _imported_module(self, name: str) -> ModuleType:
        """Import a module by its name; without trust only one that this rank has imported, or one of
        `_LIBRARIES`: an import runs the module's code."""
        if name not in sys.modules and not self._trust and name.partition(".")[0] not in _LIBRARIES:
            raise NeedsTrust(f"import {name}")
        try:
            return import_module(name)
        except ImportError as error:
            raise NotRebuilt(f"{name} cannot be imported here: {error}") from error

    def _definition(self, node: Mapping[str, Any]) -> Any:
        """Return a function or class of the notebook: with trust from its source, otherwise the one that the
        rank has defined itself, under the variable's name or, if that is a second name, the source's.

        Raises:
            NeedsTrust: there is no trust, and the rank has no such function or class.
            NotRebuilt: the definition has raised an error.
        """
        definition = self._stored.definitions[node["definition"]]
        if not self._trust:
            present = self._variables.get(definition.name, self._variables.get(definition.defines))
            if getattr(present, "__module__", None) == "__main__":
                return present
            raise NeedsTrust(f"the definition of {definition.name}")
        return self._defined(definition)

    def _defined(self, definition: Definition) -> Any:
        """Run a definition and return the function or class. While it runs, the rank has the saved values of
        the variables that it needs; the rank's own variables are restored afterwards."""
        saved = self._stored.variables
        # Base classes, decorators and defaults are looked up while the definition runs.
        needed = {
            name: self.value(saved[name]) for name in definitions.needed_at_once(definition) if name in saved
        }
        absent = object()
        names = {*needed, definition.name, definition.defines}
        before = {name: self._variables.get(name, absent) for name in names}
        self._variables.update(needed)
        try:
            definitions.define([definition])
            return self._variables[definition.name]
        except Exception as error:
            raise NotRebuilt(
                f"{definition.name} cannot be defined: {type(error).__name__}: {error}"
            ) from error
        finally:
            for name, value in before.items():
                if value is absent:
                    self._variables.pop(name, None)
                else:
                    self._variables[name] = value

    def _restore_state(self, made: Any, node: Mapping[str, Any]) -> None:
        """Give an object its attributes, by its own `__setstate__` if it has one."""
        state = {self.value(name): self.value(part) for name, part in node["state"]}
        with _person_code(type(made)):
            if hasattr(made, "__setstate__"):
                made.__setstate__(state)
            else:
                vars(made).update(state)

    def _ddp(self, node: Mapping[str, Any]) -> DistributedDataParallel:
        """Return a DDP object around the rebuilt module, with the buckets in their saved order and without a
        collective."""
        module = self.value(node["module"])
        arguments = self.value(node["arguments"])
        if node["has_device_ids"] and self._device.type == "cuda":
            arguments = {**arguments, "device_ids": [self._device]}
        # All ranks have the parameters that they had; DDP's own synchronisation would be a collective.
        ddp = DistributedDataParallel.__new__(DistributedDataParallel)
        torch_private.initialise_ddp(ddp, module, node["bucket_order"], **{**arguments, "init_sync": False})
        ddp.training = node["training"]
        return ddp

    def _pickle(self, node: Mapping[str, Any]) -> Any:
        """Return the value of a pickle; NeedsTrust without trust, because unpickling can run any code."""
        if not self._trust:
            raise NeedsTrust("a pickle")
        try:
            return _NodeUnpickler(io.BytesIO(self._stored.pickles[node["pickle"]]), self.value).load()
        except (NeedsTrust, NotRebuilt):
            raise
        except Exception as error:
            raise NotRebuilt(f"cannot be unpickled here: {type(error).__name__}: {error}") from error


def _part_reader(
    stored: Stored, variables: dict[str, Any], device: torch.device
) -> Callable[[str], Tensor | None]:
    """Return a function that reads one rank's part of a DTensor by its path in the description; None if that
    rank has none."""
    parts = {node["path"]: node["local"] for node in stored.nodes if node.get("is") == "dtensor"}

    def part(path: str) -> Tensor | None:
        if path not in parts:
            return None
        # Each part has a Rebuilder of its own, because a Rebuilder keeps all values that it has made.
        tensor: Tensor = Rebuilder(stored, variables, device, trust=False).value(parts[path])
        return tensor

    return part


class _NodeUnpickler(pickle.Unpickler):
    """Opens a pickle, and takes the values of the nodes that it refers to from `value`."""

    def __init__(self, file: Any, value: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._value = value

    def persistent_load(self, node: Any) -> Any:
        return self._value({"#": node})


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators that cells draw from to a saved state."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
