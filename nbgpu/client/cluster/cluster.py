"""The cluster as a user sees it. Each method is delegated to one of the cluster's parts."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from nbgpu.client.cluster import status, time_limit
from nbgpu.client.cluster.parts import ClusterParts
from nbgpu.client.cluster.recipe_calls import RecipeCalls
from nbgpu.client.engines import preloading
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.host import registry
from nbgpu.client.launchers.launcher import print_at_once
from nbgpu.client.runs import predicting
from nbgpu.client.runs.predicting import Predictions
from nbgpu.client.runs.run import Run
from nbgpu.client.variables import table
from nbgpu.client.variables.saving import Loaded, Saved
from nbgpu.config import ClusterConfig
from nbgpu.config.prediction import PredictConfig
from nbgpu.errors import ClusterError, NoClusterError
from nbgpu.machine.signals import uninterrupted
from nbgpu.performance.timeline import Timeline
from nbgpu.protocol.records import Device

if TYPE_CHECKING:
    import pandas as pd

_current: Cluster | None = None


def current() -> Cluster:
    """The running cluster that this process started last; NoClusterError if there is none."""
    if _current is None:
        raise NoClusterError("no cluster is running. Start one with: %nbgpu start")
    return _current


def current_or_none() -> Cluster | None:
    """The running cluster that this process started last; None if there is none."""
    return _current


def require_none() -> None:
    """Raise ClusterError if this process has a cluster."""
    if _current is not None:
        raise ClusterError(
            f"a cluster is already running ({_current.describe()}). nbgpu.current() returns it; to end it, and its "
            "ranks' variables: %nbgpu stop"
        )


class Cluster(RecipeCalls):
    """The ranks of one torch.distributed group: one on each GPU, or several that share the CPU.

    Use it as a context manager, or call `start` and `stop`. Variables live in the ranks until `stop`.

    Args:
        gpus: 'auto' for all free GPUs, 'free:2' for two of them, 'all' for all that are visible, 'none', or
            indices and UUIDs separated by commas; None for the default.
        ranks: how many ranks; None for one on each GPU, or 2 if there is no GPU.
        settings: any other field of ClusterConfig.

    Raises:
        ConfigError: a setting is not valid, or a GPU is named that is not there.
        NoFreeGpuError: too few GPUs are free, and the settings do not say to wait.
    """

    def __init__(self, gpus: str | None = None, ranks: int | None = None, **settings: Any) -> None:
        named = {"gpus": gpus, "ranks": ranks}
        given = {name: value for name, value in named.items() if value is not None}
        self.parts = ClusterParts.for_start(ClusterConfig.checked(**given, **settings))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster {'running' if self.running else 'stopped'}: {self.describe()}>"

    def start(
        self, *, tell: Callable[[str], None] = print_at_once, stop: threading.Event | None = None
    ) -> Self:
        """Start the engines and return when an all_reduce over all of them has given the right sum.

        With `backend='auto'` other transports are tried if the best one does not work, and a single rank is
        started if none does. A warning then says which ones failed, and why.

        Args:
            tell: a function that shows a line to the user, such as that the start waits for a free GPU.
            stop: an event that ends the start, for a thread, which gets no interrupts.

        Raises:
            ConfigError: a variable of gloo or NCCL names a network interface that does not exist.
            ClusterError: another cluster of this process runs, another cluster has a GPU, the limits of the
                number or size of files are too low, torch is built for the CPU only and there are GPUs, or an
                engine did not start. The message ends with the engines' log.
        """
        require_none()
        self.parts.lifecycle.start(tell, stop)
        try:
            self._become_current()
        except BaseException:
            self.stop()
            raise
        return self

    @uninterrupted()
    def _become_current(self) -> None:
        global _current
        _current = self
        if not self.config.keep:
            atexit.register(self.stop)
        self.parts.lifecycle.release_when_idle(self.stop)

    def stop(self) -> None:
        """End every engine and the controller, and remove their files. Harmless when repeated.

        An interrupt is raised after all of that.
        """
        global _current
        with uninterrupted():
            if _current is self:
                _current = None
            atexit.unregister(self.stop)
            self.parts.lifecycle.stop()

    @uninterrupted()
    def restart(self, rank: int | None = None, replay: bool = False) -> str:
        """End one rank and put a new engine in its place, or restart the whole cluster.

        Other ranks that are still in an earlier cell are stopped. A rank that does not come back even then is
        replaced as well, because without it there is no group. During a training run only a rank that stands
        still can be ended: the run then replaces it like a rank that has died.

        Args:
            rank: the rank; None for the whole cluster.
            replay: run the cells that the rank had seen again, on the new engine alone, except those that
                were cut off. Collectives in them return at once and exchange nothing. DDP objects and their
                optimizers get the other ranks' state afterwards.

        Returns:
            A description of what happened.

        Raises:
            RunError: a training run has the ranks now, and this one does not stand still.
        """
        if rank is None:
            self.stop()
            self.start()
            return self.describe()
        return self.parts.lifecycle.restart_rank(rank, replay)

    @uninterrupted()
    def resize(self, ranks: int) -> str:
        """Change the number of ranks. Ranks that stay keep their variables. If the number falls, the last
        ranks end, and their variables are lost; if it grows, the new ranks are empty.

        DDP objects of the ranks that stay are moved to the new group if every rank has them.

        Args:
            ranks: the number of ranks from now on.

        Returns:
            A description of what happened.

        Raises:
            ConfigError: there cannot be so many ranks; nothing has happened.
            RunError: a training run has the ranks now; nothing has happened.
            ClusterError: a rank is still in a cell, or something failed meanwhile; the cluster has as many
                ranks as before.
        """
        self.parts.runs.make_ready()
        return self.parts.resizing.resize(ranks)

    def status(self) -> str:
        """Return a table with each rank's device, process, memory and current line, and the state of a job.
        It takes at most a second, or three more if Slurm is slow."""
        with closing(self.parts.state.stack_sampler()) as sampler:
            ranks = status.table(self.parts.state, self.run, sampler)
        return "\n".join(filter(None, [ranks, time_limit.job_state(self.parts.state.pool)]))

    def describe(self) -> str:
        """Describe the cluster's ranks, devices and transport in one line."""
        return self.parts.state.describe()

    @property
    def config(self) -> ClusterConfig:
        """The settings of the cluster."""
        return self.parts.state.config

    @property
    def running(self) -> bool:
        """Whether the cluster is started and not stopped."""
        return self.parts.state.running

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank."""
        return self.parts.state.devices

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.parts.state.world_size

    @property
    def ranks(self) -> Ranks:
        """The engines as ranks; NoClusterError if the cluster is not running."""
        return self.parts.state.ranks

    @property
    def pids(self) -> dict[int, int]:
        """The process ids by rank."""
        return self.parts.state.ranks.pids

    @property
    def join_file(self) -> Path | None:
        """The file with the address at which other hosts join the cluster; None if all ranks are on this
        host."""
        return self.parts.state.pool.join_file

    @property
    def run(self) -> Run | None:
        """The latest training run, which may be over; None if there was none."""
        return self.parts.runs.run

    @property
    def last_timeline(self) -> Timeline | None:
        """The timeline of the latest cell with `%%distributed --timeline`; None if there was none."""
        return self.parts.state.last_timeline

    def submit(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Send a cell to the ranks and return at once.

        If a rank fails, the others are freed from waiting for it, and the next call forms the process group
        again. `stop_cell` stops the cell.

        Args:
            code: the cell's text.
            ranks: the ranks that run it; None for all.

        Returns:
            ipyparallel's AsyncResult by rank, which collects the output.

        Raises:
            RunError: a training run has the ranks now.
        """
        return self.parts.cells.submit(code, ranks)

    def execute(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Run code on the ranks and return the text that each printed to stdout.

        Raises:
            RankError: the code raised on one rank or more.
        """
        return self.parts.cells.execute(code, ranks)

    def apply(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Call a function on the ranks and return its results by rank; RankError if it raised."""
        return self.parts.cells.apply(function, *args, ranks=ranks)

    def stop_cell(self) -> None:
        """Stop a cell for which no call waits, such as a submitted one, as the stop button would."""
        self.parts.recovery.stop_cell()

    def pull(
        self, name: str | Sequence[str], rank: int = 0, *, ranks: Sequence[int] | Literal["all"] | None = None
    ) -> Any:
        """Copy a variable of one rank, or the value of an expression on it, into this process. Tensors arrive
        on the CPU.

        Args:
            name: the variable's name, or an expression such as 'model.module.state_dict()'. For several names
                the result is a dict by name.
            rank: the rank.
            ranks: several ranks, or 'all', in place of `rank`. The result is then a dict by rank.

        Raises:
            RankError: a rank has no such variable, or its value cannot be sent. The message names every such
                variable.
            TransferError: a value cannot be rebuilt here, because its class is defined on the ranks only.
            RunError: a training run has the ranks now.
        """
        return self.parts.variables.pull(name, rank, ranks)

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Give the ranks variables of these names, with copies of the values. Tensors arrive on the CPU.

        Raises:
            TransferError: some values cannot be sent. The message names all of them, and nothing was sent.
            RankError: a rank cannot rebuild a value, because its class is not defined there.
            RunError: a training run has the ranks now.
        """
        self.parts.variables.push(ranks, values)

    def vars(self, pattern: str = "*") -> pd.DataFrame:
        """Return a table of the ranks' variables whose names match: one row for each variable and rank.

        The columns are name, rank, type, shape, dtype, device, bytes, content and "ranks differ". The last
        says how the ranks' values differ; it is empty if they are equal or were not compared.

        Args:
            pattern: the pattern of the names, with * and ?.
        """
        return table.table(self.apply, pattern).frame()

    def save(self, folder: str | Path, names: Sequence[str] = ()) -> Saved:
        """Write the ranks' variables into a folder: all ranks at the same time, and all files or none.

        Tensors, arrays, models, optimizers, DDP objects, frames, containers and plain values are saved as
        JSON and safetensors, functions and classes of cells as source, imports by name, and other objects
        as pickles. The states of the random number generators are saved, too. The result prints as lines,
        which name everything that cannot be saved.

        Args:
            folder: a new folder, or one with variables that were saved earlier, which are replaced.
            names: the variables; all of them if none is named.

        Raises:
            ConfigError: the place of the folder cannot be written to.
            DataError: the folder has other files, or cannot be written.
            RankError: a rank has no variable of a name, or cannot write its files. The folder has what it had
                before, as after any other error.
            RunError: a training run has the ranks now, or another process saves into the folder.
        """
        return self.parts.variables.save(folder, names)

    def save_before_the_end(self, folder: str | Path, why: str) -> str:
        """Save the variables because the ranks will end soon for a reason outside the notebook. The next cell
        says where the variables are.

        Call it on the notebook's main thread, between two cells, as `release_after_s` does. A rank that runs
        a cell saves its variables after the cell.

        Args:
            folder: as for `save`.
            why: the reason, as the beginning of a sentence: 'the job has 90 s left'.

        Returns:
            The sentence that the next cell shows. If the variables could not be saved, it says why.
        """
        return self.parts.variables.save_before_the_end(folder, why)

    def load(self, folder: str | Path, names: Sequence[str] = (), *, trust: bool = False) -> Loaded:
        """Give the ranks variables that `save` has written: each rank its own or, with another number of
        ranks, all ranks those that were equal everywhere. The result prints as lines, which name everything
        that was left out.

        Args:
            folder: the folder of the saved variables.
            names: the variables; all of them if none is named.
            trust: whether pickles may be opened and definitions of cells be run, which can do anything.

        Raises:
            DataError: the folder has no saved variables, or none of a name, or is damaged.
            RankError: a rank cannot read its files. No variable was changed.
            RunError: a training run has the ranks now.
        """
        return self.parts.variables.load(folder, names, trust)

    @uninterrupted()
    def predict(
        self,
        run: Run | str | Path,
        data: str | Path,
        out: str | Path = "predictions",
        *,
        checkpoint: Literal["newest", "best"] = "newest",
        max_samples: int | None = None,
        skip_bad: bool = False,
        trust: bool = False,
        **settings: Any,
    ) -> Predictions:
        """Apply a run's trained model to new data, with a share of the samples on each rank. Write a table,
        and the recipe's files for each sample.

        If a file cannot be read, only its sample fails. After an interruption the same call goes on with the
        missing samples.

        Args:
            run: a run, or its folder, which may have come from another machine.
            data: the new data, in the form that the recipe trains on.
            out: the folder for the predictions.
            checkpoint: the run's newest checkpoint, or the one with the best validation.
            max_samples: the number of samples, the first ones of the data; None for all.
            skip_bad: leave out files with bad names or headers, in place of refusing to begin.
            trust: run the recipe file in the run's folder, for a recipe of your own.
            settings: settings of the run that may differ for a prediction, such as `spacing` of a diffusion.

        Raises:
            ConfigError: something is wrong with the arguments or with `out`; nothing was predicted.
            RankError: files are bad, or a rank failed or died.
            RunError: a training run has the ranks now.
        """
        request = PredictConfig.checked(
            data=str(data),
            out=str(out),
            checkpoint=checkpoint,
            max_samples=max_samples,
            skip_bad=skip_bad,
            trust=trust,
        )
        folder = run.folder if isinstance(run, Run) else run
        return self.parts.runs.predict_with(predicting.job_of(folder, request, settings))

    def work_out_result(self, run: Run | str | Path) -> Run:
        """Work out the result of a run that ended without one, as `run.work_out_result` does. The run may
        belong to an earlier cluster.

        Args:
            run: a run, or its folder.

        Raises:
            RunError: as for `run.work_out_result`.
        """
        return self.parts.runs.work_out_result(run)


def cluster_with(config: ClusterConfig) -> Cluster:
    """Make a cluster with settings that are already checked.

    Raises:
        ConfigError: a GPU is named that is not there.
        NoFreeGpuError: too few GPUs are free, and the settings do not say to wait.
    """
    return _handle(ClusterParts.for_start(config))


def attach(which: str | int | None = None) -> Cluster:
    """Connect a new kernel to a cluster that was started with `keep`: its ranks, its run, its history.

    Args:
        which: the cluster's id, its notebook, or one of its processes, as `nbgpu ps` shows them; needed only
            if several clusters are kept.

    Returns:
        The cluster. Its `run` is the run that was started last, which may be over. If a rank failed while no
        client was attached, the run is ended now.

    Raises:
        NoClusterError: there is no kept cluster, or none that `which` refers to.
        ClusterError: there are several, or another notebook still has the cluster.
    """
    require_none()
    entry = registry.take_over(None if which is None else str(which))
    preloading.dismiss()
    cluster = _handle(ClusterParts.from_entry(entry))
    cluster.parts.lifecycle.take_over(entry)
    cluster._become_current()
    cluster.parts.lifecycle.rejoin(entry.run)
    return cluster


def _handle(parts: ClusterParts) -> Cluster:
    cluster = Cluster.__new__(Cluster)
    cluster.parts = parts
    return cluster
