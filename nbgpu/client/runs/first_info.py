"""What is known of a run when it begins."""

from __future__ import annotations

from pathlib import Path

from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.config import TrainConfig
from nbgpu.protocol.records import RunInfo
from nbgpu.run_folder import names, resume


def first_info(folder: Path, config: TrainConfig, state: ClusterState) -> RunInfo:
    """Return what is known of a run before the ranks have looked at the data."""
    return RunInfo(
        run_id=folder.name,
        recipe=config.title,
        devices=state.devices,
        backend=state.backend,
        transport=state.transport.name,
        simulated=state.chosen_transport.simulated,
        total_steps=config.total_steps(steps_per_epoch=0),
        steps_per_epoch=0,
        batch_size=config.batch_size,
        global_batch_size=config.samples_per_step(len(state.devices)),
        started_s=(folder / names.SETTINGS).stat().st_mtime,
        resumed_from=resume.Beginning.read(folder).checkpoint,
        name=config.run_name,
    )
