"""The settings that torch keeps for a whole process or thread, and how a run gets its own.

A cell may change torch's default dtype or device, switch gradients off, or leave an autocast open. Later
cells then compute with these settings, as the person intends. A run is different: `run.toml` determines how
it computes, and a rank that replaces a dead one has none of the cells' settings. So a run begins with the
settings that the process had before its first cell, and the cells' settings are restored afterwards. The
process group is formed under the initial settings, too.

`precision.py` changes a run's settings within these. Some settings can only be read through private names of
torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import overrides
from torch.backends import cuda, cudnn, mkldnn, nnpack, opt_einsum
from torch.utils import _device, _python_dispatch, deterministic

from nbgpu.machine.signals import uninterrupted

_FP32_PRECISIONS = [("generic", "all")] + [
    (backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")
]
"""The operations that have a `fp32_precision` of their own, from torch 2.9 on."""


@dataclass(frozen=True)
class _Setting:
    """A setting of torch: a function that reads its value, and one that sets it."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _autocast(device_type: str) -> dict[str, _Setting]:
    """Return the settings of autocast on one type of device: whether it is on, and its dtype."""
    return {
        f"autocast on {device_type}": _Setting(
            lambda: torch.is_autocast_enabled(device_type),
            lambda enabled: torch.set_autocast_enabled(device_type, enabled),
        ),
        f"dtype of autocast on {device_type}": _Setting(
            lambda: torch.get_autocast_dtype(device_type),
            lambda dtype: torch.set_autocast_dtype(device_type, dtype),
        ),
    }


def _autocast_depth() -> int:
    """Return the number of autocast contexts that are open. torch returns the number only when it changes it,
    so it is raised by one and lowered again."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _set_autocast_depth(depth: int) -> None:
    """Set the number of open autocast contexts: torch drops its cached copies of weights at the end of the
    outermost one only."""
    now = _autocast_depth()
    while now < depth:
        now = torch.autocast_increment_nesting()
    while now > depth:
        now = torch.autocast_decrement_nesting()


def _flushes_denormals() -> bool:
    """Return whether this thread flushes denormal numbers to 0. torch has no function for this, so the
    smallest normal number is halved."""
    return sys.float_info.min / 2 == 0.0


def _none_if_refused(get: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap the getter of an older setting to return None where torch raises because a `fp32_precision`
    contradicts this setting. The `fp32_precision` counts then."""

    def value() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return value


def _fp32_precisions() -> tuple[str, ...]:
    return tuple(torch._C._get_fp32_precision_getter(*operation) for operation in _FP32_PRECISIONS)


def _set_fp32_precisions(precisions: tuple[str, ...]) -> None:
    for operation, precision in zip(_FP32_PRECISIONS, precisions, strict=True):
        torch._C._set_fp32_precision_setter(*operation, precision)


_may_use_onednn = True


def _set_onednn(enabled: bool) -> None:
    torch._C._set_mkldnn_enabled(enabled and _may_use_onednn)


_SETTINGS: dict[str, _Setting] = {
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "default generator": _attribute(torch, "default_generator"),
    "threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "gradients": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly detection": _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda values: torch.autograd.set_detect_anomaly(*values),
    ),
    "deterministic algorithms": _Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda values: torch.use_deterministic_algorithms(values[0], warn_only=values[1]),
    ),
    "filling of uninitialised memory": _attribute(deterministic, "fill_uninitialized_memory"),
    "flushing of denormal numbers": _Setting(_flushes_denormals, torch.set_flush_denormal),
    **_autocast("cpu"),
    **_autocast("cuda"),
    "cache of autocast": _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "depth of autocast": _Setting(_autocast_depth, _set_autocast_depth),
    **{f"cudnn.{name}": _attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")},
    "mkldnn.enabled": _Setting(torch._C._get_mkldnn_enabled, _set_onednn),
    "mkldnn.deterministic": _attribute(mkldnn, "deterministic"),
    "nnpack": _Setting(torch._C._get_nnpack_enabled, nnpack.set_flags),
    "opt_einsum.enabled": _attribute(opt_einsum, "enabled"),
    "opt_einsum.strategy": _attribute(opt_einsum, "strategy"),
    "fp16 sums in matmul": _attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16 sums in matmul": _attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "flash attention": _Setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "efficient attention": _Setting(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "plain attention": _Setting(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "cudnn's attention": _Setting(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "precision of matmul": _Setting(
        _none_if_refused(torch.get_float32_matmul_precision), torch.set_float32_matmul_precision
    ),
    "cudnn.allow_tf32": _Setting(
        _none_if_refused(lambda: cudnn.allow_tf32), lambda allowed: setattr(cudnn, "allow_tf32", allowed)
    ),
}
"""The settings by name, in the order in which they are set."""

if hasattr(torch._C, "_get_fp32_precision_getter"):
    # After the two above, which set some of them.
    _SETTINGS["fp32_precision"] = _Setting(_fp32_precisions, _set_fp32_precisions)


def _read() -> dict[str, Any]:
    return {name: setting.get() for name, setting in _SETTINGS.items()}


def _write(values: Mapping[str, Any]) -> None:
    """Set the settings that differ from these values."""
    for name, setting in _SETTINGS.items():
        # A getter that could not answer gave None (`_none_if_refused`).
        if values[name] is not None and setting.get() != values[name]:
            setting.set(values[name])


_values_at_the_beginning = _read()


def note_beginning() -> None:
    """Take torch's settings as those that runs begin with. Call before the process's first cell."""
    global _values_at_the_beginning
    _values_at_the_beginning = _read()


def note_threads(threads: int) -> None:
    """Take another number of threads as the one that runs begin with."""
    global _values_at_the_beginning
    _values_at_the_beginning = {**_values_at_the_beginning, "threads": threads}


def forbid_onednn() -> None:
    """Switch oneDNN off now, in every run that begins, and when the settings of cells are restored."""
    global _may_use_onednn
    _may_use_onednn = False
    _set_onednn(False)


@dataclass
class _FunctionModes:
    """The open TorchFunctionModes of this thread. The default device is one of them."""

    modes: list[overrides.TorchFunctionMode] = field(default_factory=list)
    default_device: dict[str, Any] = field(default_factory=dict)
    """torch's own record of `set_default_device`."""
    device: torch.device | None = None
    """The device of the innermost `with torch.device(...)`."""

    @classmethod
    def close_all(cls) -> _FunctionModes:
        """Take all open TorchFunctionModes off this thread's stack, and clear torch's record of the default
        device; return them, so that `open` can put them back."""
        # From the innermost to the outermost; `open` pushes them in the opposite order.
        modes = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        # torch keeps them for each thread in a `threading.local`.
        remembered = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", threading.local()).__dict__
        closed = cls(modes[::-1], dict(remembered), getattr(_device, "CURRENT_DEVICE", None))
        remembered.clear()
        _device.CURRENT_DEVICE = None
        return closed

    def open(self) -> None:
        """Open the modes again."""
        for mode in self.modes:
            overrides._push_mode(mode)
        getattr(torch, "_GLOBAL_DEVICE_CONTEXT", threading.local()).__dict__.update(self.default_device)
        _device.CURRENT_DEVICE = self.device


class TorchSettings:
    """torch's settings for one run, which begin as those of a new process.

    A recipe's file runs once and may change some of them. The changes stay with the run, even if it is
    continued after a failure.
    """

    def __init__(self) -> None:
        self._values: Mapping[str, Any] = _values_at_the_beginning
        self._modes = _FunctionModes()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Apply these settings to this thread for a block, and restore the previous ones at its end."""
        stack = ExitStack()
        try:
            # An interrupt halfway would leave a mixture of both.
            with uninterrupted():
                # At the end the stack undoes these steps in reverse order: it keeps the run's settings, drops
                # its cache of cast weights, writes the cells' settings and opens their modes again.
                stack.callback(_FunctionModes.close_all().open)
                stack.enter_context(_python_dispatch._disable_current_modes())
                # Leave inference mode, which marks every tensor that is made in it.
                stack.enter_context(torch.inference_mode(False))
                stack.callback(_write, _read())
                stack.callback(torch.clear_autocast_cache)
                torch.clear_autocast_cache()
                stack.callback(self._note)
                _write(self._values)
                self._modes.open()
            yield
        finally:
            with uninterrupted():
                stack.close()

    def _note(self) -> None:
        """Keep the settings as the run has left them, for its continuation after a failure."""
        self._modes = _FunctionModes.close_all()
        self._values = _read()


@contextmanager
def as_at_the_beginning() -> Iterator[None]:
    """Give a block, or a function that this decorates, the settings of a new process."""
    with TorchSettings().in_force():
        yield
