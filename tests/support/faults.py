"""The one way in which tests make a rank fail."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, Literal

from rows import moment

Action = Literal[
    "raise",
    "raise_in_collective",
    "kill",
    "terminate",
    "segfault",
    "abort",
    "sleep",
    "hold_gil",
    "hold_gil_asleep",
    "hold_gil_for_ever",
    "oom",
]
BadNumber = Literal["nan_loss", "nan_input", "inf_gradient"]

ENDLESS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 100_000,
    "val_every": 0,
}
"""Settings of a run of `autoencoder` that does not end before it is made to."""

_ACTIONS: dict[Action, str] = {
    "raise": "raise ValueError('on purpose')",
    "raise_in_collective": "__import__('torch').distributed.all_gather([], __import__('torch').ones(1))",
    "kill": "__import__('os').kill(__import__('os').getpid(), __import__('signal').SIGKILL)",
    "terminate": "__import__('os').kill(__import__('os').getpid(), __import__('signal').SIGTERM)",
    "segfault": "__import__('os').kill(__import__('os').getpid(), __import__('signal').SIGSEGV)",
    "abort": "__import__('os').abort()",
    "sleep": "__import__('time').sleep(600)",
    "hold_gil": "sum(range(4 * 10**8))",
    # PyDLL, unlike CDLL, keeps the GIL during the call.
    "hold_gil_asleep": "__import__('ctypes').PyDLL(None).usleep(2_500_000)",
    "hold_gil_for_ever": "sum(range(10**15))",
    # More than any address space: the allocator itself refuses.
    "oom": "torch.empty(2**60, dtype=torch.uint8)",
}

_BAD_NUMBERS: dict[BadNumber, str] = {
    "nan_input": "next(iter(batch.values())).view(-1)[0] = float('nan')",
}
_BAD_LOSSES: dict[BadNumber, str] = {
    # A constant: its gradient is finite, and only the loss tells of it.
    "nan_loss": "terms['loss'] = terms['loss'] + float('nan')",
    # The root's value is 0, and its gradient there infinite.
    "inf_gradient": "terms['loss'] = terms['loss'] + (terms['loss'] - terms['loss'].detach()).sqrt()",
}


def at(rank: int, action: Action) -> str:
    """A line of a distributed cell in which one rank does something bad, and the others nothing."""
    return f"if rank == {rank}: {_now(action)}"


def note() -> str:
    """A statement that notes the moment (rows.py), for a fault that the cell itself is."""
    return f"__import__('pathlib').Path({str(moment())!r}).write_text(str(__import__('time').monotonic()))"


def _now(action: Action | BadNumber) -> str:
    """What the rank does: it notes the moment, and then it happens."""
    return f"{note()}; {(_ACTIONS | _BAD_NUMBERS | _BAD_LOSSES)[action]}"


def in_training(rank: int, step: int, action: Action | BadNumber, num_times: int = 1) -> str:
    """A cell after which one rank does something bad in the given step's forward pass of the next run.

    Micro-batches count as steps. With `num_times` the steps after it go the same way.
    """
    before, after = ("pass", _now(action)) if action in _BAD_LOSSES else (_now(action), "pass")
    return f"""
from nbgpu.recipes.autoencoder.recipe import Autoencoder
def _make_faulty(terms_of, calls=[]):
    def faulty(self, model, batch):
        calls.append(1)
        is_due = {step} <= len(calls) < {step + num_times}
        if is_due:
            {before}
        terms, reconstruction = terms_of(self, model, batch)
        if is_due:
            {after}
        return terms, reconstruction
    return faulty
if rank == {rank}:
    _good_terms, Autoencoder._terms = Autoencoder._terms, _make_faulty(Autoencoder._terms)
"""


def in_prediction(rank: int, sample: str, action: Action) -> str:
    """A cell after which one rank does something bad when it comes to this sample of a prediction of
    `autoencoder`."""
    return f"""
from nbgpu.recipes.autoencoder.recipe import Autoencoder
def _make_faulty_prediction(predict):
    def faulty(self, model, device, item, stem):
        if item["name"] == {sample!r}:
            {_now(action)}
        return predict(self, model, device, item, stem)
    return faulty
if rank == {rank}:
    Autoencoder.predict = _make_faulty_prediction(Autoencoder.predict)
"""


def when_pickled(rank: int, action: Action) -> str:
    """A cell that gives the ranks a variable `unlucky`; on one of them something bad happens when it is
    pulled."""
    return f"""
class Unlucky:
    def __reduce__(self):
        if rank == {rank}:
            {_now(action)}
        return int, ()
unlucky = [torch.zeros(10**6), Unlucky()]
"""


class WhenUnpickled:
    """A value that does something bad on the ranks that it is pushed to."""

    def __init__(self, action: Action) -> None:
        self._action: Action = action

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (_now(self._action),)


CHANGE_TORCH = """
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_num_threads(3)
torch.set_float32_matmul_precision("medium")
torch.autograd.set_detect_anomaly(True)
torch.default_generator = torch.Generator().manual_seed(3)
torch.backends.mkldnn.deterministic = True
no_gradients = torch.inference_mode()
no_gradients.__enter__()
half = torch.autocast("cpu", torch.bfloat16)
half.__enter__()
"""
"""A cell that changes what torch keeps for the whole process, in all the ways that change what a run
computes."""

TORCH_IS = """
(torch.get_default_dtype(), torch.get_default_device().type, torch.is_inference_mode_enabled(),
 torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_float32_matmul_precision(),
 torch.is_anomaly_enabled(), torch.default_generator.initial_seed(), torch.backends.mkldnn.deterministic,
 torch.is_autocast_enabled("cpu"), torch.is_grad_enabled())
"""
"""What of it a cell finds."""
TORCH_WAS_CHANGED = "(torch.float64, 'meta', True, True, 3, 'medium', True, 3, True, True, False)"

CHANGE_TORCH_BACK = """
half.__exit__(None, None, None)
no_gradients.__exit__(None, None, None)
torch.backends.mkldnn.deterministic = False
torch.default_generator = torch.random.default_generator
torch.autograd.set_detect_anomaly(False)
torch.set_float32_matmul_precision("highest")
torch.set_num_threads(1)
torch.use_deterministic_algorithms(False)
torch.set_default_device(None)
torch.set_default_dtype(torch.float32)
"""
"""For the ranks that live: one that has come since knows nothing of it."""

MEND = "if '_good_terms' in globals(): Autoencoder._terms = globals().pop('_good_terms')"
"""A cell that takes `in_training` back."""


def busy_for(pid: int, seconds: float) -> None:
    """Keeps a process from doing anything for a while, as an import on a busy host does; returns at once."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()
