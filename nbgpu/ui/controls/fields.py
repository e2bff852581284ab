"""The fields of the control panel: a control for each setting, with a message beside it if the typed value is
not valid.

All values are text in the page, just as it was typed, and the settings' own checks parse it. The number boxes
of ipywidgets silently change values that are out of bounds and drop characters that do not belong to a
number; its text boxes show the meaning of a setting neither to the mouse nor to a screen reader.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

import anywidget
import traitlets
from pydantic import BaseModel

from nbgpu.config.conditions import meaning
from nbgpu.config.settings import as_text, bounds, from_text, types_of
from nbgpu.errors import ConfigError
from nbgpu.package import STATIC

EMPTY = "left out"


class Field(anywidget.AnyWidget):
    """One setting in the control panel.

    Args:
        model: the model of the settings.
        name: the name of the setting in the model.
    """

    _esm = STATIC / "field.js"
    _css = STATIC / "field.css"
    kind = traitlets.Enum(["text", "choice", "switch"]).tag(sync=True)
    """The kind of control: a text box, a list of choices, or a check box."""
    label = traitlets.Unicode().tag(sync=True)
    """The setting's name as the page shows it."""
    value = traitlets.Unicode().tag(sync=True)
    """The value of the field as text; 'True' or 'False' for a switch."""
    choices = traitlets.List(traitlets.Unicode()).tag(sync=True)
    meaning = traitlets.Unicode().tag(sync=True)
    """The meaning of the setting, with its bounds."""
    problem = traitlets.Unicode().tag(sync=True)
    """The reason why the value is not valid; empty where it is valid."""
    disabled = traitlets.Bool(False).tag(sync=True)
    empty = traitlets.Unicode().tag(sync=True)
    """The placeholder for an empty text."""

    def __init__(self, model: type[BaseModel], name: str) -> None:
        self._model = model
        self._name = name
        field = model.model_fields[name]
        allowed = bounds(field)
        types = types_of(field)
        choices = _choices(types)
        super().__init__(
            kind="switch" if types == (bool,) else "choice" if choices else "text",
            label=name.replace("_", " "),
            value=as_text(field.default),
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
            value = from_text(self._model, self._name, self.value)
        except ConfigError as error:
            self.problem = str(error)
            raise
        self.problem = ""
        return value

    def show(self, value: Any) -> None:
        """Put a value into the field."""
        self.value = as_text(value)

    def focus(self) -> None:
        """Move the page's keyboard to the field."""
        self.send({"type": "focus"})


def _choices(types: tuple[Any, ...]) -> list[str]:
    """The values of a field that takes only a few, as text; empty where it takes any others."""
    if not all(kind in (bool, NoneType) or get_origin(kind) is Literal for kind in types):
        return []
    choices = [""] if NoneType in types else []
    for kind in types:
        if kind is not NoneType:
            choices += map(as_text, (True, False) if kind is bool else get_args(kind))
    return choices
