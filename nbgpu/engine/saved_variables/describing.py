"""Describe values as JSON and tensors.

A value that is no plain JSON value becomes a node, a JSON object in a list, and `{"#": 3}` refers to node 3.
An object that two variables share is one node, so that an optimizer still has the parameters of its model
after loading. Objects of other kinds are pickled; the pickle refers to the nodes of the objects in it.
"""

from __future__ import annotations

import base64
import functools
import io
import math
import pickle
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from nbgpu.engine.checkpoints import tensor_files
from nbgpu.engine.group import ddp_objects, torch_private
from nbgpu.engine.ipykernel import shell
from nbgpu.engine.saved_variables import shards, tables
from nbgpu.engine.saved_variables.shards import Unsupported
from nbgpu.protocol.records import Definition
from nbgpu.serialization import sources, tensors, unpicklable
from nbgpu.serialization.tensors import Source, TensorForm

OWN_DEVICE = "own"
"""Stands for the rank's device, which may be another one where the variables are loaded."""
_OBJECTS = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, Dataset, Sampler, DataLoader)
"""Classes of torch whose objects are described by their class and their attributes."""
_SEQUENCES = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_CACHED = type(functools.cache(len))
"""The class of functions that keep their results."""
_REMADE_ARGUMENTS = ("device_ids", "output_device")
"""The arguments of DDP that follow from the rank's device."""


class Block:
    """Bytes of one or several tensors, as one tensor of the file.

    Args:
        size_bytes: how many bytes there are.
        source: the bytes, or a function that writes them to a buffer.
        form: the form of the only tensor that has these bytes, in the order of its elements; None where
            several tensors share them, and for types that the file's format does not know.
    """

    def __init__(self, size_bytes: int, source: Source, form: TensorForm | None) -> None:
        self.form = form
        self._size_bytes = size_bytes
        self._source = source

    def outline(self) -> Tensor:
        """Return a tensor on torch's device 'meta' with the dtype and the shape of the tensor in the file."""
        if self.form is None:
            return torch.empty(self._size_bytes, dtype=torch.uint8, device="meta")
        return torch.empty(self.form.shape, dtype=getattr(torch, self.form.dtype), device="meta")

    def content(self) -> Tensor:
        """Return the bytes as a tensor (size_bytes,) of uint8 on the CPU."""
        source = self._source
        if not isinstance(source, memoryview):
            room = bytearray(self._size_bytes)
            source(memoryview(room))
            source = memoryview(room)
        return torch.frombuffer(source, dtype=torch.uint8)


class Describer:
    """Describes variables, one after the other.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.variables: dict[str, Any] = {}
        self.nodes: list[dict[str, Any]] = []
        self.definitions: list[Definition] = []
        self.pickles: list[bytes] = []
        self.notes: list[str] = []
        self._device = device
        self._tensors: list[tuple[str, Tensor]] = []
        """The path and the tensor, by the number in a tensor's node."""
        self._lists: list[list[Any]] = [self.nodes, self.definitions, self.pickles, self._tensors, self.notes]
        """The lists that grow with each value."""
        self._node_of: dict[int, int] = {}
        """The number of an object's node, by the object's id."""
        self._alive: list[Any] = []
        """The objects with these ids, so that no other object gets one of the ids."""

    def add(self, name: str, value: Any) -> list[str]:
        """Describe a variable.

        Returns:
            A line for each part that cannot be described; then the whole variable is left out.
        """
        lengths = [len(grown) for grown in self._lists]
        try:
            self.variables[name] = self.described(value, name)
            return []
        except (Unsupported, RecursionError):
            # Go back to the state before.
            for grown, length in zip(self._lists, lengths, strict=True):
                del grown[length:]
            self._node_of = {key: node for key, node in self._node_of.items() if node < len(self.nodes)}
        lines = unpicklable.described({name: value}, self._refusal, "cannot be saved", "Save")
        made_by = sources.statement_that_made(name, shell.current())
        return [*lines[:-1], f"{lines[-1]}. Made by: {made_by}" if made_by else lines[-1]]

    def add_random_state(self) -> Any:
        """Describe the states of the generators that cells draw from."""
        state = {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if self._device.type == "cuda" else None,
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }
        return self.described(state, "random")

    def blocks(self) -> dict[str, Block]:
        """Return the bytes of all tensors by their names in the file, and put the form of each tensor (shape,
        strides, and the name of the block with its bytes) into its node. Call once, after all values were
        added.

        Tensors that share a storage share a block, so that they still do after loading.
        """
        forms, sources_of = tensors.take_apart([tensor for _, tensor in self._tensors], 0)
        users: dict[int, list[int]] = {}
        for number, form in enumerate(forms):
            # A tensor without elements has no block.
            if form.block >= 0:
                users.setdefault(form.block, []).append(number)
        named: dict[str, Block] = {}
        names: dict[int, str] = {}
        for block, numbers in users.items():
            size_bytes, source = sources_of[block]
            form = forms[numbers[0]]
            is_alone = len(numbers) == 1 and _fills(form, size_bytes)
            names[block] = _free_name(self._tensors[numbers[0]][0], named)
            named[names[block]] = Block(size_bytes, source, form if is_alone else None)
        for node in self.nodes:
            if "tensor" in node:
                form = forms[node.pop("tensor")]
                node["form"] = {**asdict(form), "block": names.get(form.block)}
        return named

    def described(self, value: Any, path: str) -> Any:
        """Return a value as JSON, which may be a reference to a node.

        Args:
            value: the value.
            path: the expression that leads to the value, such as 'model.conv.weight', after which tensors are
                named in the file.

        Raises:
            Unsupported: the value cannot be described.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if id(value) in self._node_of:
            return {"#": self._node_of[id(value)]}
        # The number is given before the content is described, because a value may refer to itself.
        number = len(self.nodes)
        self.nodes.append({})
        self._node_of[id(value)] = number
        self._alive.append(value)
        self.nodes[number] = self._node(value, path)
        return {"#": number}

    def has_description(self, value: Any) -> bool:
        """Return whether an object within a pickle becomes a node of its own."""
        return (
            (isinstance(value, Tensor) and tensors.is_plain(value))
            or (isinstance(value, np.ndarray) and _is_plain_array(value))
            or (isinstance(value, FunctionType | type | _CACHED) and value.__module__ == "__main__")
            or isinstance(value, torch.Generator)
            or shards.has_description(value)
            or is_described_by_attributes(type(value))
        )

    def _node(self, value: Any, path: str) -> dict[str, Any]:
        """Return the node of a value, by the first kind of description that fits; the last resort is a
        pickle."""
        kind = type(value)
        if isinstance(value, Tensor) and getattr(value, "_is_flat_param", False):
            raise Unsupported(
                "it is a parameter of FullyShardedDataParallel (FSDP1). Save a variable with what its optim_state_dict "
                "returns",
                about=value,
            )
        for describe in (
            self._describe_plain_value,
            self._describe_container,
            self._describe_array,
            self._describe_code,
        ):
            if (node := describe(value, kind, path)) is not None:
                return node
        if isinstance(value, DistributedDataParallel):
            return self._describe_ddp(value, path)
        # Before the description by attributes, which would take a model under FSDP for an ordinary one.
        if (node := shards.described(self, value, path)) is not None:
            if (attributes := node.pop("attributes", None)) is not None:
                node["state"] = self._described_state(value, attributes, path)
            return node
        if unpicklable.must_stay(value) or _is_compiled(kind):
            raise Unsupported(_reason_not_saved(kind))
        if is_described_by_attributes(kind):
            return self._describe_object(value, kind, path)
        if (table := tables.described(value)) is not None:
            return {"is": "table", "table": self.described(table, path)}
        return {"is": "pickle", "pickle": self._pickled(value, path)}

    def _describe_plain_value(self, value: Any, kind: type, path: str) -> dict[str, Any] | None:
        """Return the node of a number, of bytes, a range, a dtype, a device, a path or a scalar of NumPy;
        None for others."""
        if kind is float:
            return {"is": "float", "text": repr(value)}
        if kind is complex:
            return {
                "is": "complex",
                "parts": [self.described(part, path) for part in (value.real, value.imag)],
            }
        if kind in (bytes, bytearray):
            return {"is": kind.__name__, "base64": base64.b64encode(value).decode()}
        if kind in (range, slice):
            parts = (value.start, value.stop, value.step)
            return {"is": kind.__name__, "parts": [self.described(part, path) for part in parts]}
        if kind is torch.dtype:
            return {"is": "dtype", "name": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"is": "device", "name": self._device_name(value)}
        if isinstance(value, PurePath) and kind.__module__.startswith("pathlib"):
            return {"is": "path", "text": str(value)}
        if isinstance(value, np.generic) and value.dtype.kind in "biufcmM":
            return {"is": "scalar", "array": self.described(np.asarray(value), path)}
        return None

    def _describe_container(self, value: Any, kind: type, path: str) -> dict[str, Any] | None:
        """Return the node of a list, tuple, set, size or dict; None for others, and for objects of their
        subclasses."""
        if kind in _SEQUENCES:
            items = [self.described(item, f"{path}[{index}]") for index, item in enumerate(value)]
            return {"is": _SEQUENCES[kind], "items": items}
        if kind in (dict, OrderedDict, defaultdict):
            pairs = [
                [
                    self.described(key, f"{path} (a key)"),
                    self.described(part, f"{path}[{index if isinstance(key, Tensor) else repr(key)}]"),
                ]
                for index, (key, part) in enumerate(value.items())
            ]
            factory = {"factory": self.described(value.default_factory, path)} if kind is defaultdict else {}
            return {"is": kind.__name__, "items": pairs, **factory}
        return None

    def _describe_array(self, value: Any, kind: type, path: str) -> dict[str, Any] | None:
        """Return the node of a tensor, an array of NumPy or a generator of torch; None for others."""
        if isinstance(value, Tensor) and tensors.is_plain(value):
            node = {
                "is": "tensor",
                "tensor": self._add_tensor(value, path),
                "device": self._device_name(value.device),
                "grad": self.described(value.grad if value.is_leaf else None, f"{path}.grad"),
            }
            if attributes := vars(value):
                node["attributes"] = self.described(dict(attributes), path)
            return node
        if kind is np.ndarray and _is_plain_array(value):
            order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            return {
                "is": "array",
                "tensor": self._add_tensor(_as_tensor(value, order), path),
                "dtype": value.dtype.str,
                "shape": list(value.shape),
                "order": order,
            }
        if isinstance(value, torch.Generator):
            state = self.described(value.get_state(), path)
            return {"is": "generator", "device": self._device_name(value.device), "state": state}
        return None

    def _describe_code(self, value: Any, kind: type, path: str) -> dict[str, Any] | None:
        """Return the node of a module, a function or a class; None for others. Code of the notebook is saved
        as source, other code by its module and name."""
        if isinstance(value, ModuleType):
            return {"is": "module", "name": value.__name__}
        if not isinstance(value, FunctionType | BuiltinFunctionType | type | _CACHED):
            return None
        module, name = getattr(value, "__module__", None) or "builtins", value.__qualname__
        if module != "__main__":
            # Loading looks the name up: it has to lead to the same object.
            if find_qualified(sys.modules.get(module), name) is not value:
                raise Unsupported(f"{module} has no {name}, by which it would be found")
            return {"is": "imported", "module": module, "name": name}
        held_by = path if shell.current().user_ns.get(path) is value else name
        definition = sources.find(held_by, value, shell.current())
        if definition is None:
            raise Unsupported("its source is not known. Define it in a cell, at the left margin")
        self.definitions.append(definition)
        return {"is": "definition", "definition": len(self.definitions) - 1}

    def _describe_ddp(self, value: DistributedDataParallel, path: str) -> dict[str, Any]:
        """Return the node of a DDP object: its module, the arguments of its constructor, and the order of its
        buckets."""
        arguments = dict(ddp_objects.all_made()[value][1])
        if arguments.get("process_group") is not None or arguments.get("device_mesh") is not None:
            raise Unsupported("it is on a group of your own. Make it again after loading")
        has_device_ids = arguments.get("device_ids") is not None
        for name in _REMADE_ARGUMENTS:
            arguments.pop(name, None)
        if torch_private.has_comm_hook(value):
            self.notes.append(f"{path}: its communication hook is not saved. Register it again after loading")
        module = self.described(value.module, f"{path}.module")
        if arguments.get("broadcast_buffers", True):
            # DDP gives all ranks the buffers of rank 0 before each forward pass, so the ranks' buffers are
            # not compared.
            for buffer in value.module.buffers():
                self.nodes[self._node_of[id(buffer)]]["of_rank_0"] = True
        return {
            "is": "ddp",
            "module": module,
            "arguments": self.described(arguments, path),
            "has_device_ids": has_device_ids,
            "bucket_order": torch_private.bucket_order(value),
            "training": value.training,
        }

    def _describe_object(self, value: Any, kind: type, path: str) -> dict[str, Any]:
        """Return the node of an object by its class and attributes, or by a pickle if its state is no
        dict."""
        try:
            state = value.__getstate__()
        except Exception as error:
            raise Unsupported(str(error)) from error
        if state is not None and not isinstance(state, dict):
            return {"is": "pickle", "pickle": self._pickled(value, path)}
        made_of = self.described(kind, f"{path}.__class__")
        items = self._described_state(value, shards.own_attributes(value, state or {}), path)
        return {"is": "object", "class": made_of, "state": items}

    def _described_state(self, owner: Any, state: Mapping[Any, Any], path: str) -> list[list[Any]]:
        return [
            [self.described(name, path), self._attribute(owner, name, part, path)]
            for name, part in state.items()
        ]

    def _attribute(self, owner: Any, name: str, part: Any, path: str) -> Any:
        """Describe an attribute of an object; parameters, buffers and submodules of a module get the names of
        state_dict()."""
        if isinstance(owner, nn.Module) and name in ("_parameters", "_buffers", "_modules"):
            # Named as in state_dict(): model.conv.weight.
            items = [[key, self.described(member, f"{path}.{key}")] for key, member in part.items()]
            self.nodes.append({"is": type(part).__name__, "items": items})
            return {"#": len(self.nodes) - 1}
        return self.described(part, f"{path}.{name}")

    def _pickled(self, value: Any, path: str) -> int:
        """Pickle an object; return the pickle's number. Objects in it that can be described become nodes."""
        stream = io.BytesIO()
        try:
            _NodePickler(stream, self, path).dump(value)
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(f"{type(error).__name__}: {error}") from error
        self.pickles.append(stream.getvalue())
        return len(self.pickles) - 1

    def _add_tensor(self, tensor: Tensor, path: str) -> int:
        """Keep a tensor for the file; return its number."""
        self._tensors.append((path, tensor))
        self._alive.append(tensor)
        return len(self._tensors) - 1

    def _device_name(self, device: torch.device) -> str:
        is_own = device.type == self._device.type and device.index in (None, self._device.index)
        return OWN_DEVICE if is_own else str(device)

    def _refusal(self, value: Any) -> Exception | None:
        """Return the reason why a value cannot be saved; None if it can."""
        scratch = Describer(self._device)
        try:
            scratch.described(value, "it")
        except (Unsupported, RecursionError) as error:
            # `unpicklable` has explanations for the errors of pickle and of objects themselves.
            return error.__cause__ if isinstance(error.__cause__, Exception) else error
        return None


class _NodePickler(pickle.Pickler):
    """Pickles an object, and refers to the nodes of the objects within it that have a description."""

    def __init__(self, file: Any, describer: Describer, path: str) -> None:
        super().__init__(file, protocol=5)
        self._describer = describer
        self._path = path

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of the node that stands for an object in the pickle; None to pickle the object
        itself."""
        if not self._describer.has_description(value):
            return None
        node: int = self._describer.described(value, self._path)["#"]
        return node


def find_qualified(module: ModuleType | None, name: str) -> Any:
    """Return the object with a qualified name, such as 'Outer.Inner', in a module; None if there is none."""
    return functools.reduce(lambda owner, inner: getattr(owner, inner, None), name.split("."), module)


def is_described_by_attributes(kind: type) -> bool:
    """Return whether objects of a class are described by the class and their attributes, as pickle does it
    for classes without pickling methods of their own."""
    if (
        issubclass(kind, BaseException)
        or hasattr(kind, "__getnewargs__")
        or hasattr(kind, "__getnewargs_ex__")
    ):
        return False
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return False
    if issubclass(kind, _OBJECTS):
        return True
    # Objects of a class that extends a built-in one have contents besides their attributes.
    return kind.__module__ == "__main__" and all(
        base is object or base.__module__ != "builtins" for base in kind.__mro__
    )


def _is_compiled(kind: type) -> bool:
    return kind.__module__ == "torch._dynamo.eval_frame"


def _reason_not_saved(kind: type) -> str:
    """Return the reason why objects of a class cannot be saved, and what to save instead."""
    if _is_compiled(kind):
        return "it is compiled. Save the module that was compiled: its _orig_mod"
    if kind.__name__ == "FullyShardedDataParallel":
        return "it is of FSDP1. Save a variable with a full state_dict(), or use fully_shard (FSDP2)"
    return "it belongs to the process group of the ranks"


def _is_plain_array(value: np.ndarray[Any, Any]) -> bool:
    """Return whether an array holds numbers, dates or texts, and no Python objects."""
    return value.dtype.kind in "biufcmMSU" and not value.dtype.hasobject and type(value) is np.ndarray


def _as_tensor(array: np.ndarray[Any, Any], order: Any) -> Tensor:
    """Return the bytes of an array as a flat tensor, with the array's dtype if torch has it, else as
    uint8."""
    flat = np.ascontiguousarray(array.reshape(-1, order=order))
    # torch warns about memory that it must not write to.
    if not flat.flags.writeable:
        flat = flat.copy()
    if flat.dtype.isnative and isinstance(getattr(torch, flat.dtype.name, None), torch.dtype):
        return torch.from_numpy(flat)
    return (
        torch.from_numpy(flat.view(np.uint8))
        if flat.nbytes
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _fills(form: TensorForm, size_bytes: int) -> bool:
    """Return whether a tensor has all bytes of its block in order, and a dtype that safetensors knows. The
    file then has the block with the shape and dtype of the tensor, and otherwise as uint8."""
    dtype = getattr(torch, form.dtype)
    outline = torch.empty(form.shape, dtype=dtype, device="meta")
    return (
        tensor_files.has_name(dtype)
        and form.offset == 0
        and outline.nbytes == size_bytes
        and tuple(outline.stride()) == tuple(form.stride)
    )


def _free_name(path: str, taken: Mapping[str, Any]) -> str:
    """Return the path as the name of a tensor in the file, with a number if another tensor has the name."""
    name, number = path, 2
    while name in taken:
        name, number = f"{path} ({number})", number + 1
    return name
