"""Records when this rank begins and ends collectives, waits and passes in a person's cell, for a timeline.

While a cell is recorded, wrappers of ProcessGroup's methods that begin collectives, `Work.wait`, DDP's
forward pass, `torch.autograd.backward` and optimizers record when these begin and end. The wrappers are
removed after the cell. Only DDP objects that had no communication hook keep one in Python, which averages
gradients as DDP does: DDP itself would begin these collectives in C++, unseen by the wrappers. Functional
collectives, which DTensor and compiled code call, are begun in C++ too, and not recorded.

The function `step` that a person has defined in a cell is timed here, too.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nbgpu.engine.group import ddp_objects, group, simulated_ddp, simulated_link, straggler, torch_private
from nbgpu.engine.group.simulated_ddp import Hook
from nbgpu.engine.group.simulated_queue import HeldWork
from nbgpu.engine.ipykernel import shell
from nbgpu.engine.model.moments import Anchors, Moment
from nbgpu.machine.clock import clock_id

MAX_COLLECTIVES = 500
"""Older ones are dropped, so that the memory is bounded, and a figure of all can be drawn."""
_MAX_MARKS = 2000
_MESSAGES = ("send", "recv", "recv_anysource")
_FAKE = "fake"
"""torch's backend without communication."""


@dataclass(slots=True)
class _Collective:
    """The record of one collective: when this rank began it, waited for it, and had its result."""

    operation: str
    group: str
    number: int
    """Counted in its group from the beginning of the cell."""
    num_bytes: int
    begun: Moment
    arrived: Moment | None = None
    """When the rank had the result; None until then."""
    wait_begun: Moment | None = None
    """When the rank began to wait for the result; None if it did not call `wait`."""
    wait_ended: Moment | None = None
    has_failed: bool = False
    """Whether the wait has raised an exception, or has not ended yet."""


class _Notes:
    """The records of one cell: its parts (forward, backward, optimizer and the rest) and its collectives.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = Anchors(device).note()
        self._marks: deque[tuple[str, Moment]] = deque(maxlen=_MAX_MARKS)
        self._num_marks = 0
        """The number of all marks of the cell, also of those that `_marks` has dropped."""
        self._parts = ["other"]
        """The parts that have begun and not ended, the innermost one last."""
        self._collectives: deque[_Collective] = deque()
        self._last_number_by_group: Counter[str] = Counter()
        """The number of the newest collective of each group (`_Collective.number`)."""
        # `Work` objects and records refer to each other by id(): a reference would keep a Work's tensors
        # alive. The second mapping finds the entry of the first when the oldest record is dropped.
        self._record_by_work_id: dict[int, _Collective] = {}
        self._work_id_by_record_id: dict[int, int] = {}
        self._lock = threading.Lock()
        self._num_collectives = 0
        """The number of all collectives of the cell, also of those whose records were dropped."""
        self.unseen: set[int] = set()
        """The ids of DDP objects with a communication hook in C++, whose collectives are not recorded."""
        self._ended: Moment | None = None
        self._mark("other")

    def _mark(self, part: str) -> None:
        self._marks.append((part, Moment(self._device)))
        self._num_marks += 1

    def enter(self, part: str) -> None:
        if _is_main():
            self._parts.append(part)
            self._mark(part)

    def leave(self, part: str) -> None:
        """End a part of the cell, and the parts inside it that an error has ended without `leave`."""
        if _is_main() and part in self._parts[1:]:
            while self._parts.pop() != part:
                pass
            self._mark(self._parts[-1])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record the time inside the context as a part of the cell."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def begin(self, operation: str, of_group: Any, num_bytes: int) -> _Collective | None:
        """Record that this rank begins a collective of a process group; drop the oldest record if there are
        too many. Return the record, or None for a group of this rank alone, in which nobody waits."""
        # A rank that is slowed down on purpose sleeps here, so that it begins the collective late.
        straggler.catch_up()
        if of_group.size() == 1:
            return None
        name = f"{of_group.group_name} of {of_group.size()}"
        with self._lock:
            self._last_number_by_group[name] += 1
            record = _Collective(
                operation, name, self._last_number_by_group[name], num_bytes, Moment(self._device)
            )
            self._num_collectives += 1
            self._collectives.append(record)
            if len(self._collectives) > MAX_COLLECTIVES:
                oldest = self._collectives.popleft()
                work_id = self._work_id_by_record_id.pop(id(oldest), None)
                # Another work may have the address, and so the id, of one that is gone.
                if work_id is not None and self._record_by_work_id.get(work_id) is oldest:
                    del self._record_by_work_id[work_id]
        return record

    def attach(self, record: _Collective | None, work: Any) -> None:
        """Attach a record to the Work object of its collective, to record the end by a callback and the wait
        for it (`pop_record`)."""
        if work is None:
            return
        if record is None:
            self.pop_record(work)  # that of a Work which is gone, and had this one's address
            return
        with self._lock:
            self._record_by_work_id[id(work)] = record
            self._work_id_by_record_id[id(record)] = id(work)
        # The Work of a message between two ranks has no future.
        with suppress(RuntimeError, NotImplementedError):
            work.get_future().add_done_callback(lambda _: self._arrive(record))

    def _arrive(self, record: _Collective) -> None:
        record.arrived = Moment(self._device)

    @contextmanager
    def waiting(self, record: _Collective | None) -> Iterator[None]:
        """Record when the rank begins and ends to wait for a collective, which is inside the context, and
        whether the wait fails. Waits on other threads than the main one are not recorded."""
        if record is None or not _is_main():
            yield
            return
        record.wait_begun = Moment(self._device)
        record.has_failed = True  # until the wait has ended without an exception
        try:
            yield
            record.has_failed = False
        finally:
            record.wait_ended = Moment(self._device)

    def pop_record(self, work: Any) -> _Collective | None:
        """Detach the record of a Work object and return it; None if there is none."""
        with self._lock:
            record = self._record_by_work_id.pop(id(work), None)
            if record is not None:
                self._work_id_by_record_id.pop(id(record), None)
        return record

    def end(self) -> None:
        self._ended = Moment(self._device)

    def read(self) -> dict[str, Any]:
        """Wait until the device has done the cell's work; return all records, with times in seconds of the
        host's monotonic clock."""
        assert self._ended is not None, "the cell has ended"
        self._ended.wait()

        def at_s(moment: Moment | None) -> float | None:
            return None if moment is None else moment.at_s(self._anchor)

        return {
            "clock": clock_id(),
            "ended_s": at_s(self._ended),
            "marks": [(part, at_s(moment)) for part, moment in self._marks],
            "num_marks": self._num_marks,
            "collectives": [
                {
                    "operation": c.operation,
                    "key": f"{c.operation} {c.number} in group {c.group}",
                    "num_bytes": c.num_bytes,
                    "came_s": at_s(c.begun),
                    "arrived_s": at_s(c.arrived),
                    "since_s": at_s(c.wait_begun),
                    "until_s": at_s(c.wait_ended),
                    "has_failed": c.has_failed,
                }
                for c in self._collectives
            ],
            "num_collectives": self._num_collectives,
            "num_unseen": len(self.unseen),
        }


_now: _Notes | None = None
_last: _Notes | None = None


@contextmanager
def noted() -> Iterator[None]:
    """Record the collectives, waits and passes of the cell that runs in the context."""
    global _now, _last
    with _wrapped():
        _now = notes = _Notes(group.membership().device)
        try:
            yield
        finally:
            _now, _last = None, None
            notes.end()
            _last = notes


def take() -> dict[str, Any] | None:
    """Return the records of the last cell that was recorded, once; None if there are none."""
    global _last
    taken, _last = _last, None
    return None if taken is None else taken.read()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _wrapped() -> Iterator[None]:
    """Wrap the methods of torch that begin or wait for collectives, and its passes, inside the context."""
    with ExitStack() as stack:

        def wrap(owner: Any, name: str, note: Callable[..., Any]) -> None:
            """Replace a method until the end of the context. While a cell is recorded, `note` is called with
            the notes, the method and its arguments, except for nbgpu's own collectives."""
            original = getattr(owner, name)

            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                notes = None if simulated_link.is_exempt() else _now
                return original(*args, **kwargs) if notes is None else note(notes, original, *args, **kwargs)

            # vars(), because getattr() of a class returns another object for a method of C++, which cannot be
            # put back.
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, call)

        for name, (operation, argument) in simulated_link.COLLECTIVES.items():
            if hasattr(dist.ProcessGroup, name):  # versions of torch lack some
                wrap(dist.ProcessGroup, name, partial(_note_collective, operation, argument))
        for name in _MESSAGES:
            wrap(dist.ProcessGroup, name, partial(_note_collective, name, 0))
        for work in (dist.Work, HeldWork):
            wrap(work, "wait", _note_wait)
        wrap(dist, torch_private.BROADCAST_BUFFERS, _note_broadcast)
        wrap(DistributedDataParallel, "forward", _note_forward)
        wrap(torch.autograd, "backward", _note_backward)
        for hook in (
            register_optimizer_step_pre_hook(lambda *_: _enter("optimizer")),
            register_optimizer_step_post_hook(lambda *_: _leave("optimizer")),
        ):
            stack.callback(hook.remove)
        yield


def _enter(part: str) -> None:
    if _now is not None:
        _now.enter(part)


def _leave(part: str) -> None:
    if _now is not None:
        _now.leave(part)


def _note_collective(
    operation: str,
    argument: int,
    notes: _Notes,
    method: Callable[..., Any],
    process_group: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a method of ProcessGroup that begins a collective or a message; record when it begins and ends.

    Args:
        operation: the kind of collective.
        argument: the position of the tensors whose bytes count; -1 for none.
        notes: the notes of the cell.
        method: the method.
        process_group, args, kwargs: the arguments of the method.
    """
    num_bytes = simulated_link.num_bytes_of(args[argument]) if 0 <= argument < len(args) else 0
    record = notes.begin(operation, process_group, num_bytes)
    work = method(process_group, *args, **kwargs)
    notes.attach(record, work)
    return work


def _note_wait(notes: _Notes, wait: Callable[..., Any], work: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `Work.wait`, and record when the rank waits for the collective."""
    with notes.waiting(notes.pop_record(work)):
        return wait(work, *args, **kwargs)


def _note_broadcast(
    notes: _Notes,
    broadcast: Callable[..., Any],
    process_group: Any,
    tensors: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call the function with which DDP broadcasts its buffers, and its constructor the parameters; record it
    as a collective for which the rank waits."""
    record = notes.begin("broadcast", process_group, simulated_link.num_bytes_of(tensors))
    with notes.waiting(record):
        return broadcast(process_group, tensors, *args, **kwargs)


def _note_forward(
    notes: _Notes, forward: Callable[..., Any], ddp: DistributedDataParallel, /, *args: Any, **kwargs: Any
) -> Any:
    """Run DDP's forward pass and record its time; first attach a hook in Python that sends the buckets."""
    # With a simulated link every DDP object has a hook in Python already.
    if not simulated_link.is_installed() and not attach_replaceable_hook(ddp):
        notes.unseen.add(id(ddp))
    with notes.part("forward"):
        return forward(ddp, *args, **kwargs)


def _note_backward(notes: _Notes, backward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.backward`, and record its time."""
    with notes.part("backward"):
        return backward(*args, **kwargs)


class _Replaceable:
    """A communication hook that averages gradients as DDP does without a hook, until `replace` sets another
    hook. It is replaceable because DDP takes only one hook, and the person may register one later.

    Args:
        group: the process group of the DDP object.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._chosen: tuple[Any, Hook] | None = None

    def replace(self, state: Any, hook: Hook) -> None:
        self._chosen = state, hook

    def send(self, bucket: Any) -> torch.futures.Future[Tensor]:
        if self._chosen is None:
            return simulated_ddp.average(self._group, bucket)
        state, hook = self._chosen
        return hook(state, bucket)


_hooks: WeakKeyDictionary[DistributedDataParallel, _Replaceable] = WeakKeyDictionary()
_is_installed = False


def attach_replaceable_hook(ddp: DistributedDataParallel) -> bool:
    """Attach a replaceable hook to a DDP object that has no communication hook.

    Returns:
        Whether the object has a hook in Python now; False if it has one in C++, chosen by a person.
    """
    if torch_private.has_comm_hook(ddp):
        return True
    if dist.get_backend(ddp.process_group) == _FAKE:
        return False
    _allow_replacement()
    hook = _Replaceable(ddp.process_group)
    _hooks.pop(ddp, None)
    try:
        # A lambda, because torch refuses a hook whose annotations are strings, as those of this module are.
        ddp.register_comm_hook(None, lambda _, bucket: hook.send(bucket))
    except RuntimeError:
        torch_private.forget_refused_hook(ddp)
        return False
    _hooks[ddp] = hook
    return True


def _allow_replacement() -> None:
    """Wrap DDP's methods that register hooks, so that a person's hook replaces the one that was attached
    here."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def register_or_replace(self: DistributedDataParallel, state: Any, hook: Hook) -> None:
        """Register a hook, or put it into the replaceable hook that the object has."""
        attached = _hooks.pop(self, None)
        # A DDP object that was initialised again for another group has lost its hook.
        if attached is None or not torch_private.has_comm_hook(self):
            register(self, state, hook)
        else:
            attached.replace(state, hook)
            ddp_objects.note_hook(self, state, hook)

    DistributedDataParallel.register_comm_hook = register_or_replace  # type: ignore[method-assign]
    by_torch = torch_private.builtin_hooks_registrar()

    def register_builtin(self: DistributedDataParallel, kind: Any) -> None:
        if self in _hooks and torch_private.has_comm_hook(self):
            register_or_replace(self, self.process_group, simulated_ddp.in_python(kind))
        else:
            by_torch(self, kind)

    torch_private.replace_builtin_hooks(register_builtin)


def measure_step(num_warm_ups: int, num_steps: int) -> dict[str, Any]:
    """Time calls of the function `step()` that the person has defined in a cell. A collective.

    Args:
        num_warm_ups: calls before those that count.
        num_steps: calls that count.

    Returns:
        `step_s`: the time of each call in seconds, until the device has done its work; `samples`: the number
        that the last call returned, which is the number of samples that this rank has worked on; None if it
        was no number.

    Raises:
        NameError: the rank has no function `step`.
        TypeError: `step` cannot be called.
    """
    names = shell.current().user_ns
    if "step" not in names:
        raise NameError("the cell must define step(), a function without arguments that does one step")
    step = names["step"]
    if not callable(step):
        raise TypeError(f"step is a {type(step).__name__}. It must be a function without arguments")
    device = group.membership().device
    returned = None
    for _ in range(num_warm_ups):
        returned = step()
    _finish(device)
    # Ranks begin together, so that none waits in its first step for the warm-up of another.
    dist.barrier()
    step_s = []
    for _ in range(num_steps):
        begun_s = time.perf_counter()
        returned = step()
        _finish(device)
        step_s.append(time.perf_counter() - begun_s)
    is_number = isinstance(returned, int | float) and not isinstance(returned, bool)
    return {"step_s": step_s, "samples": returned if is_number else None}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
