"""Writes `run_info.json`, the facts about a run that its readers need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nbgpu.config import TrainConfig
from nbgpu.engine.group.group import Membership
from nbgpu.machine.clock import notebooks_time_s
from nbgpu.machine.files import write_whole
from nbgpu.protocol.records import Device, RunInfo
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import names, resume


def write(
    folder: Path,
    config: TrainConfig,
    member: Membership,
    devices: Sequence[Device],
    total_steps: int,
    steps_per_epoch: int,
    data: Sequence[str],
    began: tuple[int, int] = (0, 0),
    parameters: int = 0,
) -> None:
    """Write the file, or rewrite it after a change of settings. One rank calls this.

    Args:
        folder: the run's folder.
        config: the settings as they are now.
        member: a rank's place in the group.
        devices: the devices of all ranks, in order of rank.
        total_steps: the optimizer steps of the run.
        steps_per_epoch: the optimizer steps of one pass over the data.
        data: how the data reach the ranks, in a sentence each.
        began: the (steps, epochs) done when this number of steps per epoch came into force.
        parameters: the number of elements of the model's parameters; 0 if it is not built yet.
    """
    path = folder / names.INFO
    earlier = runs.read_info(folder) if path.exists() else None
    # Sections of epochs with the same number of steps. Later ones are dropped after going back to a
    # checkpoint.
    sections = [section for section in earlier.epochs_from if section[0] < began[0]] if earlier else []
    info = RunInfo(
        run_id=folder.name,
        recipe=config.title,
        devices=tuple(devices),
        backend=member.backend,
        transport=member.transport,
        simulated=member.simulated,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        batch_size=config.batch_size,
        global_batch_size=config.samples_per_step(member.world_size),
        started_s=earlier.started_s if earlier else notebooks_time_s(),
        resumed_from=resume.Beginning.read(folder).checkpoint,
        data=(*runs.read_chosen(folder).words, *data),
        epochs_from=(*sections, (*began, steps_per_epoch)),
        parameters=parameters,
        name=config.run_name,
        epochs=config.epochs or 0,
    )
    write_whole(path, json.dumps(info.to_json(), indent=2) + "\n")
