"""The plan of a scaling study: the varied setting, its points and their checks, and study.toml."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import tomli_w
from pydantic import Field

from nbgpu.config import (
    CheckpointSettings,
    ClusterConfig,
    TrainConfig,
    config_of_point,
    read_tables,
    settings_of,
    train_config,
    with_preset,
)
from nbgpu.config.settings import Settings
from nbgpu.errors import ConfigError
from nbgpu.host import enough_ranks, free_gpus
from nbgpu.machine import devices, requirements
from nbgpu.machine.files import new_folder, write_whole
from nbgpu.planning import host_devices
from nbgpu.planning.suitability import adapt_to_devices, divide
from nbgpu.protocol.records import Device
from nbgpu.text.ranks import count_of_ranks
from nbgpu.text.similar import did_you_mean

FILE = "study.toml"
RANKS = "ranks"
"""The value of `vary` for a study that varies the number of ranks, and not a setting."""

Mode = Literal["strong", "weak"]

_MAX_POINTS = 64
_NOTHING = {"nothing": True}
"""The table that stands for None in study.toml, because TOML has no null. A text could be the value of a
setting."""
DECIDED = {
    "steps": "measured_steps and warm_up_steps say how many steps a point has",
    "epochs": "measured_steps and warm_up_steps say how many steps a point has",
    "warmup_epochs": "steps are measured; give warmup_steps",
    "val_every_epochs": "a study counts whole cycles of steps; give val_every",
    "checkpoint_every_epochs": "a study counts whole cycles of steps; give checkpoint_every",
    "smoke_test": "a smoke test is too short to be measured",
    "resume": "every point begins with the first step",
    "runs_dir": "the runs are in the study's folder; studies_dir names another place",
    "telemetry": "the study reads what the ranks record",
    "log_every": "the study reads every step",
    "early_stop_patience": "every point has the same number of steps",
}
"""Settings of a run that cannot be given for a study, because the study sets them, each with the reason."""


class StudyConfig(Settings):
    """How a study measures its points."""

    FROM_SITE: ClassVar[Mapping[str, str]] = {"studies_dir": "runs_dir"}

    mode: Mode = "weak"
    """what stays the same with more ranks: 'weak' keeps the batch of each rank, 'strong' the samples of a
    step over all ranks: batch_size x accumulate, or global_batch_size"""
    repeats: int = Field(3, ge=1, le=100)
    """how often each point is measured, in turns with the others"""
    measured_steps: int = Field(20, ge=3, le=100_000)
    """steps of each repeat that are measured"""
    warm_up_steps: int = Field(5, ge=0, le=100_000)
    """steps before them that are not, such as those in which memory is taken"""
    studies_dir: str = "nbgpu_runs"
    """folder that gets one folder for each study"""


@dataclass(frozen=True)
class StudyPoint:
    """One measurement of a study: a value of the varied setting, or a number of ranks."""

    number: int
    value: Any
    ranks: int
    config: TrainConfig
    """The settings of its runs on these ranks, except for the folder."""

    @property
    def samples_per_step(self) -> int:
        """The samples of one step over all ranks."""
        return self.config.samples_per_step(self.ranks)

    @property
    def cycle(self) -> int:
        """The number of steps after which the pattern of validations and checkpoints repeats; 0 without them.
        Only the times of whole cycles can be compared."""
        return _cycle(self.config)


@dataclass(frozen=True)
class StudyPlan:
    """A whole study, as `study.toml` describes it."""

    recipe: str
    config: StudyConfig
    cluster: ClusterConfig
    """The settings of the cluster. `ranks` is used only if another setting is varied. A cluster on other
    hosts is started with all its ranks, and each point uses as many of them as it needs."""
    vary: str
    """'ranks', or a field of the recipe's settings."""
    values: Sequence[Any]
    train: Mapping[str, Any]
    """The settings that the user gave, which all points have in common."""
    advice: str = ""
    """The advice that the study tests by its two points, without it and with it; empty for none."""
    promised: float = 0.0
    """The speedup that the advice promises: the samples per second with it, divided by those without it."""
    placement_note: str = ""
    """A sentence on where `at_least` has placed the ranks, and what their times mean; empty in a plan that
    was read from study.toml."""

    @property
    def title(self) -> str:
        """The name of the run or the recipe, and the varied setting, as messages and folders name the
        study."""
        return f"{self.train.get('run_name') or train_config(self.recipe).title}-{self.vary}"

    @property
    def subject(self) -> str:
        """The name of the measured recipe for titles; for a recipe in a file, the name of the file."""
        return Path(self.recipe).name

    def point_cluster(self, ranks: int) -> ClusterConfig:
        """Return the settings of a cluster with this number of ranks; a cluster on other hosts has all ranks
        for every point."""
        return self.cluster.changed(ranks=ranks) if self.cluster.is_local else self.cluster

    def _devices(self, ranks: int | None) -> Sequence[Device]:
        """Return the devices of a point's ranks, which on other hosts are assumptions.

        Args:
            ranks: the number of ranks; None for the number in the cluster's settings.

        Raises:
            ConfigError: the cluster cannot have so many ranks.
        """
        if self.cluster.is_local:
            cluster = self.cluster if ranks is None else self.point_cluster(ranks)
            gpus = cluster.gpus if cluster.takes_free_gpus else cluster.named_gpus
            chosen: Sequence[Device] = free_gpus.assumed(gpus, cluster.ranks)
            devices.require_simulable(cluster, chosen)
            return chosen
        assumed = host_devices.assumed_devices(self.cluster)
        num_ranks = (
            len(assumed) if ranks is None else ClusterConfig.checked(ranks=ranks).ranks or len(assumed)
        )
        if num_ranks > len(assumed):
            raise ConfigError(
                f"{self.cluster.num_hosts} host(s) with gpus_per_node={self.cluster.gpus_per_node} have room for "
                f"{count_of_ranks(len(assumed))}. Give more hosts, nodes or gpus_per_node"
            )
        return assumed[:num_ranks]

    def points(self) -> list[StudyPoint]:
        """Return the checked points.

        Raises:
            ConfigError: points cannot be measured; the message has one line for each reason.
        """
        points = []
        values_by_problem: dict[str, list[Any]] = {}
        for number, value in enumerate(self.values):
            try:
                points.append(self._point(number, value))
            except ConfigError as error:
                for line in str(error).splitlines():
                    values_by_problem.setdefault(line, []).append(value)
        if values_by_problem:
            named = [
                f"{self.vary} = {', '.join(map(str, v))}: {line}" for line, v in values_by_problem.items()
            ]
            raise ConfigError(
                f"{len(self.values) - len(points)} of {len(self.values)} points cannot be measured, and nothing was started:\n"
                + "\n".join(named)
            )
        return points

    def _point(self, number: int, value: Any) -> StudyPoint:
        """Build and check one point: the shared settings, the varied value, and the steps of the study. In
        strong scaling, every point has the global batch that the settings give one rank.

        Raises:
            ConfigError: the point cannot be measured, or cannot be compared with the others.
        """
        is_ranks = self.vary == RANKS
        devices = self._devices(value if is_ranks else None)
        num_steps = self.config.warm_up_steps + self.config.measured_steps
        unused = settings_of(self.recipe).UNUSED
        # Nothing but training is measured, unless the settings ask for it.
        quiet = {"val_every": 0, "warmup_steps": 0, "work_out_result": False}
        used_quiet = {name: value for name, value in quiet.items() if name not in unused}
        shared = {**used_quiet, **self.train, "steps": num_steps}
        config = config_of_point(self.recipe, shared, {} if is_ranks else {self.vary: value})
        if cycle := _cycle(config):
            if self.config.measured_steps % cycle:
                fitting = cycle * (self.config.measured_steps // cycle + 1)
                raise ConfigError(
                    f"validations and checkpoints come again every {cycle} steps, and measured_steps = "
                    f"{self.config.measured_steps} is not a multiple of that. Give measured_steps={fitting}"
                )
            # The time of a validation after the last measured step ends with the beginning of the next step,
            # so that one more step is needed.
            config = config.changed(steps=num_steps + 1)
        if config.left_to_data:
            # With more ranks, each may have less memory, and another model would be chosen.
            names = ", ".join(config.left_to_data)
            raise ConfigError(
                f"{names}: left out, and chosen by the memory of a rank. Points are compared only with the same model: give "
                f"what `nbgpu train {self.recipe} --plan` chooses with these files"
            )
        if "batch_size" in config.UNUSED:
            raise ConfigError(
                f"the recipe {config.recipe!r} has no batches, and its steps are not those of training"
            )
        if is_ranks and self.config.mode == "strong" and config.global_batch_size is None:
            config = config.changed(global_batch_size=config.batch_size * config.accumulate)
        if is_ranks and self.config.mode == "strong":
            _require_even_shares(config, len(devices))
        requirements.require_extras(config)
        # The settings have parsed the value, which is text on the command line.
        value = value if is_ranks else getattr(config, self.vary)
        return StudyPoint(number, value, len(devices), adapt_to_devices(config, devices))

    def write(self, folder: Path, environment: Mapping[str, Any]) -> None:
        """Write study.toml.

        Args:
            folder: the study's folder.
            environment: the hosts, devices and versions of the first start.
        """
        tables = {
            "study": {
                "recipe": self.recipe,
                "vary": self.vary,
                "values": [_as_toml(value) for value in self.values],
                **self.config.model_dump(mode="json", exclude_none=True),
            },
            "cluster": self.cluster.model_dump(mode="json", exclude_none=True),
            "train": {name: _as_toml(value) for name, value in self.train.items() if value is not None},
            "environment": dict(environment),
        }
        if self.advice:
            tables["advice"] = {"text": self.advice, "promised": self.promised}
        write_whole(folder / FILE, tomli_w.dumps(tables))

    @classmethod
    def read(cls, folder: Path) -> tuple[StudyPlan, Mapping[str, Any]]:
        """Read study.toml. Return (the plan, the hosts, devices and versions of the study's first start).

        Raises:
            ConfigError: the folder is not the folder of a study, or its file cannot be used.
        """
        path = folder / FILE
        if not path.exists():
            raise ConfigError(f"{folder} is not the folder of a study: it has no {FILE}")
        tables = read_tables(path)
        try:
            table = dict(tables["study"])
            recipe, vary, values = str(table.pop("recipe")), str(table.pop("vary")), list(table.pop("values"))
            train = {name: _from_toml(value) for name, value in tables["train"].items()}
            plan = cls(
                recipe,
                StudyConfig.checked(**table),
                ClusterConfig.checked(**tables["cluster"]),
                vary,
                [_from_toml(value) for value in values],
                train,
                str(tables.get("advice", {}).get("text", "")),
                float(tables.get("advice", {}).get("promised", 0.0)),
            )
            return plan, dict(tables["environment"])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path} is not what nbgpu writes: {error!r}") from None


def plan(recipe: str, vary: str, values: Sequence[Any], settings: Mapping[str, Any]) -> StudyPlan:
    """Plan a study.

    Args:
        recipe: the recipe to train.
        vary: 'ranks', or a field of the recipe's settings.
        values: the values to measure.
        settings: fields of StudyConfig, ClusterConfig and the recipe's settings. `preset` names a preset,
            whose values replace the defaults of the recipe's settings.

    Raises:
        ConfigError: something is not valid; the message has all known problems. Nothing was started.
    """
    settings = _with_preset(recipe, vary, values, settings)
    fields = settings_of(recipe).model_fields
    homes = (StudyConfig.model_fields, ClusterConfig.model_fields, fields)
    of_study, of_cluster, of_run = divide(settings, homes, f"a study of {recipe}")
    # All points have the same kind of device, so that they can be compared.
    cluster, placement_note = enough_ranks.placed(ClusterConfig.checked(**of_cluster))
    study = StudyPlan(
        recipe,
        StudyConfig.checked(**of_study),
        _with_room(cluster, values if vary == RANKS else [1]),
        vary,
        [tuple(value) if isinstance(value, list) else value for value in values],
        of_run,
        placement_note=placement_note,
    )
    if problems := list(_problems(study, fields)):
        raise ConfigError("\n".join(problems))
    return replace(study, values=[point.value for point in study.points()])


def _with_room(cluster: ClusterConfig, ranks: Sequence[Any]) -> ClusterConfig:
    """Return the settings of the cluster. On other hosts, if `gpus_per_node` is not given, each host gets as
    many ranks as the largest point needs, because the study cannot wait until the hosts are known."""
    if cluster.is_local or cluster.gpus_per_node is not None or not ranks:
        return cluster
    numbers = [ClusterConfig.checked(ranks=number).ranks or 1 for number in ranks]
    return cluster.changed(gpus_per_node=math.ceil(max(numbers) / cluster.num_hosts))


def _with_preset(
    recipe: str, vary: str, values: Sequence[Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings, with the values of their preset in place of its name.

    The settings in DECIDED, and those of checkpoints and validations, are not taken from the preset. If the
    user gave one, it is kept, and one in DECIDED is refused later.
    """
    # The preset is merged with the varied setting as if that were given, because values of the preset that
    # make it ineffective are then left out. The study sets it for each point, so that it is removed again.
    varied = {} if vary == RANKS else {vary: list(values)}
    merged = with_preset(recipe, {**varied, **settings})
    left_out = {*DECIDED, *CheckpointSettings.model_fields, "val_every"} - settings.keys()
    return {name: value for name, value in merged.items() if name not in {*varied, *left_out}}


def create_folder(study: StudyPlan, environment: Mapping[str, Any]) -> Path:
    """Make the folder of a new study, with access for the user only, and write study.toml into it."""
    folder = new_folder(study.config.studies_dir, f"study-{study.title}")
    folder.mkdir(parents=True, mode=0o700)
    study.write(folder, environment)
    return folder


def order(num_points: int, repeats: int) -> list[tuple[int, int]]:
    """Return the (repeat, point) pairs in the order in which they are measured.

    Each repeat measures all points, so that a machine that becomes warm or busy does not slow one point
    alone. Every other repeat goes backwards, so that the number of ranks changes by as little as possible.
    """
    points = range(num_points)
    return [(repeat, p) for repeat in range(repeats) for p in (points[::-1] if repeat % 2 else points)]


def _cycle(config: TrainConfig) -> int:
    """Return `StudyPoint.cycle` of the settings."""
    periods = [every for every in (config.val_every, config.checkpoint_every) if every]
    return math.lcm(*periods) if periods else 0


def _problems(study: StudyPlan, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of the study as a whole, before its points are checked."""
    if study.vary != RANKS and study.vary not in fields:
        meant = did_you_mean(study.vary, fields)
        yield f"{study.vary} is not a setting of {study.recipe}.{meant} Settings: {', '.join(fields)}"
    for name in (*study.train, study.vary):
        if name in DECIDED:
            yield f"{name} cannot be given: {DECIDED[name]}"
    if not study.values:
        yield f"{study.vary} has no values. Give a list, such as {study.vary}=[1, 2]"
    elif len(study.values) > _MAX_POINTS:
        yield f"{study.vary} has {len(study.values)} values, at most {_MAX_POINTS} go"
    elif len(set(map(repr, study.values))) < len(study.values):
        yield f"{study.vary} = {list(study.values)} has a value twice"
    if study.cluster.launcher_settings.IS_STARTED_BY_HAND:
        yield (
            f"launcher={study.cluster.launcher!r} does not go with a study: it has a cluster of its own, for which hosts would have to dial in "
            "again. Take launcher='ssh' or 'slurm', or %%scaling on the cluster that runs"
        )
    if study.cluster.save_before_time_limit:
        yield "save_before_time_limit does not go with a study: it keeps no variables"
    if study.cluster.keep:
        yield "keep does not go with a study: it ends with its process, and goes on with study.resume()"
    if (
        study.vary == RANKS
        and study.config.mode == "weak"
        and study.train.get("global_batch_size") is not None
    ):
        yield (
            "global_batch_size does not go with mode='weak', which keeps the batch of each rank. Give batch_size, or "
            "mode='strong'"
        )


def _require_even_shares(config: TrainConfig, num_ranks: int) -> None:
    """Raise ConfigError if the global batch cannot be divided evenly among the ranks and micro-batches."""
    assert config.global_batch_size is not None, "the caller has set global_batch_size"
    if config.global_batch_size % (num_ranks * config.accumulate):
        raise ConfigError(
            f"a step of {config.global_batch_size} samples cannot be shared out over {count_of_ranks(num_ranks)} and "
            f"accumulate={config.accumulate}. Give a global_batch_size that all numbers of ranks divide"
        )


def _as_toml(value: Any) -> Any:
    """Convert a value to a form that TOML can hold; `_from_toml` converts it back."""
    return _NOTHING if value is None else list(value) if isinstance(value, tuple) else value


def _from_toml(value: Any) -> Any:
    """Convert a value of study.toml back: None for the table that stands for it, and tuples for lists."""
    return None if value == _NOTHING else tuple(value) if isinstance(value, list) else value
