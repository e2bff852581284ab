"""Tries advice of `explain`: a study without and with the proposed change, compared with the prediction."""

from __future__ import annotations

from typing import Any

from nbgpu.client.runs.run import Run
from nbgpu.client.scaling.starting import begin
from nbgpu.client.scaling.study import Study
from nbgpu.config import ClusterConfig, read_tables
from nbgpu.config.conditions import defaults_beside
from nbgpu.errors import ConfigError
from nbgpu.performance.bottlenecks import Advice, Explanation
from nbgpu.performance.links import Links
from nbgpu.planning.studies import DECIDED, RANKS, StudyConfig
from nbgpu.run_folder import names

_BETWEEN = {"val_every": "validation", "checkpoint_every": "checkpoints"}
"""The activities between steps, as `Explanation.spent_s` names them, by the setting that says how often they
happen. A trial has none of them, except the one that the advice is about."""
_LEAST_STEPS = 20
"""The fewest steps that a trial measures if the advice is about validations or checkpoints."""
_CYCLES = 2
"""The fewest validations or checkpoints that such a trial includes."""


def try_advice(explained: Run | Study, number: int = 1, links: Links | None = None, **settings: Any) -> Study:
    """Measure the effect of a piece of advice of `explain`, by a study with two points: without and with it.

    Returns at once. The study's table compares the measured gain with the predicted one.

    Args:
        explained: the run or the study whose `explain` gave the advice. For a study, `explain` is called for
            the last point that was measured.
        number: the number of the advice, counted from 1.
        links: as for `run.explain`.
        settings: settings of the study, such as `repeats`, `measured_steps` and `studies_dir`.

    Raises:
        ConfigError: there is no such advice, it is not about a setting, or the ranks of the run were on other
            hosts; nothing was started.
        RunError: nothing can be explained yet.
        ClusterError: a GPU is in use by a cluster.
    """
    unknown = settings.keys() - StudyConfig.model_fields.keys()
    if unknown:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: a trial has the settings of what it tries. Those of its study are "
            f"{', '.join(StudyConfig.model_fields)}"
        )
    if isinstance(explained, Run):
        explanation = explained.explain(links)
        config, num_ranks = explained.config, explained.info.world_size
        tables = read_tables(explained.folder / names.SETTINGS)
        cluster = ClusterConfig.checked(**tables.get("cluster", {}))
    else:
        explanation, point = explained.explain(), explained.explained_point()
        config, num_ranks, cluster = point.config, point.ranks, explained.plan.cluster
    advice = _chosen(explanation, number)
    ((name, value),) = advice.settings.items()
    if not cluster.is_local:
        raise ConfigError(
            f"advice {number} cannot be tried, because a trial has its ranks on the notebook's host, and those of this run "
            f"were on other hosts (launcher={cluster.launcher!r}). Give the next run there {name}={value!r}, and compare"
        )
    # Take the settings of the run, but reset those that the study decides itself (`DECIDED`), and those of
    # validations and checkpoints, to their defaults.
    reset = {*DECIDED, *_BETWEEN} & type(config).model_fields.keys()
    defaults = defaults_beside(type(config), config.model_dump())
    given = config.counting(**{other: defaults[other] for other in reset}).beyond_defaults
    if given.get("global_batch_size") is not None:
        # The batch of a rank follows from it.
        given.pop("batch_size", None)
    train = {other: given[other] for other in given if other not in {"recipe", name}}
    if name in _BETWEEN:
        settings = {"measured_steps": max(_LEAST_STEPS, _CYCLES * value), **settings}
        # The measurement ends after a whole cycle.
        settings["measured_steps"] += -settings["measured_steps"] % value
    # The study's cluster ends with the study, even if that of the run was started with `keep`.
    cluster_settings = {**cluster.model_dump(), "keep": False}
    return begin(
        config.recipe,
        name,
        [getattr(config, name), value],
        {**cluster_settings, **train, RANKS: num_ranks, **settings},
        advice=advice.text,
        promised=_promised(explanation, advice, name),
    )


def _chosen(explanation: Explanation, number: int) -> Advice:
    """Return the advice of this number; ConfigError if there is none, or if it is not about a setting."""
    if not 1 <= number <= len(explanation.advice):
        there_is = f"there are {len(explanation.advice)}" if explanation.advice else "there is none"
        raise ConfigError(f"advice {number}: {there_is}. {explanation.sentences[0]}")
    advice = explanation.advice[number - 1]
    if not advice.settings:
        raise ConfigError(f"advice {number} is not about a setting, so it cannot be tried: {advice.text}")
    return advice


def _promised(explanation: Explanation, advice: Advice, changed_setting: str) -> float:
    """Return the predicted ratio of samples per second with the advice to those without it. The trial's runs
    leave out the validations and checkpoints that the advice is not about, so their time is subtracted from
    both step times."""
    # Both step times are for the same number of samples.
    between_s = sum(
        explanation.spent_s[activity] for name, activity in _BETWEEN.items() if name != changed_setting
    )
    return (explanation.step_s - between_s) / (advice.step_s - between_s)
