"""The fields of the control panel: a control for each setting, with a message beside it if the typed text is
not valid.

The page holds each value as the text that was typed, which is parsed by the checks of the settings. The
widgets of ipywidgets would not do: its number boxes silently change values that are out of bounds and drop
characters that do not belong to a number, and its text boxes show no description of a setting to the mouse
or to a screen reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import anywidget
import traitlets
from pydantic import BaseModel

from nbgpu.config.conditions import default_of, meaning
from nbgpu.config.settings import as_text, bounds, from_text, label_of, types_of, unit_of
from nbgpu.errors import ConfigError
from nbgpu.package import STATIC

EMPTY = "left out"
_CACHE_SIZE = 8
"""The most texts of a field whose values are cached."""


class Control(anywidget.AnyWidget):
    """A labelled control with a description, and a place for the reason why its value is not valid."""

    _esm = STATIC / "field.js"
    _css = STATIC / "field.css"
    kind = traitlets.Enum(["text", "choice", "switch"]).tag(sync=True)
    """The kind of control: a text box, a list of choices, or a check box."""
    label = traitlets.Unicode().tag(sync=True)
    """The text beside the control."""
    name = traitlets.Unicode().tag(sync=True)
    """The name in code; empty where there is none."""
    unit = traitlets.Unicode().tag(sync=True)
    value = traitlets.Unicode().tag(sync=True)
    """The value as text; 'True' or 'False' for a switch."""
    draft = traitlets.Unicode().tag(sync=True)
    """The text that is typed so far. It becomes the value when the person leaves the field or presses
    Enter."""
    choices = traitlets.List(traitlets.Unicode()).tag(sync=True)
    choice_labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """The texts that the page shows for the choices; empty to show the choices themselves."""
    meaning = traitlets.Unicode().tag(sync=True)
    """What the setting does, with the bounds of its value."""
    standard = traitlets.Unicode().tag(sync=True)
    """The default as text."""
    changed = traitlets.Bool(False).tag(sync=True)
    """Whether the value differs from the default, so that the page marks it and offers to reset it."""
    origin = traitlets.Unicode().tag(sync=True)
    """A text that names the field on which the present default depends; empty for the usual default."""
    idle = traitlets.Bool(False).tag(sync=True)
    """Whether another setting takes the place of this one, until something is typed here."""
    note = traitlets.Unicode().tag(sync=True)
    """A sentence below the control about a consequence of the value."""
    warns = traitlets.Bool(False).tag(sync=True)
    """Whether the note is a warning."""
    problem = traitlets.Unicode().tag(sync=True)
    """The reason why the value is not valid; empty where it is valid."""
    disabled = traitlets.Bool(False).tag(sync=True)
    empty = traitlets.Unicode().tag(sync=True)
    """The placeholder for an empty text."""

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(self._on_message)

    def _on_message(self, _widget: Any, content: Mapping[str, Any], _buffers: Any) -> None:
        """Set the value with which the person has left the field. The page also sends it as the widget's
        state, but that may arrive after the press of a button that needs the value."""
        if content.get("type") == "take":
            self.value = content["value"]

    def show(self, value: Any) -> None:
        """Show a value in the field."""
        with self.hold_sync():
            self.draft = self.value = as_text(value)

    def show_standard(self) -> None:
        """Show the default in the field."""
        self.show(self.standard)

    def focus(self) -> None:
        """Move the page's keyboard to the field."""
        self.send({"type": "focus"})

    def on_reset(self, reset: Callable[[], None]) -> None:
        """Call `reset` when the person asks for the default."""

        def on_message(_widget: Any, content: Mapping[str, Any], _buffers: Any) -> None:
            if content.get("type") == "reset":
                reset()

        self.on_msg(on_message)


class Choice(Control):
    """A list of choices for a value that is no setting, such as the recipe that the panel shows.

    Args:
        label: the text beside the list.
        choices: the text that is shown, by value.
        value: the value that is chosen at first.
    """

    def __init__(self, label: str, choices: Mapping[str, str], value: str) -> None:
        """Make the list with one value chosen."""
        super().__init__(
            kind="choice",
            label=label,
            choices=list(choices),
            choice_labels=list(choices.values()),
            value=value,
            draft=value,
        )

    def offer(self, choices: Mapping[str, str]) -> None:
        """Replace the choices."""
        with self.hold_sync():
            self.choices, self.choice_labels = list(choices), list(choices.values())


class Field(Control):
    """One setting in the control panel.

    Args:
        model: the model of the settings.
        name: the name of the setting in the model.
    """

    def __init__(self, model: type[BaseModel], name: str) -> None:
        """Make the control that fits the setting's type, with the default as its value. A setting that takes
        only some values becomes a list, and a bool becomes a check box."""
        self._model = model
        self._cache: dict[str, Any] = {}
        """By text: its parsed value, or the error of a text that is not valid."""
        field = model.model_fields[name]
        allowed = bounds(field)
        types = types_of(field)
        choices = _choices(types)
        text = as_text(default_of(model, name))
        super().__init__(
            kind="switch" if types == (bool,) else "choice" if choices else "text",
            label=label_of(model, name),
            name=name,
            unit=unit_of(model, name),
            value=text,
            draft=text,
            standard=text,
            choices=choices,
            meaning=f"{meaning(model, name)}{f' ({allowed})' if allowed else ''}",
            empty=EMPTY if NoneType in types or field.default == () else "",
        )

    def read(self) -> Any:
        """Return the setting's value.

        Raises:
            ConfigError: the text is not a value of this setting, or is out of bounds. The page shows that
                beside the field as well, and the text stays.
        """
        try:
            value = self.parsed(self.value)
        except ConfigError as error:
            self.problem = str(error)
            raise
        self.problem = ""
        return value

    def parsed(self, text: str) -> Any:
        """Parse a text as a value of the setting. Unlike `read`, this does not change the message in the
        page.

        Raises:
            ConfigError: the text is not a value of this setting, or is out of bounds.
        """
        # All fields are read after each change of one field, and most texts are the same as before.
        if text not in self._cache:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            try:
                self._cache[text] = from_text(self._model, self.name, text)
            except ConfigError as error:
                self._cache[text] = error
        value = self._cache[text]
        if isinstance(value, ConfigError):
            # This raises a new error: the cached one would collect tracebacks if it were raised repeatedly.
            raise ConfigError(str(value))
        return value

    @traitlets.observe("value")
    def _copy_value_into_draft(self, change: Any) -> None:
        self.draft = change["new"]


def _choices(types: tuple[Any, ...]) -> list[str]:
    """The values of a field, as text, where its types allow only a few; else empty."""
    if not all(kind in (bool, NoneType) or get_origin(kind) is Literal for kind in types):
        return []
    choices = [""] if NoneType in types else []
    for kind in types:
        if kind is not NoneType:
            choices += map(as_text, (True, False) if kind is bool else get_args(kind))
    return choices
