"""The types that cross a process boundary: what a rank writes is what the notebook and the disk read.

All are frozen dataclasses of plain values, so that they become JSON and pickle without help. Times named
`time_s` are seconds since the epoch (`time.time()`), comparable between the processes of one host.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from nbgpu.protocol.bounds import MAX_NUMBER, is_time

RunState = Literal[
    "starting",
    "loading packages",
    "loading",
    "training",
    "validating",
    "paused",
    "working out the result",
    "waiting for rank 0",
    "stopping",
    "stopped",
    "finished",
    "failed",
]
"""What a rank, and the run as a whole, is doing. The last three are final. 'loading' is about data and model."""

FINAL_STATES = frozenset({"stopped", "finished", "failed"})
STATES_OF_NO_STEP = frozenset({"loading packages"})
"""States in which a rank does not know yet how many steps were done: it may take another rank's place, or go on from a
checkpoint. The step of such a record says nothing."""

BUSY_STATES = frozenset({"starting", "loading packages", "loading", "working out the result"})
"""States in which a rank may do something by itself while the others wait for it."""

DAMAGE = "damage"
"""Kind of the event that stands for a line of a rank's file that cannot be read. Its step and time say nothing."""

PROFILE_PARTS = ("data", "forward", "backward", "communication", "optimizer", "other", "hidden")
"""What a 'profile' event divides the time of a step into; its detail has each as seconds, such as `data_s`."""

Command = Literal["pause", "resume", "stop"]
"""What a person can ask of a run while it goes on."""

CONTROLLER_PID = "controller.pid"
"""File in the cluster's folder: the controller's process, which the engines cannot be reached without."""

TAKEN = b"taken"
"""What the client answers the engines' parent when it has taken note of a new engine."""

KEPT = "kept"
"""File in the cluster's folder: it has started, and goes on when its notebook's kernel ends."""

CLUSTER_FOLDER = "NBGPU_CLUSTER_FOLDER"
"""Environment variable of a cluster's processes: its private folder."""


def cluster_folder() -> Path | None:
    """The private folder of the cluster that this process belongs to; None where it belongs to none."""
    named = os.environ.get(CLUSTER_FOLDER)
    return Path(named) if named else None


def engine_name(pid: int) -> str:
    """The name under which the engine in this process registers with ipyparallel's controller; no two engines share one."""
    return f"{pid}-{secrets.token_hex(16)}"


def engine_pid(name: str) -> int:
    """The process of the engine that has registered under a name of `engine_name`."""
    return int(name.partition("-")[0])


@dataclass(frozen=True, slots=True)
class Device:
    """One place that a rank can run on: a GPU, or a share of the CPU."""

    kind: Literal["cuda", "cpu"]
    name: str
    """Such as 'NVIDIA H200', or the processor's model name."""
    uuid: str
    """'GPU-...' as the driver names it; empty for a CPU."""
    index: int
    """The driver's number for a GPU (what nvidia-smi shows); the rank's number for a CPU."""
    memory_bytes: int
    """The device's whole memory; for a CPU the host's."""
    compute_capability: float = 0.0
    """NVIDIA's number for what a GPU can do, such as 9.0; 0 for a CPU."""

    def label(self) -> str:
        """A short name for chips and lists, such as 'GPU 0 NVIDIA H200' or 'CPU rank 1'."""
        return f"GPU {self.index} {self.name}" if self.kind == "cuda" else f"CPU rank {self.index}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers that one rank measured at one moment."""

    rank: int
    seq: int
    """Counts this rank's samples and events together, from 0, with no gap."""
    time_s: float
    step: int
    """The optimizer steps that the rank had finished."""
    values: dict[str, float]
    """By series name. Units stand in the names; `loss` and `val_loss` have the recipe's own."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on one rank: a change of state, a checkpoint, a validation, a failure."""

    rank: int
    seq: int
    time_s: float
    step: int
    kind: str
    """'state' (text is the RunState), 'checkpoint', 'note', 'result', 'profile' (where the steps' time went), 'setting' (detail
    has the new values), 'nonfinite' (a step was left out) or 'failure'."""
    text: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last that is known of one rank."""

    rank: int
    state: RunState
    step: int
    device: Device
    silent_s: float
    """Seconds since the rank was last heard: a rank that holds the GIL in C code is silent, not dead."""
    values: dict[str, float]
    """The newest value of every series."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception on one rank."""

    rank: int
    error_type: str
    message: str
    traceback: str


Unheeded = Literal["", "replaced", "caught", "importing"]
"""Why interrupts do not end what a rank runs: its code has replaced the handler of SIGINT, or an interrupt has raised
KeyboardInterrupt there and the code went on, or it imports a part of torch. Empty where nothing of that is known."""


@dataclass(frozen=True, slots=True)
class MainThreadState:
    """What a rank's main thread does at one moment."""

    doing: Literal["idle", "cell", "call", "run"]
    """Between cells, in a cell, in a function that `Cluster.apply` sent, or in a training run."""
    line: int = 0
    """The line of the cell, from 1; 0 where the rank is in no cell."""
    source: str = ""
    """The text of the line."""
    within: str = ""
    """The person's innermost code where that is not the cell's own: 'fit, model.py line 30'."""
    collective: str = ""
    """What of torch.distributed the rank is in, such as 'all_reduce' or 'DDP backward'; empty where in nothing."""
    step: int = 0
    """The optimizer steps that a training run had finished."""
    busy_with: str = ""
    """What the rank does by itself while the others wait for it, such as 'loading packages'; mostly empty."""
    pulse: str = ""
    """Differs between two answers if anything went through the rank's process groups meanwhile, or if it has computed for
    what it is busy with."""
    unheeded: Unheeded = ""

    @property
    def is_busy(self) -> bool:
        """Whether the others wait for what this rank does by itself."""
        return bool(self.busy_with) and not self.collective

    @staticmethod
    def socket_name(pid: int) -> str:
        """The socket in the cluster's folder on which the engine with this pid answers."""
        return f"where-{pid}"

    @staticmethod
    def stack_name(pid: int) -> str:
        """The file in the cluster's folder into which SIGUSR2 makes the engine write its main thread's stack."""
        return f"stack-{pid}"

    @property
    def place(self) -> str:
        """Where that is, in words: 'cell line 4', 'fit, model.py line 30, called at cell line 4', 'step 12'."""
        where = {"cell": f"cell line {self.line}", "run": f"step {self.step + 1}"}.get(self.doing, "")
        if not self.within:
            return where
        return (
            f"{self.within}, {'called at' if self.doing == 'cell' else 'in'} {where}"
            if where
            else self.within
        )


class GivenUp:
    """How the client tells an engine that a generation of the process group is given up: a datagram with its number.

    The number makes the message safe to repeat, to lose and to come late: it means that generation and those before it, and
    never one that was formed later.
    """

    MAX_BYTES: ClassVar[int] = 32

    @staticmethod
    def socket_name(pid: int) -> str:
        """The socket in the cluster's folder on which the engine with this pid takes it."""
        return f"given-up-{pid}"


@dataclass(frozen=True, slots=True)
class CellOptions:
    """What a rank is told of a cell beside its code."""

    METADATA: ClassVar[str] = "nbgpu"
    """Under this name it travels in the metadata of the request."""

    number: int = 0
    """The notebook's own, as in `In [12]`; 0 where there is none, and the rank counts."""
    full: bool = False
    """Tracebacks show libraries' frames too."""
    are_answered: bool = False
    """Somebody is there whom `input()` can ask."""


class CellOutputs:
    """What a cell publishes, and how a rank says that there is no more of it."""

    KINDS: ClassVar[tuple[str, ...]] = ("stream", "display_data", "update_display_data", "execute_result")
    """Types of message of the Jupyter protocol; they come on another socket than the answer, in their order."""
    NUM: ClassVar[str] = "nbgpu_num_outputs"
    """Under this name the metadata of the answer says how many of them there were in all."""


@dataclass(frozen=True, slots=True)
class Remains:
    """What a cell or a call left behind on a rank that the next one must not find; sent with its answer."""

    METADATA: ClassVar[str] = "nbgpu_remains"
    """The key in the answer's metadata; it is there only where something is to be mended."""

    group_ended: bool = False
    """The rank is in no process group any more."""
    signals: tuple[str, ...] = ()
    """The names of the signals that the engine needs and whose handlers were taken from it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a rank asks the person with `input()`."""

    SOCKET: ClassVar[str] = "questions"
    """In the cluster's folder: one line of JSON each way."""
    NEWEST: ClassVar[str] = "nbgpu question"
    """Under this name the rank publishes a question's number when all that it printed before is on its way."""

    rank: int
    number: int
    """Counts this rank's questions, from 1."""
    prompt: str
    password: bool = False


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """Where a step stands among the epochs; everything is counted from 1."""

    epoch: int
    first_step: int
    last_step: int
    """The step with which the epoch is whole."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a reader needs to know of a training run; `run_info.json` in its folder."""

    run_id: str
    recipe: str
    devices: tuple[Device, ...]
    """By rank; their number is the world size."""
    backend: str
    total_steps: int
    steps_per_epoch: int
    batch_size: int
    """Samples for each rank and micro-batch."""
    global_batch_size: int
    """batch_size x world_size x accumulate."""
    started_s: float
    resumed_from: str = ""
    """The checkpoint's folder that the run began with; empty where it began with the first step."""
    rung: str = ""
    """The way to talk that the ranks took, such as 'nccl in safe mode' (`nbgpu/machine/transports.py`)."""
    data: tuple[str, ...] = ()
    """How the data come to the ranks, a sentence each: shards, dataset, steps of an epoch, workers."""
    epochs_from: tuple[tuple[int, int, int], ...] = ()
    """(Steps done, epochs done, steps of an epoch from there on), in order of the steps: another batch size gives
    an epoch another number of steps in the middle of a run. Empty in the files of older versions."""

    @property
    def world_size(self) -> int:
        return len(self.devices)

    def epoch_at(self, step: int) -> EpochSpan:
        """The epoch that a step, counted from 1, belongs to."""
        sections = self.epochs_from or ((0, 0, self.steps_per_epoch),)
        begun = [section for section in sections if section[0] < step]
        steps_done, epochs_done, steps_per_epoch = begun[-1] if begun else sections[0]
        steps_per_epoch = max(1, steps_per_epoch)
        num_whole = (step - 1 - steps_done) // steps_per_epoch
        first_step = steps_done + num_whole * steps_per_epoch + 1
        return EpochSpan(epochs_done + num_whole + 1, first_step, first_step + steps_per_epoch - 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RunInfo:
        """From what `run_info.json` says.

        Raises:
            ValueError: it is not what nbgpu writes.
        """
        try:
            info = _run_info_type().validate_python(fields)
        except ValidationError as error:
            found = error.errors()[0]
            place = ".".join(map(str, found["loc"]))
            raise ValueError(f"run_info.json is not what nbgpu writes ({place}: {found['msg']})") from None
        counts = [
            *(info.total_steps, info.steps_per_epoch, info.batch_size, info.global_batch_size),
            *(device.memory_bytes for device in info.devices),
            *(count for section in info.epochs_from for count in section),
        ]
        if not (info.devices and is_time(info.started_s) and all(0 <= n <= MAX_NUMBER for n in counts)):
            raise ValueError("run_info.json is not what nbgpu writes (a number in it cannot be one of a run)")
        return info


@cache
def _run_info_type() -> TypeAdapter[RunInfo]:
    # Making it takes longer than reading a file.
    return TypeAdapter(RunInfo)


@dataclass(frozen=True, slots=True)
class Variable:
    """One of a person's variables on one rank; what does not apply to it is empty."""

    name: str
    type: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    num_bytes: int | None = None
    """Of tensors and arrays, also those inside; None where it holds none."""
    content: str = ""
    """Such as '3 items', '1,024 parameters', or the value itself where it is a number or a short text."""
    fingerprint: str = ""
    """Differs between ranks whose values differ; empty where the value was not looked at."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or a class that was defined in a cell of the notebook, as its source."""

    name: str
    """The variable that gets it."""
    defines: str
    """The name in the source; another one where the variable is a second name for it."""
    cell: str
    """The whole cell, so that lines keep their numbers."""
    cell_number: int
    """The notebook's count, 0 where it has none."""
    line: int
    """Where in the cell the statement begins, decorators included, counted from 1."""
    flags: int
    """What the notebook has imported from `__future__`, as the compiler takes it."""
