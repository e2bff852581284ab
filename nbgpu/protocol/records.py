"""The types that cross a process boundary, shared by the rank that writes them and the notebook that reads
them.

All are frozen dataclasses of plain values, so that they can be pickled and written as JSON without help.
Times named `time_s` are seconds since the epoch (`time.time()`), comparable between the processes of one
host. A number out of range was damaged on its way, or forged.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

LATEST_TIME_S = 2.0**36
"""No time in seconds since the epoch is later than this one, which is in the year 4147."""
MAX_NUMBER = 2**53
"""No count is greater. A float represents every whole number up to this one."""


def is_time(value: object) -> bool:
    """Whether a value can be seconds since the epoch."""
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
"""States in which a rank does not know yet how many steps were done, because it may replace another rank or
resume from a checkpoint. The step of such a record means nothing."""

BUSY_STATES = frozenset({"starting", "loading packages", "loading", "working out the result"})
"""States in which a rank may work on its own while the others wait for it."""

DAMAGE = "damage"
"""The kind of an event that replaces an unreadable line of a rank's file. Its step and time mean nothing."""

PROFILE_PARTS = ("data", "forward", "backward", "communication", "optimizer", "other", "hidden")
"""The parts into which a 'profile' event divides the time of a step. Its detail has each in seconds, such as
`data_s`."""

STEP_PARTS = ("data_s", "forward_s", "backward_s", "exposed_s", "optimizer_s")
"""The parts into which the record of a step divides `step_s`, as far as they were measured: exposed is the
exchange of gradients that the rank waits for. What they leave is other work."""
EXCHANGE_PARTS = ("exchange_s", "hidden_s", "forward_statistics_s", "backward_statistics_s")
"""The time in which gradients travelled, its part that is hidden behind the rank's own computation, and how
long the rank waited within its forward and backward pass for the statistics that BatchNorm takes over all
ranks."""
STEP_MOMENTS = ("begun_at_s", "ready_at_s")
"""When a rank began the step and when it had its last gradient, by its host's monotonic clock. They are no
measurements of the rank: only their differences between ranks mean something."""

LR_OF = "lr_of_"
"""The beginning of the name under which a step records the learning rate of a group of weights that has one
of its own."""

TIMELINE = "timeline"
"""The kind of an event with every moment of one step of a rank, by its host's monotonic clock: `marks`, each
part of the step with the time at which it began, and `sent`, for each transfer of gradients when it was
ready, when it had arrived, and its bytes."""
CLOCKS = "clocks"
"""The kind of an event in which rank 0 compares the ranks' clocks: `offsets_s`, `errors_s` and `at_s`."""


def is_learning_rate(name: str) -> bool:
    """Whether a number of a step is a learning rate, which is the same on every rank by construction."""
    return name == "lr" or name.startswith(LR_OF)


LOW, HIGH = (f"_{end}" for end in ("low", "high"))
"""The ends of the names under which the ends of a number's 95 % interval are recorded."""


def ends_an_interval(name: str, names: Container[str]) -> bool:
    """Whether a number is an end of the interval of another of `names`, and is shown with that."""
    return any(name.endswith(end) and name.removesuffix(end) in names for end in (LOW, HIGH))


Command = Literal["pause", "resume", "stop"]
"""The requests that the user can make to a run while it goes on."""


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
    """The host's NUMA node to which a GPU is attached; None where the host does not say, and for a CPU."""

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
    """The values by the name of their series. Units are part of the names; `loss` and `val_loss` have the
    recipe's own."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on one rank: a change of state, a checkpoint, a validation, a failure."""

    rank: int
    seq: int
    time_s: float
    step: int
    kind: str
    """'state' (the text is the RunState), 'checkpoint', 'note', 'result', 'profile' (where the steps' time
    went), 'setting' (the detail has the new values), 'nonfinite' (a step was skipped), 'failure', TIMELINE or
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
    """Seconds since the last record of the rank. A rank that holds the GIL in C code is silent, not dead."""
    values: dict[str, float]
    """The newest value of every series."""
    done: int = 0
    """The samples of the result that the rank has evaluated, of `total`; 0 of 0 before that."""
    total: int = 0


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception on one rank."""

    rank: int
    error_type: str
    message: str
    traceback: str


Unheeded = Literal["", "replaced", "caught", "importing"]
"""Why interrupts do not end the code on a rank: the code has replaced the handler of SIGINT, or it has caught
the KeyboardInterrupt and gone on, or it is importing a part of torch. Empty where no such reason is known."""


@dataclass(frozen=True, slots=True)
class MainThreadState:
    """The position and the activity of a rank's main thread at one moment."""

    doing: Literal["idle", "cell", "call", "run"]
    """Whether the rank is between cells, in a cell, in a function that `Cluster.apply` sent, or in a training
    run."""
    line: int = 0
    """The line of the cell, counted from 1; 0 where the rank is in no cell."""
    source: str = ""
    """The text of the line."""
    within: str = ""
    """The innermost frame of the user's code, where that is not the cell itself: 'fit, model.py line 30'."""
    collective: str = ""
    """The call of torch.distributed that the rank is in, such as 'all_reduce' or 'DDP backward'; empty where
    there is none."""
    step: int = 0
    """The optimizer steps that a training run had finished."""
    busy_with: str = ""
    """The work that the rank does on its own while the others wait for it, such as 'loading packages';
    usually empty."""
    pulse: str = ""
    """A text that differs between two answers if anything went through the rank's process groups in between,
    or if the rank has computed for the work that it is busy with."""
    unheeded: Unheeded = ""

    @property
    def is_busy(self) -> bool:
        """Whether the others wait for work that this rank does on its own."""
        return bool(self.busy_with) and not self.collective

    @staticmethod
    def socket_name(pid: int) -> str:
        """The socket in the cluster's folder on which the engine with this pid answers."""
        return f"where-{pid}"

    @staticmethod
    def stack_name(pid: int) -> str:
        """The file in the cluster's folder into which SIGUSR2 makes the engine write its main thread's
        stack."""
        return f"stack-{pid}"

    @property
    def place(self) -> str:
        """The position in words: 'cell line 4', 'fit, model.py line 30, called at cell line 4', 'step 12'."""
        where = {"cell": f"cell line {self.line}", "run": f"step {self.step + 1}"}.get(self.doing, "")
        if not self.within:
            return where
        return (
            f"{self.within}, {'called at' if self.doing == 'cell' else 'in'} {where}"
            if where
            else self.within
        )


class GivenUp:
    """The message that tells an engine that a generation of the process group is given up: a datagram with
    its number.

    The number makes the message safe to repeat, to lose and to deliver late. It stands for that generation
    and all before it, and never for one that was formed later.
    """

    MAX_BYTES: ClassVar[int] = 32

    @staticmethod
    def socket_name(pid: int) -> str:
        """The socket in the cluster's folder on which the engine with this pid receives the message."""
        return f"given-up-{pid}"


@dataclass(frozen=True, slots=True)
class CellOptions:
    """Options that the notebook sends a rank with the code of a cell."""

    METADATA: ClassVar[str] = "nbgpu"
    """The key of the options in the metadata of the request."""

    number: int = 0
    """The cell's number in the notebook, as in `In [12]`; 0 where there is none, so that the rank counts on
    its own."""
    full: bool = False
    """Whether tracebacks show the frames of libraries, too."""
    are_answered: bool = False
    """Whether there is a frontend that can answer `input()`."""
    timeline: bool = False
    """Whether the rank notes what it does in the cell, moment by moment."""


class CellOutputs:
    """The messages that a cell publishes, and how a rank says how many they are."""

    KINDS: ClassVar[tuple[str, ...]] = ("stream", "display_data", "update_display_data", "execute_result")
    """Types of message of the Jupyter protocol. They arrive in order, but on another socket than the
    reply."""
    NUM: ClassVar[str] = "nbgpu_num_outputs"
    """The key in the reply's metadata of the number of these messages."""


GIVEN_NAMES = ("rank", "local_rank", "world_size", "device", "torch", "dist")
"""The names that every rank has before the first cell."""


@dataclass(frozen=True, slots=True)
class Remains:
    """Damage that a cell or a call left on a rank, to be repaired before the next one. It is sent with the
    reply."""

    METADATA: ClassVar[str] = "nbgpu_remains"
    """The key in the reply's metadata, which is there only where something must be mended."""

    group_ended: bool = False
    """Whether the rank is no longer in a process group."""
    is_cut_off: bool = False
    """Whether the rank was cut off from the others in its group."""
    signals: tuple[str, ...] = ()
    """The names of the signals that the engine needs and whose handlers the code has replaced."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question that code on a rank asks with `input()`."""

    SOCKET: ClassVar[str] = "questions"
    """The socket in the cluster's folder. One line of JSON goes each way."""
    NEWEST: ClassVar[str] = "nbgpu question"
    """The name under which a rank publishes the number of a question, once all that it printed before has
    been sent."""

    rank: int
    number: int
    """Counts this rank's questions, from 1."""
    prompt: str
    password: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """Values that the data, the memory or a checkpoint have decided for settings that were left out; the
    content of `chosen.json` in a run's folder."""

    values: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    """Sentences that name each choice and its reason."""

    def with_more(self, other: Chosen) -> Chosen:
        """Both choices together."""
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
    """Samples for each rank and micro-batch."""
    global_batch_size: int
    """batch_size x world_size x accumulate."""
    started_s: float
    resumed_from: str = ""
    """The folder of the checkpoint that the run resumed from; empty where it began with the first step."""
    transport: str = ""
    """The transport that the ranks use, such as 'nccl in safe mode' (`nbgpu/machine/transports.py`)."""
    simulated: str = ""
    """The simulated link and slow ranks of the cluster, in words; empty for none."""
    data: tuple[str, ...] = ()
    """Sentences about the way of the data to the ranks: shards, dataset, steps of an epoch, and workers."""
    epochs_from: tuple[tuple[int, int, int], ...] = ()
    """(Steps done, epochs done, steps per epoch from there on), in order of the steps. A change of the batch
    size in the middle of a run changes the number of steps per epoch. Empty in the files of older
    versions."""
    parameters: int = 0
    """The numbers in the model's parameters, on all ranks together if they are shared out, and without those
    of a discriminator. 0 until the model is built, for what trains no model, and in the files of older
    versions."""
    name: str = ""
    """The name that the user gave to the run; empty for none."""
    epochs: int = 0
    """The run's length in epochs where it was given in epochs; otherwise 0."""

    @property
    def title(self) -> str:
        """The recipe's name with the run's own, for people."""
        return f"{self.recipe} {self.name!r}" if self.name else self.recipe

    @property
    def world_size(self) -> int:
        return len(self.devices)

    def epoch_at(self, step: int) -> EpochSpan:
        """The epoch to which a step, counted from 1, belongs."""
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
    # Building the adapter takes longer than reading a file.
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
    """The size of its tensors and arrays, those inside it included; None where it holds none."""
    content: str = ""
    """A summary such as '3 items' or '1,024 parameters', or the value itself where it is a number or a short
    text."""
    fingerprint: str = ""
    """A hash that differs between ranks whose values differ; empty where the value was not read."""


@dataclass(frozen=True, slots=True)
class Definition:
    """The source of a function or a class that was defined in a cell of the notebook."""

    name: str
    """The variable that holds the function or the class."""
    defines: str
    """The name in the source. It differs from `name` where the variable is a second name for the same
    object."""
    cell: str
    """The text of the whole cell, so that lines keep their numbers."""
    cell_number: int
    """The cell's number in the notebook; 0 where it has none."""
    line: int
    """The line of the cell at which the statement begins, decorators included, counted from 1."""
    flags: int
    """The compiler flags of the notebook's imports from `__future__`."""
