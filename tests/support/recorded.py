"""A run without training: real Recorders in threads write what ranks would, into a real run's folder."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbgpu.config import TrainConfig, train_config
from nbgpu.errors import NbgpuError, RunError
from nbgpu.protocol.records import Device, RankFailure, RankStatus, RunInfo
from nbgpu.run_folder.commands import CommandWatch, send_command
from nbgpu.run_folder.reader import Reader
from nbgpu.run_folder.recorder import Recorder

GIB = 2**30


class RecordedRun:
    """Has what the panel reads of a `Run`, and ranks that are threads.

    Args:
        folder: the run's folder, which exists.
        num_ranks: how many ranks write.
        steps: the last step.
        step_s: how long a step takes.
        cuda: whether the ranks say that they are GPUs.
    """

    def __init__(
        self,
        folder: Path,
        num_ranks: int = 2,
        steps: int = 100,
        step_s: float = 0.02,
        cuda: bool = True,
    ) -> None:
        self.folder = folder
        self.config: TrainConfig = train_config("autoencoder", steps=steps)
        kind, name, memory = ("cuda", "NVIDIA H200", 139 * GIB) if cuda else ("cpu", "a processor", 24 * GIB)
        devices = tuple(
            Device(kind, name, f"GPU-{rank:08d}" if cuda else "", rank, memory) for rank in range(num_ranks)
        )
        self.info = RunInfo(
            run_id=folder.name,
            recipe="autoencoder",
            devices=devices,
            backend="nccl" if cuda else "gloo",
            total_steps=steps,
            steps_per_epoch=20,
            batch_size=2,
            global_batch_size=2 * num_ranks,
            started_s=time.time(),
        )
        self.status: str = "starting"
        self.hang = ""
        self.outlives_kernel = False
        self.time_left_s: float | None = None
        self.lost_ranks: list[int] = []
        self.failures: list[RankFailure] = []
        self.error: NbgpuError | None = None
        self.reader = Reader(folder, num_ranks)
        self._step_s = step_s
        self._cuda = cuda
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Any], None]] = []
        self._thread = threading.Thread(target=self._train, name="recorded-run", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def unreported_heals(self) -> list[str]:
        return []

    def statuses(self) -> list[RankStatus]:
        return self.reader.statuses(self.info.devices)

    def on_end(self, callback: Callable[[Any], None]) -> None:
        with self._lock:
            if self.status not in ("finished", "stopped", "failed"):
                self._callbacks.append(callback)
                return
        callback(self)

    def pause(self) -> None:
        self._ask("pause")

    def resume(self) -> None:
        self._ask("resume")

    def stop(self) -> None:
        self._ask("stop")

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._over.wait(timeout_s):
            raise TimeoutError
        self._thread.join()

    def _ask(self, command: Any) -> None:
        if self.over:
            raise RunError(f"the run is {self.status}: it cannot {command} any more")
        send_command(self.folder, command)

    def _train(self) -> None:
        recorders = [Recorder(self.folder, rank) for rank in range(self.info.world_size)]
        watch = CommandWatch(self.folder)
        final = "finished"
        self._enter(recorders, "training", 0)
        for step in range(1, self.info.total_steps + 1):
            time.sleep(self._step_s)
            command = watch.newest()
            if command == "pause":
                self._enter(recorders, "paused", step)
                while (command := watch.newest()) not in ("resume", "stop"):
                    time.sleep(0.01)
                self._enter(recorders, "training", step)
            for rank, recorder in enumerate(recorders):
                recorder.sample(step, **self._numbers(rank, step))
            if step % 25 == 0:
                recorders[0].sample(
                    step, val_loss=1.1 * math.exp(-step / 60) + 0.12, val_psnr_db=18 + step / 50
                )
            if step % 40 == 0:
                recorders[0].event("checkpoint", f"step-{step}", step)
            if command == "stop":
                final = "stopped"
                break
        if final == "finished":
            table = {
                "autoencoder": {"psnr_db": 23.1, "ssim": 0.87},
                "trilinear": {"psnr_db": 21.9, "ssim": 0.8},
            }
            recorders[0].event("result", "held out", table=table, note="<b>made up</b>")
        self._enter(recorders, final, self.info.total_steps)
        for recorder in recorders:
            recorder.close()
        self.reader.close()
        with self._lock:
            self.status = final
            callbacks = list(self._callbacks)
        try:
            for callback in callbacks:
                callback(self)
        finally:
            self._over.set()

    def _numbers(self, rank: int, step: int) -> dict[str, float]:
        wave = math.sin(step * 1.7 + rank * 2)
        numbers = {
            "loss": math.exp(-step / 60) + 0.1 + 0.08 * wave * math.exp(-step / 200),
            "lr": 1e-3 * (1 - step / self.info.total_steps),
            "step_s": self._step_s,
            "data_s": self._step_s * (0.05 + 0.1 * rank),
            "samples_per_s": 2 / self._step_s * (1 + 0.05 * wave),
            "grad_norm": 1 + 0.3 * wave,
            "kl": 5 + wave,
            "utilization_percent": 90 - 6 * rank + 4 * wave,
        }
        if self._cuda:
            numbers["memory_reserved_bytes"] = (40 + 3 * rank + min(step / 10, 8)) * GIB
            numbers["memory_allocated_bytes"] = (33 + 3 * rank + min(step / 10, 6) + wave) * GIB
        else:
            numbers["memory_rss_bytes"] = (0.9 + 0.05 * rank + 0.01 * wave) * GIB
        return numbers

    def _enter(self, recorders: list[Recorder], state: Any, step: int) -> None:
        if state not in ("finished", "stopped"):
            self.status = state
        for recorder in recorders:
            recorder.state(state, step)
