"""The data types that are exchanged between processes: ranks write them, and the notebook reads them.

All are frozen dataclasses of plain values, so that they can be pickled and written as JSON. Times named
`time_s` are seconds since the epoch (`time.time()`), comparable between the processes of one host. Numbers
are checked against bounds, because a file or message may be damaged or forged.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

LATEST_TIME_S = 2.0**36
"""The upper bound of times in seconds since the epoch, in the year 4147."""
MAX_NUMBER = 2**53
"""The upper bound of counts. A float represents every whole number up to this one."""


def is_time(value: object) -> bool:
    """Return whether a value can be a time in seconds since the epoch."""
    return type(value) in (float, int) and 0 <= value <= LATEST_TIME_S  # type: ignore[operator]


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
"""The activity of a rank, and of the run as a whole. The last three are final. 'loading' is the loading of
data and model."""

FINAL_STATES = frozenset({"stopped", "finished", "failed"})
STATES_OF_NO_STEP = frozenset({"loading packages"})
"""States in which a rank does not know the number of finished steps yet, because it may replace another rank
or resume from a checkpoint. The `step` of a record in such a state has no meaning."""

BUSY_STATES = frozenset({"starting", "loading packages", "loading", "working out the result"})
"""States in which a rank may work while the others wait for it."""

DAMAGE = "damage"
"""The kind of an event that replaces an unreadable line of a rank's file. Its step and time have no
meaning."""

PROFILE_PARTS = ("data", "forward", "backward", "communication", "optimizer", "other", "hidden")
"""The parts into which a 'profile' event divides the time of a step. Its detail has each in seconds, such as
`data_s`."""

STEP_PARTS = ("data_s", "forward_s", "backward_s", "exposed_s", "optimizer_s")
"""The parts of `step_s` in the record of a step, if they were measured. 'exposed' is the exchange of
gradients for which the rank waits. The rest of the step is other work."""
EXCHANGE_PARTS = ("exchange_s", "hidden_s", "forward_statistics_s", "backward_statistics_s")
"""The time of the exchange of gradients, its part that overlaps with the rank's computation, and the time
within the forward and the backward pass for which the rank waited for BatchNorm's statistics over all
ranks."""
STEP_MOMENTS = ("begun_at_s", "ready_at_s")
"""When a rank began the step, and when it had its last gradient, by its host's monotonic clock. Only their
differences between ranks have a meaning."""

LR_OF = "lr_of_"
"""The prefix of the name under which a step records the learning rate of a parameter group."""

TIMELINE = "timeline"
"""The kind of an event with the course of one step of a rank, by its host's monotonic clock: `marks`, each
part of the step with the time at which it began, and `sent`, for each transfer of gradients when it was
ready, when it had arrived, and its bytes."""
CLOCKS = "clocks"
"""The kind of an event in which rank 0 compares the ranks' clocks: `offsets_s`, `errors_s` and `at_s`."""


def is_learning_rate(name: str) -> bool:
    """Return whether a number of a step is a learning rate, which is always the same on every rank."""
    return name == "lr" or name.startswith(LR_OF)


LOW, HIGH = (f"_{end}" for end in ("low", "high"))
"""The suffixes of the names under which the ends of a number's 95 % interval are recorded."""


def ends_an_interval(name: str, names: Container[str]) -> bool:
    """Return whether a number is an end of the interval of another number in `names`, with which it is
    shown."""
    return any(name.endswith(end) and name.removesuffix(end) in names for end in (LOW, HIGH))


Command = Literal["pause", "resume", "stop"]
"""The requests that a user can make to a running run."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a rank can run on: a GPU, or a share of the CPU."""

    kind: Literal["cuda", "cpu"]
    name: str
    """The GPU's name, such as 'NVIDIA H200', or the processor's model name."""
    uuid: str
    """'GPU-...' as the driver names it; empty for a CPU."""
    index: int
    """The driver's number for a GPU (what nvidia-smi shows); the rank's number for a CPU."""
    memory_bytes: int
    """The device's total memory; for a CPU, the host's."""
    compute_capability: float = 0.0
    """NVIDIA's compute capability of a GPU, such as 9.0; 0 for a CPU."""
    numa_node: int | None = None
    """The host's NUMA node to which a GPU is attached; None if it is not known, and for a CPU."""

    def label(self) -> str:
        """Return a short name for lists, such as 'GPU 0 NVIDIA H200' or 'CPU rank 1'."""
        return f"GPU {self.index} {self.name}" if self.kind == "cuda" else f"CPU rank {self.index}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Numbers that one rank measured at one moment."""

    rank: int
    seq: int
    """The sequence number among this rank's samples and events, from 0, without gaps."""
    time_s: float
    step: int
    """The number of optimizer steps that the rank had finished."""
    values: dict[str, float]
    """The values by the name of their series. Units are part of the names, except for `loss` and `val_loss`,
    whose unit is the recipe's."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event on one rank: a change of state, a checkpoint, a validation, a failure."""

    rank: int
    seq: int
    time_s: float
    step: int
    kind: str
    """'state' (the text is the RunState), 'checkpoint', 'note', 'result', 'profile' (the parts of the steps'
    time), 'setting' (the detail has the new values), 'nonfinite' (a step was skipped), 'failure', TIMELINE or
    CLOCKS."""
    text: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The latest known status of one rank."""

    rank: int
    state: RunState
    step: int
    device: Device
    silent_s: float
    """Seconds since the last record of the rank. A rank that is alive but holds the GIL in C code is silent,
    too."""
    values: dict[str, float]
    """The newest value of every series."""
    done: int = 0
    """The number of samples of the result that the rank has evaluated."""
    total: int = 0
    """The number of samples that the rank has to evaluate for the result; 0 before that."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception on one rank."""

    rank: int
    error_type: str
    message: str
    traceback: str


Unheeded = Literal["", "replaced", "caught", "importing"]
"""Why interrupts do not end the code on a rank: the code has replaced the handler of SIGINT, or it has caught
the KeyboardInterrupt and continued, or it is importing a part of torch. Empty if no reason is known."""


@dataclass(frozen=True, slots=True)
class MainThreadState:
    """The position and the activity of a rank's main thread at one moment."""

    doing: Literal["idle", "cell", "call", "run"]
    """Whether the rank is between cells, in a cell, in a function that `Cluster.apply` sent, or in a training
    run."""
    line: int = 0
    """The line of the cell, counted from 1; 0 outside of a cell."""
    source: str = ""
    """The text of the line."""
    within: str = ""
    """The innermost frame of the user's code, if that is not the cell itself: 'fit, model.py line 30'."""
    collective: str = ""
    """The call of torch.distributed that is in progress, such as 'all_reduce' or 'DDP backward'; empty for
    none."""
    step: int = 0
    """The number of optimizer steps that a training run had finished."""
    busy_with: str = ""
    """The work of this rank for which the others wait, such as 'loading packages'; usually empty."""
    pulse: str = ""
    """A text that differs between two answers if there was a collective in the rank's process groups in
    between, or if the rank has used the CPU for the work in `busy_with`."""
    unheeded: Unheeded = ""

    @property
    def is_busy(self) -> bool:
        """Whether the others wait for work of this rank."""
        return bool(self.busy_with) and not self.collective

    @staticmethod
    def socket_name(pid: int) -> str:
        """Return the name of the socket in the cluster's folder on which the engine with this pid answers."""
        return f"where-{pid}"

    @staticmethod
    def stack_name(pid: int) -> str:
        """Return the name of the file in the cluster's folder into which the engine with this pid writes its
        main thread's stack at SIGUSR2."""
        return f"stack-{pid}"

    @property
    def place(self) -> str:
        """The position as text: 'cell line 4', 'fit, model.py line 30, called at cell line 4', 'step 12'."""
        where = {"cell": f"cell line {self.line}", "run": f"step {self.step + 1}"}.get(self.doing, "")
        if not self.within or not where:
            return self.within or where
        return f"{self.within}, {'called at' if self.doing == 'cell' else 'in'} {where}"


class GivenUp:
    """The datagram that tells an engine that a generation of the process group is given up. It contains the
    generation's number, and applies to that generation and all earlier ones, but not to later ones, so that
    it may be repeated, lost or delivered late."""

    MAX_BYTES: ClassVar[int] = 32

    @staticmethod
    def socket_name(pid: int) -> str:
        """Return the name of the socket in the cluster's folder on which the engine with this pid receives
        the datagram."""
        return f"given-up-{pid}"


@dataclass(frozen=True, slots=True)
class CellOptions:
    """Options that the notebook sends to a rank with the code of a cell."""

    METADATA: ClassVar[str] = "nbgpu"
    """The key of the options in the metadata of the request."""

    number: int = 0
    """The cell's number in the notebook, as in `In [12]`; 0 if it has none, and the rank counts its cells."""
    full: bool = False
    """Whether tracebacks include the frames of libraries."""
    are_answered: bool = False
    """Whether there is a frontend that can answer `input()`."""
    timeline: bool = False
    """Whether the rank records a timeline of the cell."""


class CellOutputs:
    """The messages that a cell publishes, and the key under which a rank reports their number."""

    KINDS: ClassVar[tuple[str, ...]] = ("stream", "display_data", "update_display_data", "execute_result")
    """The types of these messages in the Jupyter protocol. They arrive in order, but on another socket than
    the reply."""
    NUM: ClassVar[str] = "nbgpu_num_outputs"
    """The key of their number in the reply's metadata."""


GIVEN_NAMES = ("rank", "local_rank", "world_size", "device", "torch", "dist")
"""The names that every rank has before the first cell."""


@dataclass(frozen=True, slots=True)
class Remains:
    """Damage that a cell or a call left on a rank, to be repaired before the next one. It is sent with the
    reply."""

    METADATA: ClassVar[str] = "nbgpu_remains"
    """The key in the reply's metadata, which is present only if there is something to repair."""

    group_ended: bool = False
    """Whether the rank is no longer in a process group."""
    is_cut_off: bool = False
    """Whether the rank has lost the connection to the other ranks of its process group."""
    signals: tuple[str, ...] = ()
    """The names of the signals whose handlers the engine needs and the code has replaced."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question that code on a rank asks with `input()`."""

    SOCKET: ClassVar[str] = "questions"
    """The socket in the cluster's folder. The question and the answer are one line of JSON each."""
    NEWEST: ClassVar[str] = "nbgpu question"
    """The name under which a rank publishes the number of a question, after all earlier output was sent."""

    rank: int
    number: int
    """The number of the question on this rank, from 1."""
    prompt: str
    password: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """Values that nbgpu has chosen by the data, the memory or a checkpoint for settings that were left out;
    the content of `chosen.json` in a run's folder."""

    values: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    """Sentences with each choice and its reason."""

    def with_more(self, other: Chosen) -> Chosen:
        """Return both choices together; the other's values win."""
        return Chosen({**self.values, **other.values}, (*self.words, *other.words))


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """The epoch that a step belongs to, with its first and last step, all counted from 1."""

    epoch: int
    first_step: int
    last_step: int
    """The step that completes the epoch."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The facts about a training run that a reader of its folder needs; the content of `run_info.json`."""

    run_id: str
    recipe: str
    devices: tuple[Device, ...]
    """The devices by rank. Their number is the world size."""
    backend: str
    total_steps: int
    steps_per_epoch: int
    batch_size: int
    """The number of samples for each rank and micro-batch."""
    global_batch_size: int
    """batch_size x world_size x accumulate."""
    started_s: float
    resumed_from: str = ""
    """The folder of the checkpoint from which the run resumed; empty if it began with the first step."""
    transport: str = ""
    """The transport that the ranks use, such as 'nccl in safe mode' (`nbgpu/machine/transports.py`)."""
    simulated: str = ""
    """A description of the cluster's simulated link and slow ranks; empty for none."""
    data: tuple[str, ...] = ()
    """Sentences on the loading of the data: shards, dataset, steps of an epoch, and workers."""
    epochs_from: tuple[tuple[int, int, int], ...] = ()
    """Sections (steps done, epochs done, steps per epoch from then on), in order of the steps. A new section
    begins when the batch size is changed during a run. Empty in the files of older versions."""
    parameters: int = 0
    """The number of the model's parameters, over all ranks if they are sharded, without a discriminator's. 0
    until the model is built, for recipes without a model, and in the files of older versions."""
    name: str = ""
    """The name that the user gave to the run; empty for none."""
    epochs: int = 0
    """The run's length in epochs if it was given in epochs; otherwise 0."""

    @property
    def title(self) -> str:
        """The recipe's name, followed by the run's name if it has one."""
        return f"{self.recipe} {self.name!r}" if self.name else self.recipe

    @property
    def world_size(self) -> int:
        return len(self.devices)

    def epoch_at(self, step: int) -> EpochSpan:
        """Return the epoch to which a step, counted from 1, belongs."""
        sections = self.epochs_from or ((0, 0, self.steps_per_epoch),)
        before = [section for section in sections if section[0] < step]
        steps_done, epochs_done, steps_per_epoch = before[-1] if before else sections[0]
        steps_per_epoch = max(1, steps_per_epoch)
        num_complete = (step - 1 - steps_done) // steps_per_epoch
        first_step = steps_done + num_complete * steps_per_epoch + 1
        return EpochSpan(epochs_done + num_complete + 1, first_step, first_step + steps_per_epoch - 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RunInfo:
        """Build the info from the content of `run_info.json`.

        Raises:
            ValueError: the content is not what nbgpu writes.
        """
        try:
            info = _run_info_type().validate_python(fields)
        except ValidationError as error:
            first = error.errors()[0]
            field_path = ".".join(map(str, first["loc"]))
            raise ValueError(
                f"run_info.json is not what nbgpu writes ({field_path}: {first['msg']})"
            ) from None
        counts = [
            *(info.total_steps, info.steps_per_epoch, info.batch_size, info.global_batch_size),
            *(info.parameters, info.epochs),
            *(device.memory_bytes for device in info.devices),
            *(count for section in info.epochs_from for count in section),
        ]
        if not (info.devices and is_time(info.started_s) and all(0 <= n <= MAX_NUMBER for n in counts)):
            raise ValueError("run_info.json is not what nbgpu writes (a number in it cannot be one of a run)")
        return info


@cache
def _run_info_type() -> TypeAdapter[RunInfo]:
    # Cached, because to build the adapter takes longer than to read a file.
    return TypeAdapter(RunInfo)


@dataclass(frozen=True, slots=True)
class Variable:
    """One of the user's variables on one rank. Fields that do not apply to it are empty."""

    name: str
    type: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    num_bytes: int | None = None
    """The size of its tensors and arrays, also of nested ones; None if it has none."""
    content: str = ""
    """A summary such as '3 items' or '1,024 parameters', or the value itself if it is a number or a short
    text."""
    fingerprint: str = ""
    """A hash that differs between ranks whose values differ; empty if the value was not read."""


@dataclass(frozen=True, slots=True)
class Definition:
    """The source of a function or class that was defined in a cell of the notebook."""

    name: str
    """The variable with the function or class."""
    defines: str
    """The name in the source. It differs from `name` if the variable is a second name of the object."""
    cell: str
    """The text of the whole cell, so that line numbers stay the same."""
    cell_number: int
    """The cell's number in the notebook; 0 if it has none."""
    line: int
    """The first line of the statement in the cell, with its decorators, counted from 1."""
    flags: int
    """The compiler flags of the notebook's imports from `__future__`."""
