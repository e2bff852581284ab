"""The entry points of training on a rank: called by the notebook's cluster, or started by torchrun.

torchrun --nproc-per-node=2 -m nbgpu.engine.train run.toml
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from nbgpu.config import ClusterConfig, TrainConfig, read_toml, site
from nbgpu.engine.dry_run import from_data
from nbgpu.engine.frames import error_as_text, own_part, part_of_nbgpu
from nbgpu.engine.group import activity, diagnosis, exchange, group, safe_nccl, torch_settings
from nbgpu.engine.group.consensus import PeerFailed, together
from nbgpu.engine.group.group import Membership
from nbgpu.engine.group.torch_settings import TorchSettings
from nbgpu.engine.ipykernel import interrupts, kept_failure
from nbgpu.engine.logs.log_files import LogWriter
from nbgpu.engine.memory import heap
from nbgpu.engine.memory import limit as memory_limit
from nbgpu.engine.memory import usage as memory
from nbgpu.engine.memory.limit import undisturbed
from nbgpu.engine.model import precision, randomness
from nbgpu.engine.training import ending
from nbgpu.engine.training.loop import Loop, RunContext
from nbgpu.engine.training.minimiser import Minimiser
from nbgpu.engine.training.trainer import Trainer
from nbgpu.engine.workload import by_name
from nbgpu.engine.workload.problem import Problem
from nbgpu.errors import ConfigError, NbgpuError, OutOfMemoryError
from nbgpu.machine import allocator, devices, interpreter, numa, transports
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.planning.suitability import adapt_to_devices, least_amp
from nbgpu.protocol import served
from nbgpu.protocol.records import Device, RankFailure, RunState
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import job as jobs
from nbgpu.run_folder import settling
from nbgpu.run_folder.commands import COMMANDS, pass_over_earlier_requests
from nbgpu.run_folder.recorder import Recorder
from nbgpu.run_folder.settling import SettledConfig

_log = logging.getLogger("nbgpu.run")


@dataclass(frozen=True)
class _Interrupted:
    """A run that was cut off on this rank, perhaps because another rank failed, and that may continue."""

    loop: Loop
    settings: TorchSettings
    raised: str
    """The exception raised on this rank, in one line."""


_interrupted: dict[str, _Interrupted] = {}
"""Interrupted runs by run folder."""

_open_logs: dict[str, Callable[[], None]] = {}
"""Functions that end the logs of runs that failed on this rank, by run folder."""

_CUT_OFF = (dist.DistError, KeyboardInterrupt, PeerFailed)
"""The exceptions of a rank whose collective was aborted, or that was informed of another rank's failure. gloo
also raises plain RuntimeErrors for that, as torch does for shapes that do not match."""


def get_ready(recipes: Iterable[str]) -> None:
    """Import the modules that training with these recipes needs. A rank that replaces another one then need
    not wait for imports."""
    import_module("torch._dynamo")  # DDP's constructor would import it, which takes a second
    for recipe in recipes:
        try:
            by_name.import_code(recipe)
        except Exception:  # noqa: BLE001
            # This may be the process that forks the engines. Training with the recipe raises the error on the
            # ranks.
            traceback.print_exc()


def run_in_engine(folder: str, mended: str = "", settings_since_s: float = 0.0) -> RunState:
    """Train as `run.toml` in the folder says, on the engine's own process group.

    After a failure that is mended the function is called again for the same folder, and training continues
    from the state of the ranks. So a rank whose training was cut off keeps its state until `let_go`, which
    has to be called if the run will not continue.

    Args:
        folder: the run's folder, as the notebook's host calls it.
        mended: the failure that was mended, in words; empty at the run's start.
        settings_since_s: a moment in seconds since the epoch; settings that were requested before it are read
            from `changes.jsonl`. Given where all ranks begin again from a checkpoint (`set_down`).

    Returns:
        'finished' or 'stopped'.
    """
    kept_failure.forget()
    folder = str(served.here(folder))
    with randomness.kept():
        rank = group.membership().rank
        return _leaving_outcome(Path(folder), rank, lambda: _continue_run(folder, mended, settings_since_s))


def _leaving_outcome(folder: Path, rank: int, work: Callable[[], RunState]) -> RunState:
    """Return the result of `work`, and write into the run's folder how the run ended on this rank: a notebook
    that attaches later reads the file."""
    _leave_outcome(folder, rank, None)
    try:
        state = work()
    except BaseException as error:
        interpreter.note_namesakes(error)
        failure = RankFailure(rank, type(error).__name__, str(error), error_as_text(error))
        _leave_outcome(folder, rank, failure)
        raise
    _leave_outcome(folder, rank, state)
    return state


def _leave_outcome(folder: Path, rank: int, outcome: RunState | RankFailure | None) -> None:
    """Write how the run ended on this rank into the run's folder; None removes an earlier outcome."""
    try:
        runs.leave_outcome(folder, rank, outcome)
    except OSError as error:
        # A failure to write this file must not hide how the training ended.
        _log.warning("how rank %d ends cannot be noted in %s: %s", rank, folder, error.strerror)


def _continue_run(folder: str, mended: str, settings_since_s: float) -> RunState:
    """Begin the run of a folder on this rank, or continue with the trainer that an earlier call has kept
    after a failure.

    Args:
        folder: the run's folder.
        mended, settings_since_s: as for `run_in_engine`.
    """
    member = group.membership()
    before = _interrupted.pop(folder, None)
    settings = TorchSettings() if before is None else before.settings
    with settings.in_force():
        if before is not None:
            trainer = before.loop
            del before
            memory.free()  # the memory of its DDP object
        else:
            runs.require_own(Path(folder))
            _, config = runs.read_settings(Path(folder))
            config = runs.with_changes(config, Path(folder))
            assert member.described is not None, "only ranks of a cluster come here"
            device = member.described
            # An import that runs out of memory leaves half a module behind, which can never be used again.
            # The notebook shows this activity, and reports no hang, until every rank is ready for the first
            # step.
            with memory_limit.lifted(), activity.during("loading packages"):
                trainer = _build_loop(config, Path(folder), member, device, settings_since_s)
        memory_limit.tighten()
        try:
            return train(trainer, mended)
        except BaseException as error:
            was_cut_off = _was_cut_off(error)
            with undisturbed():
                if was_cut_off:
                    trainer.interrupted()
                    _interrupted[folder] = _Interrupted(trainer, settings, _one_line(error))
                else:
                    _end(trainer, _one_line(error), failed=True)
                    # The logs stay open until `let_go`: closing them, rank 0 would wait for the last records
                    # of the others, which write none before they are informed of this failure. The function
                    # that ends the logs must not keep the model.
                    _open_logs[folder] = partial(_end_logs, trainer.recorder, trainer.log_writer, failed=True)
                # A traceback that is kept would keep model, optimizer and activations.
                memory.let_go(error)
                del trainer
                interrupts.forget_half_imported()
            if was_cut_off and own_part(error.__traceback__)[0] is error.__traceback__:
                # The traceback has no frame of the person's code. Where this rank was when another one failed
                # is of no interest, and IPython would read all of torch's source to show it.
                is_plain = type(error) is RuntimeError
                error.__traceback__ = part_of_nbgpu(error.__traceback__) if is_plain else None
            raise


def let_go(folder: str, failed: bool = True, causes: Sequence[int] = ()) -> None:
    """End a run on this rank that will not continue: it has failed on some rank, or was stopped.

    Args:
        folder: the run's folder, as the notebook's host calls it.
        failed: whether the run failed.
        causes: the ranks on which it failed; the others were only cut off.
    """
    folder = str(served.here(folder))
    interrupted = _interrupted.pop(folder, None)
    if interrupted is not None:
        trainer, raised = interrupted.loop, interrupted.raised
        if failed:
            _close(trainer, raised if group.membership().rank in causes else "", failed=True)
        else:
            if trainer.recorder is not None:
                trainer.recorder.state("stopped", trainer.step)
            _close(trainer)
    if folder in _open_logs:
        _open_logs.pop(folder)()


def set_down(folder: str) -> None:
    """End a run on this rank because other ranks are lost with their host. The remaining ranks then begin the
    run again from its newest checkpoint, in the same folder and with the same records."""
    interrupted = _interrupted.pop(folder, None)
    if interrupted is not None:
        loop = interrupted.loop
        del interrupted
        loop.close()
        _end_logs(loop.recorder, loop.log_writer, failed=False)
        del loop
        memory.free()


def train(trainer: Loop, mended: str = "") -> RunState:
    """Train on this rank; every rank of the group calls it.

    Args:
        trainer: the trainer of this rank.
        mended: the failure that was mended, in words; empty at the run's start.

    Returns:
        'finished' or 'stopped'.

    Raises:
        OutOfMemoryError: on the rank that ran out of memory.
    """
    try:
        with (
            diagnosis.kept_in(trainer.folder, trainer.rank),
            randomness.seeded_run(trainer.config),
            _keep_heap(trainer.device),
            precision.kernels(trainer.config),
        ):
            state = trainer.run(mended)
    except Exception as error:
        if not memory.is_exhausted(error):
            raise
        with undisturbed():
            # Explain before `let_go` frees the memory: the explanation measures it.
            explained = trainer.out_of_memory(error)
            if note := memory.mend_onednn(error, trainer.rank):
                explained = OutOfMemoryError(f"{explained}\n{note}")
            memory.let_go(error)
        raise explained from None
    _close(trainer)
    return state


def _keep_heap(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which a CPU rank keeps freed memory in the process for the next step. With a memory
    limit, which would count the freed memory, and on a GPU the context does nothing."""
    return nullcontext() if device.type != "cpu" or memory_limit.bounds_cpu() else heap.kept()


def _build_loop(
    config: TrainConfig,
    folder: Path,
    member: Membership,
    device: Device,
    settings_since_s: float = 0.0,
) -> Loop:
    """Build the loop of a run on this rank: recorder, recipe, log writer, and Trainer or Minimiser.

    Args:
        config: the run's settings.
        folder: the run's folder.
        member: this rank's place in the group.
        device: the description of the rank's device.
        settings_since_s: settings that were requested before this moment are in `config`, in seconds since
            the epoch.
    """
    # The recorder comes before all imports, which may take longer than anyone waits for a sign of life.
    recorder = Recorder(folder, member.rank, _probe(device, member.device)) if config.telemetry else None
    try:
        if recorder is not None:
            recorder.state("loading packages")
        import_module("torch._dynamo")  # DDP's constructor would import it, in the middle of the setup
        recipe = by_name.load(config, folder)
    except BaseException as error:
        if recorder is not None:
            if not _was_cut_off(error):
                recorder.event("failure", _one_line(error))
                recorder.state("failed")
            recorder.close()
        raise
    log_writer = LogWriter(config, folder, recorder) if recorder is not None and member.rank == 0 else None
    context = RunContext(folder, member, device, recorder, log_writer, settings_since_s)
    if isinstance(recipe, Problem):
        return Minimiser(config, recipe, context)
    return Trainer(config, recipe, context)


def _was_cut_off(error: BaseException) -> bool:
    """Return whether a rank raised this because another rank failed, or because the person stopped it."""
    return isinstance(error, _CUT_OFF) or type(error) is RuntimeError


def _close(trainer: Loop, cause: str = "", failed: bool = False) -> None:
    _end(trainer, cause, failed)
    _end_logs(trainer.recorder, trainer.log_writer, failed)


def _end(trainer: Loop, cause: str, failed: bool) -> None:
    """End everything that a trainer has running except its logs, and record that it failed, if it did.

    Args:
        trainer: the trainer of this rank.
        cause: the exception raised on this rank, to be recorded; empty if the rank was only cut off by a
            failure of another rank, which records that failure itself.
        failed: whether the run has failed.
    """
    trainer.close()
    if trainer.recorder is not None and failed:
        if cause:
            trainer.recorder.event("failure", cause, trainer.step)
        trainer.recorder.state("failed", trainer.step)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _end_logs(recorder: Recorder | None, log_writer: LogWriter | None, failed: bool) -> None:
    """Write the last records and close the logs."""
    if log_writer is not None:
        log_writer.close(failed)
    if recorder is not None:
        recorder.close()


def _probe(device: Device, torch_device: torch.device) -> Callable[[], Mapping[str, float]]:
    """Return a function that the recorder's thread calls to measure this rank's memory in bytes and the
    utilization of its device."""
    utilization = devices.utilization_probe(device)
    if torch_device.type == "cpu":
        return utilization
    return lambda: {
        **utilization(),
        "memory_allocated_bytes": float(torch.cuda.memory_allocated(torch_device)),
        "memory_reserved_bytes": float(torch.cuda.memory_reserved(torch_device)),
    }


def main(arguments: list[str]) -> int:
    """Train as one rank of torchrun, or alone if there is no torchrun.

    The argument is a run.toml, from a run's own folder or written by hand. The run gets a folder of its own
    under the settings' `runs_dir`, and rank 0 prints its path. With `resume = "auto"` a job that is started
    again continues in the folder that it made the first time.

    Returns:
        The exit code.
    """
    if len(arguments) != 1:
        raise ConfigError("usage: torchrun --nproc-per-node=N -m nbgpu.engine.train run.toml")
    cluster, asked = read_toml(Path(arguments[0]))
    if cluster.simulated:
        raise ConfigError(
            f"{arguments[0]} asks for a {cluster.simulated}, which only the ranks of a notebook or of nbgpu train have. "
            "Remove link and slow_rank from its [cluster]"
        )
    if cluster.at_least is not None:
        raise ConfigError(
            f"{arguments[0]} asks for at_least={cluster.at_least} ranks, and torchrun decides how many there are. "
            f"Remove it from its [cluster], and start torchrun with --nproc-per-node={cluster.at_least}"
        )
    if cluster.allocator and not allocator.set_variables():
        raise ConfigError(
            f"{arguments[0]} asks for allocator={cluster.allocator!r}, which torch reads before this program does. "
            f"Start torchrun with {allocator.variable()}={cluster.allocator} in its environment, or remove allocator"
        )
    place = _place_of_torchrun(cluster)
    adapt_to_devices(asked, place.all_devices)
    member = _set_up_process(place, cluster)
    # A single rank needs no rendezvous.
    group.form(member, None if member.world_size > 1 else dist.HashStore())  # type: ignore[attr-defined]
    try:
        return _train_as_member(asked, cluster, place, member)
    finally:
        # Ended here and not with its last reference, which the trainer's DDP object may hold: the destructor
        # would keep the GIL (torch 2.13) and sometimes wait for a thread that waits for the GIL.
        dist.destroy_process_group()


def _train_as_member(
    asked: TrainConfig, cluster: ClusterConfig, place: _TorchrunPlace, member: Membership
) -> int:
    """Train in the group of torchrun's ranks; return the exit code."""
    rank = member.rank
    folder, config, continues = _claim_run_folder(asked, cluster, place.all_devices, rank)
    is_finished = together(lambda: continues and rank == 0 and jobs.is_finished(folder))
    if exchange.broadcast(is_finished, source=0):
        if rank == 0:
            print(  # noqa: T201 - what the command is for
                f"finished already: {folder}\nThis job has nothing left to do. With another {jobs.VARIABLE} (or torchrun "
                "--rdzv-id) in its environment it begins a new run"
            )
        return 0
    lock = together(lambda: jobs.hold(folder) if rank == 0 and jobs.job_identity(asked) else None)
    has_requests = rank == 0 and continues and (folder / COMMANDS).exists()
    together(lambda: pass_over_earlier_requests(folder) if has_requests else None)
    trainer = _build_loop(config, folder, member, place.device)
    try:
        with ending.listening(lambda: trainer.step):
            state = _leaving_outcome(folder, rank, lambda: train(trainer))
    except BaseException as error:
        _close(trainer, "" if isinstance(error, PeerFailed) else _one_line(error), failed=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    signals = exchange.gather(ending.received()) if state == "stopped" else []
    if rank == 0:
        print(f"{state}: {folder}\n`nbgpu report {folder}` makes one page of it")  # noqa: T201 - what the command is for
    return _exit_code(folder, signals, rank)


class _TorchrunPlace(NamedTuple):
    """The place that torchrun's environment gives to this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    local_devices: tuple[Device, ...]
    """The devices of the ranks on this host."""

    @property
    def device(self) -> Device:
        return self.local_devices[self.local_rank]

    @property
    def all_devices(self) -> tuple[Device, ...]:
        """Return the devices of all ranks, which assumes that the other hosts have the same as this one."""
        return self.local_devices * (self.world_size // self.local_world_size)


def _place_of_torchrun(cluster: ClusterConfig) -> _TorchrunPlace:
    """Return the place of this process in torchrun's group, and the devices of the ranks on this host;
    ConfigError if the settings cannot be followed under torchrun."""
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rank, world_size, local_rank, local_world_size = (
        int(os.environ.get(name, alone)) for name, alone in names.items()
    )
    if gpus_setting.num_free(cluster.gpus) is not None:
        raise ConfigError(
            f"gpus = {cluster.gpus!r} counts in a cluster that nbgpu starts. Under torchrun name the GPUs, or take all "
            "that are visible (CUDA_VISIBLE_DEVICES) with gpus = 'all'"
        )
    # All GPUs that the launcher makes visible belong to this job, so that 'auto' means all of them: those in
    # use are in use by the job's other ranks.
    gpus = gpus_setting.ALL if cluster.gpus == gpus_setting.AUTO else cluster.gpus
    local_devices = tuple(devices.choose(gpus, local_world_size))
    site.require_within_limit(len({device.uuid for device in local_devices if device.kind == "cuda"}))
    return _TorchrunPlace(rank, world_size, local_rank, local_world_size, local_devices)


def _set_up_process(place: _TorchrunPlace, cluster: ClusterConfig) -> Membership:
    """Set up this process for its device and its transport, before CUDA, NCCL and gloo read the
    environment."""
    # Under torchrun nothing could restart the processes, so only the first transport is tried.
    transport = transports.candidates(cluster, place.local_devices)[0]
    visible = (
        [place.device]
        if devices.is_part(place.device)
        else [d for d in place.local_devices if d.kind == "cuda"]
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(d.uuid for d in visible))
    bound = numa.binding(numa.bindable() if cluster.bind_cores else {}, place.device, place.local_devices)
    num_threads = cluster.threads_for(place.local_world_size, share=bound.share)
    numa.bind(bound)
    torch.set_num_threads(num_threads)
    torch_settings.note_beginning()
    if cluster.debug:
        diagnosis.compare_collectives()
    member = Membership(
        place.rank,
        place.world_size,
        place.local_rank,
        torch.device(devices.torch_name(place.device, place.local_devices)),
        transport.backend,
        transport.name,
        cluster.collective_timeout_s,
    )
    on_one_host = place.world_size == place.local_world_size
    if on_one_host:
        # Otherwise gloo and NCCL listen on the address of the host's name, which other hosts may reach.
        group.stay_on_loopback()
    if transport.name == transports.NCCL_SAFE:
        safe_nccl.apply(one_host=on_one_host)
    limit_bytes = devices.memory_limit_bytes(cluster, place.device, place.local_devices)
    if limit_bytes is not None:
        memory_limit.enforce(limit_bytes, member.device)
    return member


def _claim_run_folder(
    config: TrainConfig, cluster: ClusterConfig, devices_of_ranks: Sequence[Device], rank: int
) -> tuple[Path, TrainConfig, bool]:
    """Find the run folder that an earlier start of this job has made, or make one. A collective; only rank 0
    uses the disk.

    Args:
        config: the settings as the person gave them.
        cluster: the settings of the cluster.
        devices_of_ranks: the devices of all ranks, in order of rank.
        rank: this rank.

    Returns:
        (the folder, the run's settings, whether an earlier start has made the folder).
    """
    job = jobs.job_identity(config)
    earlier = together(lambda: str(jobs.folder_of(config, job) or "") if job and rank == 0 else "")
    if earlier := exchange.broadcast(earlier, source=0):
        folder = Path(earlier)
        runs.require_own(folder)
        _, as_begun = runs.read_settings(folder)
        return folder, adapt_to_devices(runs.with_changes(as_begun, folder), devices_of_ranks), True
    settled = together(lambda: _settle(config, cluster, devices_of_ranks) if rank == 0 else None)
    values = exchange.broadcast({} if settled is None else settled.chosen.values, source=0)
    complete = adapt_to_devices(config.changed(**values), devices_of_ranks)
    if config.amp == "auto":
        # Each host knows its own devices only.
        complete = complete.changed(amp=least_amp(exchange.gather(complete.amp)))

    def create_folder() -> str:
        """Create the folder on rank 0, which has the settings, and return its path."""
        if settled is None:
            return ""
        folder = runs.create(replace(settled, config=complete), cluster)
        if job:
            jobs.note(folder, config, job)
        return str(folder)

    return Path(exchange.broadcast(together(create_folder), source=0)), complete, False


def _exit_code(folder: Path, signals: Sequence[int | None], rank: int) -> int:
    """Return the exit code that tells the launcher whether to start the ranks again.

    It is 0 if the run is finished or a person stopped it. It is also 0 before a time limit (SIGUSR1): with
    another code torchrun would restart the ranks until time is up. Rank 0 then leaves a file, by which the
    batch script queues the job again. After SIGTERM it is 143: torchrun restarts the ranks on the hosts that
    are left.
    """
    if signal.SIGTERM in signals:
        return 128 + signal.SIGTERM
    if signal.SIGUSR1 in signals and rank == 0 and (path := os.environ.get(jobs.AGAIN)):
        Path(path).write_text(f"{folder}\n")
    return 0


def _settle(config: TrainConfig, cluster: ClusterConfig, devices_of_ranks: Sequence[Device]) -> SettledConfig:
    """Complete the settings of a run on rank 0: choose those that are left to the data, by the files and the
    memory of a rank, and find the checkpoint to resume."""
    memory_bytes = devices.least_rank_memory_bytes(cluster, devices_of_ranks)
    on_gpu = all(device.kind == "cuda" for device in devices_of_ranks)
    return settling.settle(
        config,
        devices_of_ranks,
        lambda whole: from_data.choose(whole.model_dump(mode="json"), on_gpu, memory_bytes),
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NbgpuError as error:
        sys.exit(f"{type(error).__name__}: {error}")
