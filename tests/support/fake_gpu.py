"""Tensors on a GPU that is not there: torch's FakeTensorMode, on any build of torch, and stricter.

Such tensors have shapes and devices, and no values. Where tensors of two devices meet, it raises as CUDA
would.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META = 1, 14
"""The numbers of types of devices, as in torch/headeronly/core/DeviceType.h."""


class _OneDeviceInLists(TorchDispatchMode):
    """Raises where tensors of several devices are joined. FakeTensorMode takes a scalar in host memory for a
    number there, as CUDA does in arithmetic alone."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.stack):
            devices = {tensor.device for tensor in args[0]}
            assert len(devices) == 1, f"{function} gets tensors on {devices}"
        return function(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """Raises where a copy would have the host wait for the GPU, which no CUDA graph can capture either. Where
    it would wait for a value, FakeTensorMode raises, which has none."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            is_blocking = not (kwargs or {}).get("non_blocking", args[2:] == (True,))
            between = {tensor.device.type for tensor in tensors} == {"cpu", "cuda"}
            assert not (between and is_blocking), f"{function} between host and GPU waits"
        return result


@contextmanager
def fake_gpu() -> Iterator[None]:
    """In the block tensors have no values, and may be on `GPU`."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)

    def numpy(tensor: torch.Tensor) -> Any:
        assert tensor.device.type == "cpu", f"{tensor.device} gives no array"
        return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    with (
        _guard(),
        mock.patch.object(torch.cuda, "Event", return_value=event),
        mock.patch.object(torch.Tensor, "numpy", numpy),
        FakeTensorMode(allow_non_fake_inputs=True),
        _OneDeviceInLists(),
    ):
        yield


@contextmanager
def _guard() -> Iterator[None]:
    """Give CUDA the guard of the device 'meta', which does nothing.

    A build for CUDA has a guard, and FakeTensorMode knows how to do without a GPU. A build for the CPU has
    none, and ends the process in C++ where it needs one.
    """
    if torch.version.cuda is not None:
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before
