"""Starts studies: of the number of ranks, or of one setting.

For editors and type checkers the parameters are in `starting.pyi`, which docs/generate_stub.py writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from nbgpu.client.cluster.cluster import cluster_with
from nbgpu.client.host import registry
from nbgpu.client.launchers.launcher import print_at_once
from nbgpu.client.scaling import measured_runs
from nbgpu.client.scaling.study import Study
from nbgpu.config import signatures
from nbgpu.errors import ConfigError
from nbgpu.planning import studies


@signatures.lists_settings
def scaling(
    recipe: str,
    ranks: Sequence[int] = (1, 2),
    mode: Literal["strong", "weak"] = "weak",
    repeats: int = 3,
    **settings: Any,
) -> Study:
    """Measure how a recipe's training becomes faster with more ranks. Returns at once.

    nbgpu.scaling("autoencoder", ranks=[1, 2, 4])                      # the same batch on each rank
    nbgpu.scaling("autoencoder", ranks=[1, 2, 4], mode="strong", global_batch_size=8)

    Args:
        recipe: what is trained.
        ranks: the numbers of ranks.
        mode: 'weak' keeps the batch of each rank, 'strong' the samples of a step over all ranks.
        repeats: how often each number of ranks is measured, in turns.
        settings: `measured_steps`, `warm_up_steps`, `studies_dir`, fields of the cluster's and the recipe's
            settings, and `preset`, the name of values for those of the recipe that are not given.

    Raises:
        ConfigError: something is not valid, or a number of ranks cannot be measured; nothing was started.
        ClusterError: a GPU is in use by a cluster.
    """
    return begin(recipe, studies.RANKS, ranks, {"mode": mode, "repeats": repeats, **settings})


@signatures.lists_settings
def study(recipe: str, **settings: Any) -> Study:
    """Measure what one setting does to the time of a step. Returns at once.

    nbgpu.study("autoencoder", bucket_mb=[0.5, 1, 5, 25])
    nbgpu.study("autoencoder", amp=["off", "bf16"], ranks=1)

    Args:
        recipe: what is trained.
        settings: as for `scaling`, and the number of `ranks`. The one setting with a list of values is
            varied.

    Raises:
        ConfigError: something is not valid, or not exactly one setting has several values; nothing was
            started.
        ClusterError: a GPU is in use by a cluster.
    """
    varied = {name: values for name, values in settings.items() if isinstance(values, list | range)}
    if len(varied) != 1:
        named = f", and these have: {', '.join(varied)}" if varied else ""
        raise ConfigError(
            f"a study varies one setting, which gets a list of values, such as bucket_mb=[1, 5, 25]{named}. To try "
            "combinations, take nbgpu.sweep"
        )
    ((vary, values),) = varied.items()
    return begin(recipe, vary, values, {n: v for n, v in settings.items() if n != vary})


def begin(
    recipe: str,
    vary: str,
    values: Sequence[Any],
    settings: Mapping[str, Any],
    advice: str = "",
    promised: float = 0.0,
) -> Study:
    """Check the plan of a new study, make its folder, and start to measure. Returns at once.

    Args:
        recipe: what is trained.
        vary: the varied setting, or `studies.RANKS`.
        values: its values.
        settings: the other settings, as for `scaling` and `study`.
        advice: the text of the advice that the study tries; empty for none.
        promised: the samples per second with the advice, as predicted, divided by those without it.

    Raises the errors of `scaling`.
    """
    plan = replace(studies.plan(recipe, vary, values, settings), advice=advice, promised=promised)
    largest = max(plan.points(), key=lambda point: point.ranks)
    cluster = cluster_with(plan.point_cluster(largest.ranks))
    if not cluster.config.share_gpus:
        registry.require_free(cluster.devices)
    if plan.placement_note:
        print_at_once(plan.placement_note)
    # Other hosts are known when the study has started them.
    hosts: Mapping[str, int] | None = None if cluster.config.is_local else {}
    environment = measured_runs.environment(
        cluster.devices, cluster.parts.state.chosen_transport.describe(), hosts
    )
    return Study(studies.create_folder(plan, environment)).resume()
