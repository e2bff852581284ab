"""Which samples are trained on, which ones choose the weights, and which ones the result is about.

Early stopping, `restore_best` and the schedule 'plateau' choose the weights by the validation samples, so
that the model does better on them than on new samples. The samples of a test part are used for the result
alone.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from nbgpu.config import TrainConfig
from nbgpu.engine.data.decoding import Item
from nbgpu.errors import DataError
from nbgpu.planning.epochs import DataAmount, held_out

Part = Literal["training", "validation", "test"]

_HELD_OUT: tuple[Part, Part] = ("validation", "test")
_WORDS: Mapping[str, Part] = {
    **dict.fromkeys(("train", "training"), "training"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_NAME_COLUMNS = ("name", "image", "path", "file", "filename", "case", "patient", "subject")
_PART_COLUMNS = ("part", "split", "set", "fold")
_MAX_SHOWN = 20


@dataclass(frozen=True)
class Parts:
    """The samples of a run, each in one part."""

    training: list[Item]
    validation: list[Item]
    test: list[Item]

    @property
    def everything(self) -> list[Item]:
        """Return all samples."""
        return [*self.training, *self.validation, *self.test]

    @property
    def reported(self) -> list[Item]:
        """Return the samples that the result is about: the test part, or if there is none the validation
        part."""
        return self.test or self.validation

    def amount(self, samples_per_volume: int = 1) -> DataAmount:
        """Return the amount of data, where each item of the training part gives `samples_per_volume` samples
        in an epoch. Items that are cut from one volume count as one volume."""
        trained_on = {item["name"] for item in self.training}
        held_out = {item["name"] for item in (*self.validation, *self.test)}
        return DataAmount(len(self.training), samples_per_volume, len(held_out - trained_on))

    def in_words(self, config: TrainConfig) -> str:
        """Return a sentence about the earlier use of the result's samples; empty if they are validation
        samples by which nothing was chosen."""
        if self.test:
            return f" These are the test part: {len(self.test)} samples that took no part in training and chose no weights."
        chosen_by = config.chosen_by_validation
        if not self.validation or not chosen_by:
            return ""
        return (
            f" {' and '.join(chosen_by)} chose these weights by the same samples, so the result on new samples will "
            "probably be worse; test_fraction holds some out for the result."
        )


def named(item: Item) -> Hashable:
    """Return a sample's name: as the group for `split` where no samples belong together."""
    name: Hashable = item["name"]
    return name


def split(items: Sequence[Item], config: TrainConfig, group: Callable[[Item], Hashable] = named) -> Parts:
    """Divide samples into training, validation and test part, the same on every rank and for every `seed`.

    Args:
        items: all samples, in a fixed order.
        config: `val_fraction`, `test_fraction` and `split_seed`, or the file `split`.
        group: samples of one group are in the same part, such as those of one patient.

    Raises:
        DataError: there are too few groups, or the file does not divide these samples; the message has a line
            for each problem.
    """
    groups = list(dict.fromkeys(group(item) for item in items))
    if config.split:
        part_by_group = _as_in_file(Path(config.split).expanduser(), items, group)
    else:
        part_by_group = _at_random(groups, config)
    parts: dict[Part, list[Item]] = {part: [] for part in get_args(Part)}
    for item in items:
        parts[part_by_group[group(item)]].append(item)
    return Parts(**parts)


def _at_random(groups: Sequence[Hashable], config: TrainConfig) -> dict[Hashable, Part]:
    """Return the part of each group: at least one in every part whose share is above 0, if there are enough
    for two parts."""
    fractions = {"validation": config.val_fraction, "test": config.test_fraction}
    wanted = [part for part, fraction in fractions.items() if fraction]
    if config.test_fraction and len(groups) < 1 + len(wanted):
        raise DataError(
            f"data={config.data!r}: {len(groups)} sample(s) that belong together cannot be divided into "
            f"{1 + len(wanted)} parts. Give more, or test_fraction=0"
        )
    part_by_group: dict[Hashable, Part] = dict.fromkeys(groups, "training")
    order = np.random.RandomState(config.split_seed).permutation(len(groups)).tolist()
    for part, number in zip(_HELD_OUT, held_out(len(groups), config), strict=True):
        chosen, order = order[:number], order[number:]
        part_by_group |= dict.fromkeys([groups[index] for index in chosen], part)
    return part_by_group


def _as_in_file(path: Path, items: Sequence[Item], group: Callable[[Item], Hashable]) -> dict[Hashable, Part]:
    """Return the part of each group as a split file says; DataError with a line for each problem of the
    file."""
    listed = _read(path)
    used: set[str] = set()
    part_by_group: dict[Hashable, Part] = {}
    problems = []
    for item in items:
        its_group = group(item)
        names = [name for name in _listed_names(item, its_group) if name in listed]
        used.update(names)
        # The parts that the file gives to this sample, and to earlier samples of its group.
        parts = {listed[name] for name in names}
        if not parts:
            problems.append(f"{item['name']} is in none of its parts")
        elif len(parts | ({part_by_group[its_group]} if its_group in part_by_group else set())) > 1:
            problems.append(f"{item['name']} and what belongs to it ({its_group}) is in two of its parts")
        else:
            (part_by_group[its_group],) = parts
    problems += [f"{name} is not a sample of the data" for name in listed if name not in used]
    if "training" not in part_by_group.values():
        problems.append("nothing is left to train on")
    if problems:
        more = [f"and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        raise DataError("\n".join([f"split={str(path)!r}: {line}" for line in problems[:_MAX_SHOWN]] + more))
    return part_by_group


def _listed_names(item: Item, group: Hashable) -> Iterator[str]:
    """Yield the names under which a file may list a sample: its own, its file's, or its group's."""
    name = str(item["name"])
    file = Path(name).name
    yield from dict.fromkeys((name, file, file.partition(".")[0], str(group)))


def _read(path: Path) -> dict[str, Part]:
    """Return the part of each name in a split file, a CSV or JSON file; DataError if it cannot be read, or
    puts a name into two parts."""
    try:
        if path.suffix.lower() == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            pairs = list(_json_pairs(content, path))
        elif path.suffix.lower() == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as file:
                pairs = list(_csv_pairs(csv.DictReader(file, restval=""), path))
        else:
            raise DataError(f"split={str(path)!r}: give a .csv or a .json file")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise DataError(f"split={str(path)!r}: cannot be read: {error}") from None
    problems = []
    parts_by_name: dict[str, set[Part]] = defaultdict(set)
    for name, word in pairs:
        if part := _WORDS.get(word.lower()):
            parts_by_name[name].add(part)
        else:
            problems.append(f"{name} is in {word!r}, and must be in train, val or test")
    problems += [
        f"{name} is in {' and in '.join(sorted(parts))}"
        for name, parts in parts_by_name.items()
        if len(parts) > 1
    ]
    if problems:
        raise DataError("\n".join(f"split={str(path)!r}: {problem}" for problem in problems))
    return {name: parts.pop() for name, parts in parts_by_name.items()}


def _json_pairs(content: Any, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, part) of a JSON object with a list for each part."""
    if not isinstance(content, dict):
        raise DataError(
            f'split={str(path)!r}: is not an object with a list for each part, such as {{"train": [...], "test": [...]}}'
        )
    for word, names in content.items():
        # Other entries of such files describe the data.
        if word.lower() in _WORDS and isinstance(names, list):
            for name in names:
                yield str(name.get("image", "")) if isinstance(name, dict) else str(name), word


def _csv_pairs(rows: csv.DictReader[str], path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, part) of a CSV file's rows."""
    headings = list(rows.fieldnames or [])
    columns = {heading.strip().lower(): heading for heading in headings}
    name = next((columns[c] for c in _NAME_COLUMNS if c in columns), None)
    part = next((columns[c] for c in _PART_COLUMNS if c in columns), None)
    if name is None or part is None:
        raise DataError(
            f"split={str(path)!r}: needs a column with names ({', '.join(_NAME_COLUMNS)}) and one with parts "
            f"({', '.join(_PART_COLUMNS)}). Its headings are: {', '.join(headings) or '(none)'}"
        )
    for row in rows:
        if row[name].strip():
            yield row[name].strip(), row[part].strip()
