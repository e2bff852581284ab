"""Start, reach and stop the engines, which ipyparallel runs for us: one for each rank."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ipyparallel as ipp
import psutil

from nbgpu import devices
from nbgpu.client import registry
from nbgpu.client.processes import Processes
from nbgpu.client.results import collect
from nbgpu.client.run import Run
from nbgpu.client.watch import RankWatch
from nbgpu.client.whereabouts import Lookout, Sighting, told
from nbgpu.config import ClusterConfig, train_config
from nbgpu.errors import ClusterError, ConfigError, NoClusterError, RunError
from nbgpu.records import Device

_OUTPUT_PATIENCE_S = 2.0
_ECHO_PATIENCE_S = 0.1
_REGROUP_PATIENCE_S = 30.0
_WHEREABOUTS_PATIENCE_S = 0.7
_ANSWER_PATIENCE_S = 1.0

_current: Cluster | None = None


def current() -> Cluster:
    """The cluster that this process started last and that still runs; NoClusterError where there is none."""
    if _current is None:
        raise NoClusterError("no cluster is running. Start one with: %nbgpu start")
    return _current


def require_none() -> None:
    """ClusterError where this process has a cluster."""
    if _current is not None:
        raise ClusterError(
            f"a cluster is already running ({_current.describe()}). Stop it first: %nbgpu stop"
        )


class Cluster:
    """Engines that form one torch.distributed group, one on each GPU, or on shares of the CPU.

    Use it as a context manager, or call `start` and `stop`. Variables live in the ranks until `stop`.

    Args:
        gpus: 'auto', 'none', or indices and UUIDs separated by commas.
        ranks: how many ranks; None is one for each GPU, or 2 where there is none.
        settings: any other field of ClusterConfig.

    Raises:
        ConfigError: a setting is not valid, or a GPU is named that is not there.
    """

    def __init__(self, gpus: str = "auto", ranks: int | None = None, **settings: Any) -> None:
        config = ClusterConfig.checked(gpus=gpus, ranks=ranks, **settings)
        chosen = devices.choose(config.gpus, config.ranks)
        self._describe(config, chosen, devices.backend(config, chosen))

    def _describe(self, config: ClusterConfig, chosen: tuple[Device, ...], backend: str) -> None:
        self.config = config
        self.devices = chosen
        self.backend = backend
        self.run: Run | None = None
        """The training run that was started last, which may be over."""
        self._processes: Processes | None = None
        self._entry: registry.Entry | None = None
        self._client: Any = None
        self._pids: dict[int, int] = {}
        self._generation = 0
        self._num_severed = 0
        self._left_behind: dict[int, ipp.AsyncResult] = {}
        self._last_seen: dict[int, Sighting] = {}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster {'running' if self.running else 'stopped'}: {self.describe()}>"

    @property
    def running(self) -> bool:
        return self._client is not None

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def pids(self) -> dict[int, int]:
        """The process id of every rank."""
        return dict(self._pids)

    @property
    def connection_file(self) -> Path:
        """ipyparallel's file for clients: with it, and only with it, another process can reach the engines."""
        self._require_running()
        assert self._processes is not None
        return self._processes.connection_file

    def describe(self) -> str:
        """One line that says what the cluster got."""
        count = f"{self.world_size} {'rank' if self.world_size == 1 else 'ranks'}"
        if self.devices[0].kind == "cpu":
            found = "no GPU found" if self.config.gpus == "auto" else "no GPU used"
            return f"{found}: {count.replace(' ', ' CPU ')}, {self.backend}"
        names = ", ".join(f"{d.label()} ({d.uuid})" for d in dict.fromkeys(self.devices))
        return f"{count} on {names}, {self.backend}"

    def start(self) -> Self:
        """Starts the engines and returns when an all_reduce over all of them gave the right sum.

        Raises:
            ClusterError: another cluster of this process runs, another one has a GPU, or an engine did not
                come; the message ends with what the engines said.
        """
        require_none()
        self._processes = processes = Processes.prepare()
        try:
            entry = registry.new_entry(self.config, self.devices, self.backend, processes.folder)
            registry.claim(entry)
            self._entry = entry
            processes.start(self.world_size, self._engine_environment())
            self._note()
            self._client = processes.connect(self.world_size, self.config.start_timeout_s)
            self._join(processes)
            self._wait_for_output_path(processes)
            self._note()
            if self.config.keep:
                processes.keep()
        except BaseException:
            self.stop()
            raise
        self._become_current()
        return self

    @classmethod
    def restored(cls, entry: registry.Entry) -> Cluster:
        """The handle of a cluster that another process has started; `entry` says all that is known of it."""
        cluster = cls.__new__(cls)
        cluster._describe(entry.config, entry.devices, entry.backend)
        cluster._entry = entry
        cluster._processes = Processes(entry.folder, entry.leaders)
        cluster._pids = {rank: process.pid for rank, process in entry.engines.items()}
        cluster._generation = entry.generation
        cluster._num_severed = entry.num_severed
        num_engines = sum(process.alive() for process in entry.engines.values())
        cluster._client = cluster._processes.connect(num_engines, entry.config.start_timeout_s)
        cluster._become_current()
        return cluster

    def rejoin(self, run_folder: Path | None) -> None:
        """Takes up what the ranks were doing when their notebook went: a run, or a cell."""
        if run_folder is not None:
            self.run = Run.rejoin(run_folder, self)
            if not self.run.over:
                return
        self._left_behind = self.call_engines("nbgpu.engine.boot:last_cell_failed")
        answered_by_s = time.monotonic() + _ANSWER_PATIENCE_S
        for result in self._left_behind.values():
            result.wait(max(0.0, answered_by_s - time.monotonic()))
        if all(result.ready() for result in self._left_behind.values()):
            asked, self._left_behind = self._left_behind, {}
            if any(collect(asked).values()):
                self.regroup()

    def stop_cell(self) -> None:
        """Stops a cell that ranks are in although nobody waits for it any more, as the stop button would."""
        RankWatch(self, self._left_behind).stop()

    def _note(self) -> None:
        """Writes down what another process must know to list, end or take over this cluster."""
        if self._entry is None or self._processes is None:
            return
        self._entry = self._entry.model_copy(
            update={
                "leaders": self._processes.leaders,
                "engines": self._entry.engines_with(self._pids),
                "generation": self._generation,
                "num_severed": self._num_severed,
                "run": None if self.run is None else self.run.folder,
            }
        )
        registry.update(self._entry)

    def _become_current(self) -> None:
        global _current
        _current = self
        if not self.config.keep:
            atexit.register(self.stop)

    def stop(self) -> None:
        """Ends every engine and the controller, and removes what they left on disk. Harmless when repeated."""
        global _current
        if _current is self:
            _current = None
        atexit.unregister(self.stop)
        if self.run is not None:
            self.run.abandon()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._processes is not None:
            self._processes.end()
            self._processes = None
        if self._entry is not None:
            registry.remove(self._entry)
            self._entry = None
        self._pids = {}
        self._generation = 0
        self._num_severed = 0
        self._left_behind = {}
        self._last_seen = {}

    def submit(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, ipp.AsyncResult]:
        """Sends a cell to the ranks and returns at once; by rank, what will hold its output and its end.

        Raises:
            RunError: a training run has the ranks now.
        """
        chosen = self._ranks(ranks)
        self._refuse_during_run()
        self._refuse_with_a_rank_gone()
        self._take_back_ranks_left_behind()
        self._last_seen = {}
        return {rank: self._client[rank].execute(code, silent=False, block=False) for rank in chosen}

    def execute(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Runs code on the ranks and returns what each printed to stdout.

        Raises:
            RankError: it raised on one rank or more.
        """
        results = self.submit(code, ranks)
        collect(results, check=self.require_reachable)
        for result in results.values():
            # Output takes another socket than the result, and may come after it.
            result.wait_for_output(_OUTPUT_PATIENCE_S)
        return {rank: result.stdout for rank, result in results.items()}

    def apply(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Calls a function on the ranks and returns its results by rank; RankError where it raised."""
        chosen = self._ranks(ranks)
        self._refuse_during_run()
        results = {rank: self._client[rank].apply_async(function, *args) for rank in chosen}
        return collect(results, check=self.require_reachable)

    def pull(self, name: str, rank: int = 0) -> Any:
        """The value of a variable on one rank; RankError where it has none."""
        self._refuse_during_run()
        result = self._client[self._ranks([rank])[0]].pull(name, block=False)
        return collect({rank: result}, check=self.require_reachable)[rank]

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Gives the ranks variables of these names and values."""
        chosen = self._ranks(ranks)
        self._refuse_during_run()
        results = {rank: self._client[rank].push(values, block=False) for rank in chosen}
        collect(results, check=self.require_reachable)

    def train(self, recipe: str, **settings: Any) -> Run:
        """Starts a training run on all ranks and returns at once.

        Raises:
            ConfigError: a setting is not valid; nothing was started.
            RunError: another run has the ranks now.
        """
        config = train_config(recipe, **settings)
        self._require_running()
        self._refuse_during_run()
        self.require_reachable()
        self.run = Run.start(config, self)
        self._note()
        return self.run

    def call_engines(self, function: str, *args: Any) -> dict[int, ipp.AsyncResult]:
        """Calls `module:function` of nbgpu.engine with the same arguments on every rank; returns at once.

        The engine's code is named by a string, because the client does not import it (and so not torch).
        """
        module, _, name = function.partition(":")
        reference = ipp.Reference(f"__import__('importlib').import_module({module!r}).{name}")
        return {rank: self._client[rank].apply_async(reference, *args) for rank in range(self.world_size)}

    def apply_async(self, rank: int, function: Any, *args: Any) -> ipp.AsyncResult:
        """Calls a function on one rank and returns at once with what will hold its result."""
        return self._client[self._ranks([rank])[0]].apply_async(function, *args)

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raises KeyboardInterrupt in the Python code of the ranks, as Ctrl-C would."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGINT)

    def sever(self) -> None:
        """Frees all ranks from whatever collective they wait in; after it the group must be formed anew.

        Ranks that wait in none are severed too: gloo may not notice a connection that was cut at one end only.
        """
        self._num_severed += 1
        self._note()
        for rank in range(self.world_size):
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)

    def untouched_by_cell(self) -> bool:
        """Whether nothing went through the process groups in the last cell, on no rank."""
        return all(
            collect(self.call_engines("nbgpu.engine.group:untouched_by_cell"), _REGROUP_PATIENCE_S).values()
        )

    def regroup(self) -> list[str]:
        """Forms the process group anew on all ranks, and starts their DDP objects anew on it.

        Returns:
            A line for each variable of the ranks that belonged to the old group and has to be made again.
        """
        self._generation += 1
        self._note()
        answers = collect(
            self.call_engines("nbgpu.engine.boot:regroup", self._generation, self._num_severed),
            _REGROUP_PATIENCE_S,
        )
        return sorted({line for lines in answers.values() for line in lines})

    def leave_behind(self, results: Mapping[int, ipp.AsyncResult]) -> None:
        """Notes ranks that did not come back from a cell; they get no other one until they do."""
        self._left_behind = dict(results)

    def require_reachable(self) -> None:
        """ClusterError where the controller, or the engines' parent, is gone: nothing sent would arrive."""
        gone = self._processes.unreachable() if self._processes is not None else None
        if gone:
            raise ClusterError(f"{gone}; the ranks cannot be reached: %nbgpu stop, then %nbgpu start")

    def how_ended(self, rank: int) -> str | None:
        """How the process of a rank ended, in words; None while it lives."""
        if self._processes is None:
            return None
        ended = self._processes.how_ended(self._pids[rank], self.config.debug)
        return None if ended is None else f"rank {rank} {ended}"

    def lookout(self) -> Lookout:
        """What asks the ranks where they are; to be closed."""
        self._require_running()
        assert self._processes is not None
        return Lookout(self._processes.folder, self._pids, self._last_seen)

    def status(self) -> str:
        """A table: every rank's device, process, memory, and the line that it is at. Answers within a second."""
        rows = [("rank", "device", "pid", "memory", "state")]
        with closing(self.lookout()) as lookout:
            lookout.ask()
            lookout.collect(_WHEREABOUTS_PATIENCE_S)
            for rank, device in enumerate(self.devices):
                try:
                    memory = f"{psutil.Process(self._pids[rank]).memory_info().rss / 2**20:.0f} MiB"
                    state = self._state(rank, lookout)
                except psutil.NoSuchProcess:
                    memory, state = "", "gone"
                rows.append((str(rank), device.label(), str(self._pids[rank]), memory, state))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([self.describe(), *lines])

    def _state(self, rank: int, lookout: Lookout) -> str:
        if lookout.silent_s(rank):
            return lookout.silence(rank)
        if rank not in self._last_seen:
            return "does not say"
        where = self._last_seen[rank].where
        if self.run is None or self.run.over:
            return told(where)
        of_run = self.run.statuses()[rank]
        state = f"{of_run.state}, step {of_run.step}/{self.run.config.steps}"
        if where.collective:
            return f"{state}, waits in {where.collective}"
        return f"{state}, {where.within}" if where.within else state

    def _engine_environment(self) -> dict[str, str]:
        gpus = dict.fromkeys(d.uuid for d in self.devices if d.kind == "cuda")
        return {
            # Every rank sees the cluster's GPUs, in order, as under torchrun: cuda:local_rank is its own.
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "OMP_NUM_THREADS": str(self._threads_per_rank),
            **({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if self.config.debug else {}),
        }

    @property
    def _threads_per_rank(self) -> int:
        return self.config.threads_for(self.world_size)

    def _join(self, processes: Processes) -> None:
        joining = {}
        for rank, device in enumerate(self.devices):
            reference = ipp.Reference("__import__('importlib').import_module('nbgpu.engine.boot').join")
            joining[rank] = self._client[rank].apply_async(
                reference,
                rank,
                self.world_size,
                rank,
                self.backend,
                devices.torch_name(device, self.devices),
                str(processes.folder),
                self._threads_per_rank,
            )
        joined = collect(joining, self.config.start_timeout_s)
        self._pids = {rank: answer["pid"] for rank, answer in joined.items()}

    def _wait_for_output_path(self, processes: Processes) -> None:
        """Makes sure that what a rank prints arrives: a subscription on the way to it takes a moment, and what
        is printed before is lost without a word."""
        deadline_s = time.monotonic() + self.config.start_timeout_s
        for rank in range(self.world_size):
            while (
                not self._client[rank].execute("", silent=True, block=False).wait_for_output(_ECHO_PATIENCE_S)
            ):
                if time.monotonic() > deadline_s:
                    raise ClusterError(f"what rank {rank} prints does not arrive. {processes.log_tail()}")

    def _ranks(self, ranks: Sequence[int] | None) -> list[int]:
        self._require_running()
        self.require_reachable()
        if ranks is None:
            return list(range(self.world_size))
        wrong = [r for r in ranks if not 0 <= r < self.world_size]
        if wrong or not ranks:
            raise ConfigError(f"ranks = {list(ranks)} is not valid. Ranks: 0 to {self.world_size - 1}")
        return sorted(set(ranks))

    def _require_running(self) -> None:
        if not self.running:
            raise NoClusterError("this cluster is not running. Start it with: start(), or %nbgpu start")

    def _refuse_with_a_rank_gone(self) -> None:
        ended = [how for rank in range(self.world_size) if (how := self.how_ended(rank)) is not None]
        if ended:
            raise ClusterError(
                f"{'; '.join(ended)}. The group cannot work without it. %nbgpu stop, then %nbgpu start gives new "
                "ranks; %pull still saves variables of the others"
            )

    def _take_back_ranks_left_behind(self) -> None:
        """Forms the group anew if ranks that were given up on are back; refuses while one is not."""
        if not self._left_behind:
            return
        busy = [rank for rank, result in self._left_behind.items() if not result.ready()]
        if busy:
            named = ", ".join(map(str, busy))
            raise ClusterError(
                f"rank(s) {named} are still in an earlier cell. Wait for them, stop it with "
                "nbgpu.current().stop_cell(), which C code may not hear, or give them up: "
                f"{', '.join(f'%nbgpu restart --rank {rank}' for rank in busy)}"
            )
        self._left_behind = {}
        self.regroup()

    def _refuse_during_run(self) -> None:
        if self.run is not None and not self.run.over:
            raise RunError(
                f"the ranks are training ({self.run.folder.name}, {self.run.status}), and code sent to them would "
                "wait until the end. Call run.wait() or run.stop() first"
            )
