"""The fields of one recipe's settings in the control panel, with the changes of the person and the problems
of values that are not valid."""

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

_ASSIGNMENT = re.compile(r"\b([a-z][a-z0-9_]*)\s*=")
"""A setting's name in a message, such as 'cache_rate=1' or 'data = ...'."""


class SettingsForm:
    """The fields of a recipe's settings.

    A field that the person has not changed shows its default. A default may depend on the preset, on the
    settings that the person has changed, on the devices, and on the run to resume.

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
        self._device_defaults: dict[str, Any] = {}
        """Defaults that the panel derives from the devices; a call of `train` does not have them."""
        self._run_settings: dict[str, Any] = {}
        """The settings of the run to resume that differ from the defaults."""
        self._resume_choice: tuple[Any, ...] = ()
        """The texts of `resume` and `run_name`, and the defaults, for which `_run_settings` was read."""
        self._touched: dict[str, None] = {}
        """The settings that the person has changed, in the order of the changes; the value may be the default
        again."""
        # This raises the ConfigError of a preset or a recipe's file before any widget is made.
        train_config(recipe, **self._base)
        self.fields = {name: Field(self.model, name) for _, name, _ in control_fields(self.model)}
        self._on_change = on_change
        self._on_draft = on_draft
        self._refused: dict[str, tuple[str, str]] = {}
        """By name: the text that a run has refused, and the reason."""
        self._is_program_writing = False
        """Whether the program writes into the fields, so that a changed value is not the person's change."""
        self.general_problems: list[str] = []
        """Lines about values that are not valid and belong to no field."""
        self.show_defaults()
        for name, field in self.fields.items():
            field.observe(partial(self._on_value, name), "value")
            field.observe(self._on_draft_typed, "draft")
            field.on_reset(partial(self.reset, name))

    @property
    def _base(self) -> dict[str, Any]:
        """The settings that every run of this form is given, before those that the person has changed."""
        return {**({"preset": self.preset} if self.preset else {}), **self._defaults}

    @property
    def _defaults(self) -> dict[str, Any]:
        """The values that replace defaults: those for the devices, and those of the run to resume."""
        excluded = {rival for name in self._touched for rival in self._rivals(name)}
        of_run = {name: value for name, value in self._run_settings.items() if name not in excluded}
        return {**self._device_defaults, **of_run}

    def _settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every setting of a run with the given values; all others have their defaults."""
        return settings_beside(self.recipe, {**self._base, **given})

    @property
    def fixed(self) -> list[str]:
        """The settings that must be those of the run to resume."""
        return marked(self.model, "shapes_the_model") if self._run_settings else []

    def _read_run_to_resume(self) -> None:
        """Read the settings of the run to resume, if there is one; they replace the defaults."""
        name, resumed = (
            self.fields[field].value if field in self._touched else "" for field in ("run_name", "resume")
        )
        choice = (resumed, name, tuple(self._device_defaults))
        # The files of a run are read once for each choice, and not at every change of another field.
        if choice == self._resume_choice:
            return
        self._resume_choice, self._run_settings = choice, {}
        note, warns = "", False
        try:
            runs_dir = str(default_of(self.model, "runs_dir"))
            folder = resume.run_to_resume(resumed, runs_dir, self.recipe_of_runs, name) if resumed else None
            if folder is not None:
                self._run_settings = self.beyond_defaults(runs.read_settings(folder)[1])
                note = f"the settings are those of {folder.name}"
        except NbgpuError as error:
            note, warns = str(error), True
        field = self.fields["resume"]
        field.note, field.warns = note, warns
        # A setting that shapes the model has to be that of the run.
        for name in self.fixed:
            self._touched.pop(name, None)

    def beyond_defaults(self, run: TrainConfig) -> dict[str, Any]:
        """Return the settings of a run that differ from this form's defaults, without `resume`.

        Raises:
            ConfigError: the run is of another recipe.
        """
        if run.recipe != self.recipe_of_runs:
            raise ConfigError(f"a run of {run.recipe!r} cannot be resumed with {self.recipe!r}")
        run = run.counting(resume="")
        beyond, values = run.beyond_defaults, run.model_dump()
        present = self._settings(beyond)
        return {n: v for n, v in values.items() if n != "resume" and (n in beyond or v != present[n])}

    def adapt_defaults(self, has_gpus: bool) -> None:
        """Make amp="auto" the default where the ranks have GPUs, unless the preset or the recipe itself
        decides."""
        of_preset = presets.read(self.recipe, self.preset).values if self.preset else {}
        takes_auto = "amp" in self.fields and "amp" not in of_preset and not conditions(self.model, "amp")
        defaults = {"amp": "auto"} if has_gpus and takes_auto else {}
        if defaults != self._device_defaults:
            self._device_defaults = defaults
            self.show_defaults()

    @property
    def changed(self) -> list[str]:
        """The settings that differ from their defaults."""
        return [name for name, field in self.fields.items() if field.changed]

    def _on_value(self, name: str, _: Any) -> None:
        """Record a setting as the newest change of the person, and show the defaults that depend on it. A
        setting that cannot be given together with this one gets its default back."""
        with self._lock:
            if not self._is_program_writing:
                for other in (*self._rivals(name), name):
                    self._touched.pop(other, None)
                self._touched[name] = None
                self.show_defaults()
                self._on_change(name)

    @contextmanager
    def _program_writes(self) -> Iterator[None]:
        """Values that are written in the block do not count as changed by the person."""
        self._is_program_writing = True
        try:
            yield
        finally:
            self._is_program_writing = False

    def _on_draft_typed(self, _: Any) -> None:
        with self._lock:
            if not self._is_program_writing:
                self._on_draft()

    # ---- values ----

    def read(self) -> tuple[dict[str, Any], dict[str, str]]:
        """(the values of the valid fields, the problems of the others), each by name."""
        return read(self.fields)

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the person has changed, together with those that replace defaults."""
        touched = {name: value for name, value in values.items() if name in self._touched}
        return {**self._defaults, **touched}

    def config(self, values: Mapping[str, Any]) -> TrainConfig:
        """The settings of a run with these values.

        Raises:
            ConfigError: they do not go together.
        """
        return train_config(self.recipe, **{**self._base, **self.given(values)})

    def show_defaults(self) -> None:
        """Show the present default in each field that the person has not changed, and mark the fields that
        the person has changed. Changed settings may decide about the defaults of others."""
        self._read_run_to_resume()
        touched = {name: self.fields[name] for name in self._touched}
        values, _ = read(touched, lambda field: field.parsed(field.value))
        present = self._settings(values)
        of_run = {*self.fixed, *(self._run_settings.keys() & self._defaults.keys())}
        origins = self._origins(present, values) | dict.fromkeys(of_run, "from the run")
        # While the first field of a pair has a value, the second has no effect; else the first has none.
        idle = {first if present[first] is None else second for first, second in self._pairs}
        with self._program_writes():
            for name, field in self.fields.items():
                if name in self._touched:
                    field.standard = as_text(self._settings(_without(values, name))[name])
                    field.changed = field.value != field.standard
                    field.origin = ""
                else:
                    field.show(present[name])
                    field.standard, field.changed = field.value, False
                    field.origin = origins.get(name, "")
                field.idle = name in idle

    def _origins(self, present: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
        """For each setting whose default differs because of a change, a text that names the changed field.

        Args:
            present: the value of every setting.
            values: the values that the person has changed.
        """
        usual = self._settings({})
        moved = [name for name in self.fields if name not in values and present[name] != usual[name]]
        origins: dict[str, str] = {}
        for changed in values if moved else ():
            # A change is the origin if the default would be another one without it.
            without = self._settings(_without(values, changed))
            label = f"from {self.fields[changed].label}"
            origins |= {name: label for name in moved if without[name] != present[name]}
        return origins

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        """Pairs of fields: a value of the first takes the place of the second (`REPLACES` of the settings'
        classes)."""
        pairs = [pair for base in self.model.__mro__ for pair in vars(base).get("REPLACES", {}).items()]
        return [pair for pair in pairs if set(pair) <= self.fields.keys()]

    def _rivals(self, name: str) -> list[str]:
        """The fields that cannot be given together with a field, because one takes the place of the other."""
        return [other for pair in self._pairs if name in pair for other in pair if other != name]

    def set_values(self, values: Mapping[str, Any]) -> None:
        """Set these values as if the person had typed them; those without a field are left out."""
        self._set_texts({name: as_text(value) for name, value in values.items() if name in self.fields})

    def _set_texts(self, texts: Mapping[str, str]) -> None:
        with self._program_writes():
            for name, text in texts.items():
                self.fields[name].value = text
                self._touched[name] = None
        self.show_defaults()

    # ---- actions on the whole form ----

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

    def copy_changes(self, earlier: SettingsForm) -> None:
        """Copy the values that the person has changed in the form of another recipe, if this recipe has the
        setting and accepts the value."""
        texts = {name: earlier.fields[name].value for name in earlier._touched if name in self.fields}
        self._set_texts({name: text for name, text in texts.items() if self._accepts(name, text, earlier)})

    def _accepts(self, name: str, text: str, earlier: SettingsForm) -> bool:
        """Whether this recipe accepts a text that was typed for the setting of another recipe."""
        try:
            self.fields[name].parsed(text)
        except ConfigError:
            return False
        # Files may be for both, while a word such as 'phantoms' is one recipe's name of data without files.
        ours, theirs = self.model.WITHOUT_FILES, earlier.model.WITHOUT_FILES
        return name != "data" or text.strip() in ours or text.strip() not in theirs

    def close(self) -> None:
        """Remove the fields from the page."""
        for field in self.fields.values():
            field.close()

    # ---- problems ----

    def mark_refused(self, name: str, reason: str) -> None:
        """Show beside a field the reason why a run did not accept its value."""
        field = self.fields[name]
        self._refused[name] = field.value, reason
        field.problem = reason

    def validate(self, devices: Sequence[Device]) -> TrainConfig | None:
        """Check what is typed so far, and show each problem beside its field.

        Returns:
            The settings of a run on these devices; None where a value is not valid.
        """
        drafts, problems = read_drafts(self.fields)
        # A text that is still being typed counts as given, too.
        unfinished = [name for name, field in self.fields.items() if field.draft != field.value]
        config: TrainConfig | None = None
        self.general_problems = []
        try:
            given = {n: value for n, value in drafts.items() if n in unfinished or n in self._touched}
            config = adapt_to_devices(train_config(self.recipe, **{**self._base, **given}), devices)
        except ConfigError as error:
            newest_first = [*unfinished, *reversed(self._touched)]
            for line in str(error).splitlines():
                named = [name for name in _ASSIGNMENT.findall(line) if name in self.fields]
                # The line stands beside one field: of those that it names, the one that was typed last.
                if beside := [name for name in newest_first if name in named] or named:
                    problems.setdefault(beside[0], line)
                else:
                    self.general_problems.append(line)
        # A text that a run has refused stays marked until it changes.
        for name, (text, reason) in self._refused.items():
            if self.fields[name].draft == text:
                problems.setdefault(name, reason)
        for name, field in self.fields.items():
            field.problem = problems.get(name, "")
        return None if problems else config


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in values.items() if other != name}


def read(
    fields: Mapping[str, Field], value_of: Callable[[Field], Any] = Field.read
) -> tuple[dict[str, Any], dict[str, str]]:
    """(the values of the valid fields, the problems of the others), each by name. Without `value_of` the page
    shows the problems beside the fields as well."""
    values, problems = {}, {}
    for name, field in fields.items():
        try:
            values[name] = value_of(field)
        except ConfigError as error:
            problems[name] = str(error)
    return values, problems


def read_drafts(fields: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the values of the valid fields, the problems of the others), each by name, of what is typed so far.
    The page shows none of the problems."""
    return read(fields, lambda field: field.parsed(field.draft))
