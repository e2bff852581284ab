"""The plan of a sweep: the varied settings, its trials and their checks, and sweep.toml."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import Field
from pydantic.fields import FieldInfo

from nbgpu.config import ClusterConfig, TrainConfig, config_of_point, read_tables, settings_of, with_preset
from nbgpu.config.conditions import default_of, defaults_beside
from nbgpu.config.launchers import LAUNCHERS, LauncherSettings
from nbgpu.config.settings import Settings
from nbgpu.errors import ConfigError
from nbgpu.machine import requirements
from nbgpu.machine.files import new_folder, write_whole
from nbgpu.planning.suitability import adapt_to_devices, divide
from nbgpu.protocol.records import Device

FILE = "sweep.toml"
MAX_TRIALS = 10_000

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(?:[:\s]\s*(log))?\s*")
_DRAWN_DIGITS = 4
"""The significant digits of a drawn number; more would only make the tables of trials hard to read."""
_MAX_DRAWS_PER_TRIAL = 100
_NOT_SWEPT = {
    "recipe": "a sweep has one recipe",
    "runs_dir": "it is the folder that gets the sweep's own",
    "resume": "every trial goes on by itself from what it has",
}


class SweepConfig(Settings):
    """How a sweep runs its trials."""

    random: int = Field(0, ge=0, le=MAX_TRIALS)
    """number of trials with values drawn at random; 0 for the grid: every combination"""
    random_seed: int = Field(0, ge=0, le=2**31 - 1)
    """seed of what is drawn for the trials"""
    parallel: int | None = Field(None, ge=1, le=256)
    """trials that train side by side; left out: as many as the GPUs allow, or 2 CPU ranks in all"""
    sort_by: str = Field("val_loss", min_length=1)
    """the recorded number by which the trials are compared"""
    goal: Literal["min", "max"] = "min"
    """whether the lowest or the highest is the best"""


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, both included: uniform in '1e-5..1e-2', log-uniform in '1e-5..1e-2:log'."""

    low: float
    high: float
    log: bool
    whole: bool
    """Whether only whole numbers are drawn."""

    def __str__(self) -> str:
        ends = [str(int(end)) if self.whole else repr(end) for end in (self.low, self.high)]
        return f"{'..'.join(ends)}{':log' if self.log else ''}"

    def draw(self, source: random.Random) -> float | int:
        """Draw a number, rounded to _DRAWN_DIGITS digits or to a whole number, and never outside the
        range."""
        if self.log:
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        elif self.whole:
            return source.randint(int(self.low), int(self.high))
        else:
            value = source.uniform(self.low, self.high)
        if self.whole:
            return round(value)
        return min(max(float(f"{value:.{_DRAWN_DIGITS}g}"), self.low), self.high)


Varied = Mapping[str, Sequence[Any] | Range]
"""The values, or the range of numbers, that a sweep tries for each field."""


@dataclass(frozen=True)
class SweepPlan:
    """A whole sweep, as `sweep.toml` describes it."""

    recipe: str
    config: SweepConfig
    cluster: ClusterConfig
    shared: Mapping[str, Any]
    """The settings that all trials have in common."""
    varied: Varied
    trials: Sequence[Mapping[str, Any]]
    """For each trial, the settings in which trials differ."""

    def settings(self, number: int) -> TrainConfig:
        """Return the checked settings of one trial."""
        return config_of_point(self.recipe, self.shared, self.trials[number])

    def asked(self, number: int) -> dict[str, Any]:
        """Return the values of one trial for the settings that the user varies. Trials may differ in further
        settings, whose defaults depend on these."""
        return {name: value for name, value in self.trials[number].items() if name in self.varied}

    def write(self, folder: Path) -> None:
        """Write the plan as sweep.toml into a folder, whole or not at all."""
        varied = {
            name: str(values) if isinstance(values, Range) else [_as_toml(value) for value in values]
            for name, values in self.varied.items()
        }
        tables = {
            "sweep": {"recipe": self.recipe, **self.config.model_dump(mode="json", exclude_none=True)},
            "cluster": self.cluster.model_dump(mode="json", exclude_none=True),
            "train": {name: _as_toml(v) for name, v in self.shared.items() if v is not None},
            "vary": varied,
            "trials": [{name: _as_toml(v) for name, v in trial.items()} for trial in self.trials],
        }
        write_whole(folder / FILE, tomli_w.dumps(tables))

    @classmethod
    def read(cls, folder: Path, **overrides: Any) -> SweepPlan:
        """Read a plan from sweep.toml.

        Args:
            folder: the sweep's folder.
            overrides: settings of the sweep or of the cluster that replace those in the file.

        Raises:
            ConfigError: the folder is not the folder of a sweep, or its file cannot be used.
        """
        path = folder / FILE
        if not path.exists():
            raise ConfigError(f"{folder} is not a sweep's folder: it has no {FILE}")
        tables = read_tables(path)
        try:
            table = dict(tables["sweep"])
            recipe = str(table.pop("recipe"))
            of_sweep, of_cluster, of_run = _split_settings(recipe, overrides)
            if of_run:
                raise ConfigError(
                    f"{', '.join(of_run)} cannot be changed: the trials of {folder.name} are decided. "
                    "Start a new sweep for other ones"
                )
            fields = _fields(recipe)
            return cls(
                recipe,
                SweepConfig.checked(**{**table, **of_sweep}),
                ClusterConfig.checked(**{**tables["cluster"], **of_cluster}),
                tables["train"],
                {name: _varied(fields[name], values) for name, values in tables["vary"].items()},
                [{name: item(v, fields[name]) for name, v in trial.items()} for trial in tables["trials"]],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not what nbgpu writes: {error!r}") from None


def _split_settings(recipe: str, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Divide settings into those of the sweep, of the cluster and of the training; a ConfigError names
    unknown ones."""
    homes = (SweepConfig.model_fields, ClusterConfig.model_fields, _fields(recipe))
    return divide(settings, homes, f"a sweep over {recipe}")


def plan(recipe: str, settings: Mapping[str, Any]) -> SweepPlan:
    """Plan a sweep.

    Args:
        recipe: the recipe to train.
        settings: fields of SweepConfig, ClusterConfig and the recipe's settings. A list has the values to
            try, and so has a text such as '1e-5..1e-2:log' for a number; any other value is the same for all
            trials. `preset` names a preset, whose values replace the defaults of the recipe's settings.

    Raises:
        ConfigError: a setting is not valid; the message has all known problems. Trials are not checked yet.
    """
    of_sweep, of_cluster, of_run = _split_settings(recipe, with_preset(recipe, settings))
    config = SweepConfig.checked(**of_sweep)
    cluster = _cluster(of_cluster)
    fields = _fields(recipe)
    shared: dict[str, Any] = {}
    varied: dict[str, Sequence[Any] | Range] = {}
    problems: list[str] = []
    for name, given in of_run.items():
        try:
            values = _varied(fields[name], given)
        except ConfigError as error:
            problems.append(f"{name} = {given!r}: {error}")
            continue
        if isinstance(values, Range) or isinstance(given, list):
            varied[name] = values
        else:
            shared[name] = values[0]
    problems += _problems(config, cluster, shared, varied)
    if problems:
        raise ConfigError("\n".join(problems))
    trials = _drawn(config, varied) if config.random else _grid(varied)
    return SweepPlan(recipe, config, cluster, shared, varied, trials)


def _cluster(given: Mapping[str, Any]) -> ClusterConfig:
    """Return the checked settings of the trials' clusters, by default with one rank, or one on each host.

    Raises:
        ConfigError: a setting is not valid, or does not go with a sweep.
    """
    name = given.get("launcher", default_of(ClusterConfig, "launcher"))
    # An unknown name is refused below, together with the other settings.
    launcher = LAUNCHERS.get(name, LauncherSettings)
    if launcher.IS_STARTED_BY_HAND:
        raise ConfigError(
            f"launcher={name!r} does not go with a sweep: each trial has a cluster of its own, for which hosts would have "
            "to dial in again. Take launcher='ssh' or 'slurm'"
        )
    if given.get("save_before_time_limit"):
        raise ConfigError("save_before_time_limit does not go with a sweep: its trials keep no variables")
    if given.get("at_least") is not None:
        raise ConfigError(
            "at_least does not go with a sweep: each trial has as many ranks as `ranks` says, which is 1 where it is "
            "left out. Give ranks, with gpus='none' for CPU ranks"
        )
    return ClusterConfig.checked(**{"ranks" if launcher.IS_LOCAL else "gpus_per_node": 1, **given})


def checked(
    plan: SweepPlan,
    ranks: Sequence[Sequence[Device]],
    check: Callable[[TrainConfig], object] = lambda _: None,
) -> SweepPlan:
    """Check the settings of every trial, and return the plan with complete settings.

    Args:
        plan: a plan from the function `plan`.
        ranks: for each cluster that a trial may get, the devices of its ranks.
        check: called with the settings of each trial; raises ConfigError if they are not valid.

    Raises:
        ConfigError: some trials cannot run; the message has the reason for each.
    """
    trials_by_problem: dict[str, list[int]] = {}
    for number in range(len(plan.trials)):
        for line in _trial_problems(plan, number, ranks, check):
            trials_by_problem.setdefault(line, []).append(number)
    if trials_by_problem:
        num_bad = len(set(itertools.chain(*trials_by_problem.values())))
        lines = [_refusal(plan, line, numbers) for line, numbers in trials_by_problem.items()]
        raise ConfigError(
            f"{num_bad} of {len(plan.trials)} trials cannot run, and none was started:\n" + "\n".join(lines)
        )
    configs = [plan.settings(number).model_dump() for number in range(len(plan.trials))]
    present_defaults = [defaults_beside(settings_of(plan.recipe), config) for config in configs]
    # A varied setting may decide the default of another one, in which trials then differ as well.
    differing = [
        name
        for name in configs[0]
        if name not in (*plan.varied, *plan.shared, "recipe")
        and any(config[name] != configs[0][name] for config in configs)
    ]
    trials = [{name: config[name] for name in (*plan.varied, *differing)} for config in configs]
    shared = {n: v for n, v in configs[0].items() if n not in (*plan.varied, *differing, "recipe")}
    for name in shared:
        # A setting that has no effect in some trials has its default there. The shared value is that of a
        # trial in which it has another one.
        for config, defaults in zip(configs, present_defaults, strict=True):
            if config[name] != defaults[name]:
                shared[name] = config[name]
                break
    return replace(plan, shared=shared, trials=trials)


def create_folder(plan: SweepPlan) -> Path:
    """Make the folder of a new sweep, with access for the user only, and write sweep.toml into it."""
    first = plan.settings(0)
    folder = new_folder(first.runs_dir, f"sweep-{first.folder_title}")
    folder.mkdir(parents=True, mode=0o700)
    plan.write(folder)
    return folder


def from_text(text: str) -> str | list[str]:
    """Split the text of a flag at its commas; without commas, return it as one value or a range."""
    parts = [part.strip() for part in text.split(",")]
    return parts if len(parts) > 1 else text.strip()


def label(values: Mapping[str, Any]) -> str:
    """Return settings as text, such as 'lr=0.001, seed=0'."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _fields(recipe: str) -> Mapping[str, FieldInfo]:
    return settings_of(recipe).model_fields


def _problems(
    config: SweepConfig, cluster: ClusterConfig, shared: Mapping[str, Any], varied: Varied
) -> Iterator[str]:
    """Yield the problems of the sweep as a whole, before its trials are made."""
    for name in varied.keys() & _NOT_SWEPT.keys():
        yield f"{name} cannot be swept: {_NOT_SWEPT[name]}"
    if not varied:
        yield "nothing is varied. Give a field several values: lr=[1e-4, 1e-3], on the command line --lr 1e-4,1e-3"
    if cluster.keep:
        yield "keep does not go with a sweep: it ends with its process, and goes on with --resume FOLDER"
    if not shared.get("telemetry", True) or "telemetry" in varied:
        yield "telemetry=False records nothing by which trials could be compared; leave it out"
    has_no_validation = str(shared.get("val_every", "")) == "0" and not shared.get("val_every_epochs")
    if config.sort_by.startswith("val_") and has_no_validation:
        yield f"sort_by={config.sort_by!r} comes from validation, and val_every=0 makes none. Take sort_by='loss'"
    for name, values in varied.items():
        if isinstance(values, Range):
            if not config.random:
                yield f"{name}={values} is a range, to draw from: give random=N, or a list of values for the grid"
        elif not values:
            yield f"{name}=[] has no value"
        elif len(set(map(repr, values))) < len(values):
            yield f"{name}={list(values)} has a value twice"
    grid_size = _grid_size(varied)
    if not config.random and grid_size > MAX_TRIALS:
        yield f"the grid has {grid_size} trials, at most {MAX_TRIALS} go. Give fewer values, or random=N"
    if not any(isinstance(v, Range) for v in varied.values()) and config.random > grid_size > 0:
        yield f"random={config.random} is more than the {grid_size} combinations that there are. Leave it out for all"


def _grid(varied: Varied) -> list[dict[str, Any]]:
    """Return every combination of the values, in which the field that was given last changes fastest."""
    return [_combination(varied, number) for number in range(_grid_size(varied))]


def _grid_size(varied: Varied) -> int:
    """Return the number of combinations of the values of all fields without a range."""
    return math.prod(len(values) for values in varied.values() if not isinstance(values, Range))


def _combination(varied: Varied, number: int) -> dict[str, Any]:
    """Return the combination of the values that has this number in the grid."""
    combination: dict[str, Any] = dict.fromkeys(varied)
    for name, values in reversed(list(varied.items())):
        assert not isinstance(values, Range), "a grid has lists only"
        number, index = divmod(number, len(values))
        combination[name] = values[index]
    return combination


def _drawn(config: SweepConfig, varied: Varied) -> list[dict[str, Any]]:
    """Draw combinations at random, no two alike."""
    source = random.Random(config.random_seed)
    if not any(isinstance(values, Range) for values in varied.values()):
        # Numbers of combinations are drawn, because the whole grid may not fit into memory.
        numbers = source.sample(range(_grid_size(varied)), config.random)
        return [_combination(varied, number) for number in numbers]
    trials: dict[str, dict[str, Any]] = {}
    for _ in range(_MAX_DRAWS_PER_TRIAL * config.random):
        drawn = {
            name: values.draw(source) if isinstance(values, Range) else source.choice(values)
            for name, values in varied.items()
        }
        trials.setdefault(repr(drawn), drawn)
        if len(trials) == config.random:
            return list(trials.values())
    raise ConfigError(
        f"random={config.random}: only {len(trials)} different combinations came up. Give a smaller number"
    )


def _varied(info: FieldInfo, given: Any) -> Sequence[Any] | Range:
    """Return the values to try for a field: the items of a list, the range in a text, or one value.

    Raises:
        ConfigError: a range is not valid.
    """
    if isinstance(given, list):
        return [item(value, info) for value in given]
    if isinstance(given, str) and (number := _number_type(info)) and (match := _RANGE.fullmatch(given)):
        bounds = Range(float(match[1]), float(match[2]), match[3] is not None, number is int)
        if not bounds.low < bounds.high:
            raise ConfigError("the first end of a range must be below the second")
        if bounds.log and bounds.low <= 0:
            raise ConfigError("a range with :log must begin above 0")
        if bounds.whole and not (bounds.low.is_integer() and bounds.high.is_integer()):
            raise ConfigError("the ends of this range must be whole numbers")
        return bounds
    return [item(given, info)]


def item(value: Any, info: FieldInfo) -> Any:
    """Parse the value of a field if it is text, from the command line or from sweep.toml: as None, as a tuple
    of its words, or as the text itself, which pydantic parses later."""
    if not isinstance(value, str):
        return value
    types = _types(info)
    if value == "none" and type(None) in types:
        return None
    items = value.split()
    # One word of a field int | tuple is the int; of a field that is always a tuple, a tuple of one.
    is_single_value = len(items) == 1 and not types <= {tuple, type(None)}
    return tuple(items) if tuple in types and not is_single_value else value


def _as_toml(value: Any) -> Any:
    """Convert a value to a form that TOML can hold; `item` converts it back."""
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _types(info: FieldInfo) -> set[Any]:
    """Return the types that a field may have, without their type arguments."""
    annotation = info.annotation
    if get_origin(annotation) in (Literal, tuple):
        return {get_origin(annotation)}
    return {get_origin(part) or part for part in (get_args(annotation) or (annotation,))}


def _number_type(info: FieldInfo) -> type | None:
    return next((kind for kind in (int, float) if kind in _types(info)), None)


def _trial_problems(
    plan: SweepPlan,
    number: int,
    ranks: Iterable[Sequence[Device]],
    check: Callable[[TrainConfig], object],
) -> list[str]:
    """Return the reasons why one trial cannot run, each once; empty if it can."""
    try:
        config = plan.settings(number)
        requirements.require_extras(config)
        for devices in ranks:
            adapt_to_devices(config, devices)
        check(config)
    except ConfigError as error:
        return list(dict.fromkeys(str(error).splitlines()))
    return []


def _refusal(plan: SweepPlan, reason: str, refused: Sequence[int]) -> str:
    """Return a line that says which trials cannot run, and why. If only these trials share some settings, the
    line names those settings, and else every trial.

    Args:
        plan: the sweep.
        reason: why the trials cannot run.
        refused: the numbers of the trials, ascending.
    """
    if len(refused) == len(plan.trials):
        return f"all trials: {reason}"
    first = plan.trials[refused[0]]
    differing = [name for name in first if any(trial[name] != first[name] for trial in plan.trials)]
    shared = {n: first[n] for n in differing if all(plan.trials[i][n] == first[n] for i in refused)}
    with_shared = [i for i, trial in enumerate(plan.trials) if all(trial[n] == v for n, v in shared.items())]
    if shared and with_shared == list(refused):
        count = f" ({len(refused)} trials)" if len(refused) > 1 else ""
        return f"{label(shared)}{count}: {reason}"
    return f"{'; '.join(label(plan.trials[i]) for i in refused)}: {reason}"
