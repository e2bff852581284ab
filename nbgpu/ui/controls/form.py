"""The fields of one recipe's settings: which settings the person has changed, and which values are not
valid."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from nbgpu.config import TrainConfig, presets, settings_beside, settings_of, train_config
from nbgpu.config.conditions import conditions, default_of
from nbgpu.config.settings import as_text, control_fields, marked
from nbgpu.errors import ConfigError, NbgpuError
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.records import Device
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder import resume
from nbgpu.ui.controls.fields import Field

_NAMED = re.compile(r"\b([a-z][a-z0-9_]*)\s*=")
"""A setting in a message: 'cache_rate=1', 'data = ...'."""


class SettingsForm:
    """The fields of a recipe's settings.

    Args:
        recipe: the workload.
        preset: the name of values to begin with, in place of the defaults; '' for none.
        lock: guards the panel, because messages from the page come on other threads while a cell is running.
        on_change: called with a setting's name when the person has changed or reset it.
        on_draft: called while the person types.

    Raises:
        ConfigError: there is no such recipe or preset, or the values in the recipe's file are not valid.
    """

    def __init__(
        self,
        recipe: str,
        preset: str,
        lock: threading.RLock,
        on_change: Callable[[str], None],
        on_draft: Callable[[], None],
    ) -> None:
        """Make a field for each setting that has a control, and show the defaults in them."""
        self._lock = lock
        self.recipe = recipe
        self.preset = preset
        self.model = settings_of(recipe)
        self.recipe_of_runs = str(default_of(self.model, "recipe"))
        """The recipe as its runs name it: one in a file by its whole path."""
        self._own_defaults: dict[str, Any] = {}
        """The panel's own defaults, in place of those that a call has."""
        self._of_run: dict[str, Any] = {}
        """The settings of the run to resume, where they are not the defaults."""
        self._followed: tuple[Any, ...] = ()
        """The texts of `resume` and `run_name`, and the panel's own defaults, for which `_of_run` was
        read."""
        self._touched: dict[str, None] = {}
        """The settings that the person has changed, the last one last. The others have their defaults beside
        these."""
        # This raises the ConfigError of a preset or a recipe's file before any widget is made.
        train_config(recipe, **self._beside)
        self.fields = {name: Field(self.model, name) for _, name, _ in control_fields(self.model)}
        self._on_change = on_change
        self._on_draft = on_draft
        self._refused: dict[str, tuple[str, str]] = {}
        """By name: the text that a run has refused, and the reason."""
        self._showing = False
        """Whether values are being shown that nobody has typed."""
        self.unplaced: list[str] = []
        """Lines about values that are not valid and belong to no field."""
        self.show_defaults()
        for name, field in self.fields.items():
            field.observe(partial(self._take, name), "value")
            field.observe(self._take_draft, "draft")
            field.on_reset(partial(self.reset, name))

    @property
    def _beside(self) -> dict[str, Any]:
        return {**({"preset": self.preset} if self.preset else {}), **self._defaults}

    @property
    def _defaults(self) -> dict[str, Any]:
        """The values that take the place of defaults: the panel's own, and those of the run to resume."""
        replaced = {rival for name in self._touched for rival in self._rivals.get(name, ())}
        of_run = {name: value for name, value in self._of_run.items() if name not in replaced}
        return {**self._own_defaults, **of_run}

    @property
    def fixed(self) -> list[str]:
        """The settings that must be those of the run to resume."""
        return marked(self.model, "shapes_the_model") if self._of_run else []

    def _follow_resume(self) -> None:
        """Let the settings of the run to resume, if there is one, take the place of the defaults."""
        name, resumed = (
            self.fields[field].value if field in self._touched else "" for field in ("run_name", "resume")
        )
        present_choice = (resumed, name, tuple(self._own_defaults))
        # The files of a run are read once for each choice, and not at every change of another field.
        if present_choice == self._followed:
            return
        self._followed, self._of_run = present_choice, {}
        note, warns = "", False
        try:
            runs_dir = str(default_of(self.model, "runs_dir"))
            folder = resume.run_to_resume(resumed, runs_dir, self.recipe_of_runs, name) if resumed else None
            if folder is not None:
                self._of_run = self.beyond_defaults(runs.read_settings(folder)[1])
                note = f"the settings are those of {folder.name}"
        except NbgpuError as error:
            note, warns = str(error), True
        field = self.fields["resume"]
        field.note, field.warns = note, warns
        # A setting that shapes the model has to be that of the run.
        for name in self.fixed:
            self._touched.pop(name, None)

    def beyond_defaults(self, run: TrainConfig) -> dict[str, Any]:
        """The settings of a run that differ from this form's defaults; none of another recipe's run."""
        if run.recipe != self.recipe_of_runs:
            raise ConfigError(f"a run of {run.recipe!r} cannot be resumed with {self.recipe!r}")
        run = run.counting(resume="")
        beyond, values = run.beyond_defaults, run.model_dump()
        present = settings_beside(self.recipe, {**self._beside, **beyond})
        return {n: v for n, v in values.items() if n != "resume" and (n in beyond or v != present[n])}

    def suit(self, has_gpus: bool) -> None:
        """Make amp="auto" the default where the ranks have GPUs, unless the preset or the recipe itself
        decides."""
        of_preset = presets.read(self.recipe, self.preset).values if self.preset else {}
        takes_auto = "amp" in self.fields and "amp" not in of_preset and not conditions(self.model, "amp")
        own_defaults = {"amp": "auto"} if has_gpus and takes_auto else {}
        if own_defaults != self._own_defaults:
            self._own_defaults = own_defaults
            self.show_defaults()

    @property
    def changed(self) -> list[str]:
        """The settings that differ from their defaults."""
        return [name for name, field in self.fields.items() if field.changed]

    def _take(self, name: str, _: Any) -> None:
        """Note that the person has changed a setting, as the newest change, and show the defaults that depend
        on it. A setting that cannot be given together with this one gets its default back."""
        with self._lock:
            if not self._showing:
                for other in self._rivals.get(name, ()):
                    self._touched.pop(other, None)
                self._touched.pop(name, None)
                self._touched[name] = None
                self.show_defaults()
                self._on_change(name)

    @contextmanager
    def _values_of_nobody(self) -> Iterator[None]:
        """Do not count the values that are shown in the block as typed by the person."""
        self._showing = True
        try:
            yield
        finally:
            self._showing = False

    def _take_draft(self, _: Any) -> None:
        with self._lock:
            if not self._showing:
                self._on_draft()

    # ---- values ----

    def read(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(the values of the valid fields, the problems of the others), each by name."""
        return read(self.fields)

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the person has changed, together with the panel's own defaults."""
        touched = {name: value for name, value in values.items() if name in self._touched}
        return {**self._defaults, **touched}

    def config(self, values: Mapping[str, Any]) -> TrainConfig:
        """The settings of a run with these values.

        Raises:
            ConfigError: they do not go together.
        """
        return train_config(self.recipe, **{**self._beside, **self.given(values)})

    def show_defaults(self) -> None:
        """Show in each field that the person has not changed its present default, which the changed settings
        may have moved, and mark the changed fields."""
        self._follow_resume()
        touched = {name: self.fields[name] for name in self._touched}
        values, _ = read(touched, lambda field: field.parsed(field.value))
        present = settings_beside(self.recipe, {**self._beside, **values})
        of_run = {*self.fixed, *(self._of_run.keys() & self._defaults.keys())}
        origins = self._origins(present, values) | dict.fromkeys(of_run, "from the run")
        with self._values_of_nobody():
            for name, field in self.fields.items():
                if name in self._touched:
                    others = {each: value for each, value in values.items() if each != name}
                    field.standard = as_text(settings_beside(self.recipe, {**self._beside, **others})[name])
                    field.changed = field.value != field.standard
                else:
                    field.show(present[name])
                    field.standard, field.changed = field.value, False
                field.origin = "" if name in self._touched else origins.get(name, "")
                # Of a pair, the second field is idle while the first is given, and the first while it is left
                # out.
                field.idle = any(
                    present[other] is not None if name == replaced else present[other] is None
                    for other, replaced in self._pairs
                    if name in (other, replaced)
                )

    def _origins(self, present: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
        """By name of each setting whose default has moved: a text that names the field that has moved it."""
        usual = settings_beside(self.recipe, self._beside)
        moved = [name for name in self.fields if name not in values and present[name] != usual[name]]
        origins: dict[str, str] = {}
        for decisive in values if moved else ():
            others = {name: value for name, value in values.items() if name != decisive}
            # A change is the origin if the default would be another one without it.
            without = settings_beside(self.recipe, {**self._beside, **others})
            origins |= {
                name: f"from {self.fields[decisive].label}"
                for name in moved
                if without[name] != present[name]
            }
        return origins

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        """Pairs of fields: a value of the first takes the place of the second (`REPLACES` of the settings'
        classes)."""
        pairs = [pair for known in self.model.__mro__ for pair in vars(known).get("REPLACES", {}).items()]
        return [pair for pair in pairs if set(pair) <= self.fields.keys()]

    @property
    def _rivals(self) -> dict[str, list[str]]:
        """By field: the fields that cannot be given together with it, because one takes the place of the
        other."""
        rivals: dict[str, list[str]] = {}
        for first, second in self._pairs:
            rivals.setdefault(first, []).append(second)
            rivals.setdefault(second, []).append(first)
        return rivals

    def take(self, values: Mapping[str, Any]) -> None:
        """Take these values as if the person had typed them; those without a field are left out."""
        self._take_texts({name: as_text(value) for name, value in values.items() if name in self.fields})

    def _take_texts(self, texts: Mapping[str, str]) -> None:
        with self._values_of_nobody():
            for name, text in texts.items():
                self.fields[name].value = text
                self._touched[name] = None
        self.show_defaults()

    # ---- what the person does with all of it ----

    def reset(self, name: str) -> None:
        """Give a setting its default again."""
        with self._lock:
            if name in self._touched:
                del self._touched[name]
                self._refused.pop(name, None)
                self.show_defaults()
                self._on_change(name)

    def reset_all(self) -> None:
        """Give every setting its default again."""
        for name in list(self._touched):
            self.reset(name)

    def take_over(self, earlier: SettingsForm) -> None:
        """Take the values that the person has changed in the form of another recipe, if this recipe has the
        setting and accepts the value."""
        texts = {name: earlier.fields[name].value for name in earlier._touched if name in self.fields}
        self._take_texts({name: text for name, text in texts.items() if self._takes(name, text, earlier)})

    def _takes(self, name: str, text: str, earlier: SettingsForm) -> bool:
        """Whether this recipe accepts a text that was typed for the setting of another recipe."""
        try:
            self.fields[name].parsed(text)
        except ConfigError:
            return False
        # Files may be for both, while a word such as 'phantoms' is one recipe's name of data without files.
        ours, theirs = self.model.WITHOUT_FILES, earlier.model.WITHOUT_FILES
        return name != "data" or text.strip() in ours or text.strip() not in theirs

    def close(self) -> None:
        """Take the fields from the page."""
        for field in self.fields.values():
            field.close()

    # ---- what is wrong ----

    def refuse(self, name: str, why: str) -> None:
        """Say at a field why a run did not take its value."""
        field = self.fields[name]
        self._refused[name] = field.value, why
        field.problem = why

    def judge(self, devices: Sequence[Device]) -> TrainConfig | None:
        """Check what is typed so far, and show each problem beside its field.

        Returns:
            The settings of a run on these devices; None where a value is not valid.
        """
        drafts, problems = read_drafts(self.fields)
        # A text that is still being typed counts as given, too.
        typed = [
            name for name, field in self.fields.items() if field.draft != field.value or name in self._touched
        ]
        config: TrainConfig | None = None
        self.unplaced = []
        try:
            given = {name: drafts[name] for name in typed if name in drafts}
            config = adapt_to_devices(train_config(self.recipe, **{**self._beside, **given}), devices)
        except ConfigError as error:
            for line in str(error).splitlines():
                name = self._field_of(line, typed)
                if name is None:
                    self.unplaced.append(line)
                elif name not in problems:
                    problems[name] = line
        # A text that a run has refused stays marked until it changes.
        for name, (text, why) in self._refused.items():
            if self.fields[name].draft == text:
                problems.setdefault(name, why)
        for name, field in self.fields.items():
            field.problem = problems.get(name, "")
        return None if problems else config

    def _field_of(self, line: str, typed: Sequence[str]) -> str | None:
        """Return the field next to which a line of an error is shown: of the settings that the line names,
        one that is being typed, or else the one that was changed last, or else the first. None if it names no
        field.

        Args:
            line: a line of the error.
            typed: the fields whose text is being typed or was changed.
        """
        named = [name for name in _NAMED.findall(line) if name in self.fields]
        unfinished = [name for name in typed if self.fields[name].draft != self.fields[name].value]
        latest = [*unfinished, *reversed(self._touched)]
        return next((name for name in latest if name in named), next(iter(named), None))


def read(
    fields: Mapping[str, Field], value_of: Callable[[Field], Any] = Field.read
) -> tuple[dict[str, Any], dict[str, str]]:
    """(the values of the valid fields, the problems of the others), each by name. Without `value_of` the page
    shows the problems beside the fields as well."""
    values, bad = {}, {}
    for name, field in fields.items():
        try:
            values[name] = value_of(field)
        except ConfigError as error:
            bad[name] = str(error)
    return values, bad


def read_drafts(fields: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the values of the valid fields, the problems of the others), each by name, of what is typed so far.
    The page shows none of the problems."""
    return read(fields, lambda field: field.parsed(field.draft))
