"""The types that cross a process boundary: what a rank writes is what the notebook and the disk read.

All are frozen dataclasses of plain values, so that they become JSON and pickle without help. Times named
`time_s` are seconds since the epoch (`time.time()`), comparable between the processes of one host.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

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

BUSY_STATES = frozenset({"starting", "loading packages", "loading", "working out the result"})
"""In these a rank may do something by itself while the others wait for it."""

Command = Literal["pause", "resume", "stop"]
"""What a person can ask of a run while it goes on."""

CONTROLLER_PID = "controller.pid"
"""File in the cluster's folder: the controller's process, which the engines cannot be reached without."""

KEPT = "kept"
"""File in the cluster's folder: it has started, and goes on when its notebook's kernel ends."""


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


@dataclass(frozen=True, slots=True)
class Whereabouts:
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
    """The way to talk that the ranks took, such as 'nccl in safe mode' (`nbgpu/backends.py`)."""
    data: tuple[str, ...] = ()
    """How the data come to the ranks, a sentence each: shards, dataset, steps of an epoch, workers."""

    @property
    def world_size(self) -> int:
        return len(self.devices)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RunInfo:
        devices = tuple(Device(**d) for d in fields["devices"])
        return cls(**{**fields, "devices": devices, "data": tuple(fields.get("data", ()))})


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
