"""The fields of the control panel: a control for each setting, with a message beside it if the typed text is
not valid.

All values are text in the page, just as it was typed, and the settings' own checks parse it. The number boxes
of ipywidgets silently change values that are out of bounds and drop characters that do not belong to a
number; its text boxes show the meaning of a setting neither to the mouse nor to a screen reader.
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
_MOST_REMEMBERED = 8
"""The most texts of a field whose values are cached."""


class Control(anywidget.AnyWidget):
    """A labelled control with its help, and a place for the reason why its value is not valid."""

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
    """A text that names the field that has moved the default; empty if the default is the usual one."""
    idle = traitlets.Bool(False).tag(sync=True)
    """Whether another setting decides in place of this one, until something is typed here."""
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
        self.on_msg(self._take)

    def _take(self, _widget: Any, content: Mapping[str, Any], _buffers: Any) -> None:
        """Take the value that the person has left the field with. It comes as a state of the widget too, but
        perhaps later than a press of a button that is to act on it."""
        if content.get("type") == "take":
            self.value = content["value"]

    def show(self, value: Any) -> None:
        """Put a value into the field."""
        with self.hold_sync():
            self.draft = self.value = as_text(value)

    def focus(self) -> None:
        """Move the page's keyboard to the field."""
        self.send({"type": "focus"})

    def on_reset(self, reset: Callable[[], None]) -> None:
        """Call `reset` when the person asks for the default."""

        def hear(_widget: Any, content: Mapping[str, Any], _buffers: Any) -> None:
            if content.get("type") == "reset":
                reset()

        self.on_msg(hear)


class Choice(Control):
    """A list of choices for a value that is no setting, such as which recipe the panel shows.

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
        self._read: dict[str, Any] = {}
        """Cache of parsed texts: the value, or the error of a text that is not valid."""
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
        """Return the setting's value that a text stands for. Unlike `read`, this leaves the message in the
        page as it is.

        Raises:
            ConfigError: the text is not a value of this setting, or is out of bounds.
        """
        # All fields are read whenever something changes, and most of them have not.
        if text not in self._read:
            if len(self._read) >= _MOST_REMEMBERED:
                self._read.clear()
            try:
                self._read[text] = from_text(self._model, self.name, text)
            except ConfigError as error:
                self._read[text] = error
        found = self._read[text]
        if isinstance(found, ConfigError):
            # A new one: an error that is raised again and again would collect tracebacks.
            raise ConfigError(str(found))
        return found

    @traitlets.observe("value")
    def _begin_from_value(self, change: Any) -> None:
        self.draft = change["new"]


def _choices(types: tuple[Any, ...]) -> list[str]:
    """The values of a field that takes only a few, as text; empty where it takes any others."""
    if not all(kind in (bool, NoneType) or get_origin(kind) is Literal for kind in types):
        return []
    choices = [""] if NoneType in types else []
    for kind in types:
        if kind is not NoneType:
            choices += map(as_text, (True, False) if kind is bool else get_args(kind))
    return choices
