"""The base of all settings: their declaration, checks and descriptions."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from nbgpu.config.conditions import (
    DefaultRules,
    Rules,
    defaults_beside,
    description,
    in_place_of_defaults,
    without_effect,
)
from nbgpu.errors import ConfigError
from nbgpu.text.similar import did_you_mean


def control(group: str, label: str = "", *, unit: str = "") -> Any:
    """Mark a field as shown in the control panel.

    Args:
        group: the heading under which the panel shows it.
        label: the setting in a word or two. Default: the label of the class from which the field is
            inherited, or else the field's name with spaces.
        unit: the unit of a number, such as 'steps'. Default: that of the class from which the field is
            inherited.
    """
    texts = {"label": label, "unit": unit}
    return {"control": group, **{name: text for name, text in texts.items() if text}}


def shape_of_model() -> Any:
    """Mark a field that determines the shapes of the model's weights, so that a checkpoint fits only the same
    value."""
    return {"shapes_the_model": True}


def steered(at: Literal["step", "epoch"]) -> Any:
    """Mark a field that can be changed during a run; the change takes effect at the next step or epoch."""
    return {"steered": at}


def divides_the_data() -> Any:
    """Mark a field that determines which samples are trained on and which are held out."""
    return {"divides_the_data": True}


def several() -> Any:
    """Mark a text field whose flag takes several words, which are joined by commas: `--gpus 0 1` is '0,1'."""
    return {"several": True}


def read_from(*words: str, several: bool = False) -> Any:
    """Mark a text field that names a file or folder to read; with `several`, it may name several, separated
    by commas. The `words`, and '', are values that name no path."""
    return {"read_from": {"words": ["", *words], "several": several}}


def mark_of(field: FieldInfo, mark: str) -> Any:
    """Return the value of a field's mark; None if it has no such mark."""
    extra = field.json_schema_extra
    return extra.get(mark) if isinstance(extra, dict) else None


def paths_to_read(config: BaseModel, name: str) -> list[Path]:
    """Return the files and folders that a setting marked by `read_from` names; an empty list for a setting
    without the mark."""
    mark = mark_of(type(config).model_fields[name], "read_from")
    text = getattr(config, name)
    if mark is None or text in mark["words"]:
        return []
    return [Path(part.strip()).expanduser() for part in (text.split(",") if mark["several"] else [text])]


class Each:
    """The bounds of each number in a field that takes one number or several.

    Written as `size: Annotated[int | tuple[int, ...], Each(ge=8)] = Field(32, ...)`. The attributes have the
    names of pydantic's own bounds, so that `bounds` reads both.
    """

    def __init__(self, **limits: float) -> None:
        assert limits.keys() <= {"ge", "gt", "le", "lt", "multiple_of"}
        self.__dict__.update(limits)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        """Check each number of a value against the bounds."""
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if number is not None and not all(
                _IS_WITHIN[limit](number, bound) for limit, bound in vars(self).items()
            ):
                raise ValueError(f"{number} is out of bounds")
        return value


_IS_WITHIN: dict[str, Callable[[float, float], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "multiple_of": lambda number, factor: number % factor == 0,
}


class Settings(BaseModel):
    """The base of all settings: frozen, without unknown names, and with errors that say what to do."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)

    ONLY_WITH: ClassVar[Rules] = ()
    """The settings that have an effect only for certain values of another setting. A rule stands in the class
    of the setting, or in the recipe to which it applies."""
    DEFAULTS_WITH: ClassVar[DefaultRules] = ()
    """The defaults that settings have for certain values of another setting, instead of the fields'
    defaults."""
    REPLACES: ClassVar[Mapping[str, str]] = {}
    """Maps a setting to the one that it replaces, such as 'epochs' to 'steps': if a person gives `steps`, the
    conditional default of `epochs` is dropped."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill_conditional_defaults(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the defaults that depend on other settings. `model_fields_set` keeps only the names of the
        values that were given."""
        if not isinstance(values, dict):
            return handler(values)
        typed = {name: typed_value(cls, name, value) for name, value in values.items()}
        settings = handler({**in_place_of_defaults(cls, typed), **values})
        settings.model_fields_set.intersection_update(values)
        return settings

    @classmethod
    def checked(cls, /, **values: Any) -> Self:
        """Build the settings, or raise a ConfigError with one line for every bad value."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(explain(cls, error, values)) from None

    @property
    def given(self) -> dict[str, Any]:
        """The values that were given explicitly, also those that equal the default."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        }

    @property
    def beyond_defaults(self) -> dict[str, Any]:
        """The values that differ from their (possibly conditional) defaults. Equal settings can be built from
        them."""
        values = self.model_dump()
        present = defaults_beside(type(self), values)
        return {name: value for name, value in values.items() if value != present[name]}

    def changed(self, **values: Any) -> Self:
        """Return these settings with some values replaced, checked again as a whole."""
        return type(self).checked(**{**self.model_dump(), **values})

    def counting(self, **values: Any) -> Self:
        """Return these settings with some values replaced. Settings that have no effect beside the new values
        get their defaults."""
        merged = {**self.model_dump(), **values}
        # Repeated, because a default may take the effect from further settings.
        while idle := [name for name, _ in without_effect(type(self), merged) if name not in values]:
            present = defaults_beside(type(self), merged)
            merged |= {name: present[name] for name in idle}
        return type(self).checked(**merged)

    def problems(self) -> Iterator[str]:
        """Yield sentences about values that do not go together. Every class yields those about the fields
        that it declares; `_check_together` collects them."""
        return iter(())

    @field_validator("*", mode="before")
    @classmethod
    def _convert_path_refuse_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert a path to text, and refuse True and False as numbers: `lr=True` would be a learning rate
        of 1."""
        declared = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (declared, *get_args(declared)):
            raise ValueError(f"It cannot be {value}")
        return str(value) if isinstance(value, PurePath) else value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Raise a ValueError with a line for each combination of values that is not valid: the `problems` of
        all base classes, and changed settings without effect."""
        classes = [c for c in type(self).__mro__[::-1] if issubclass(c, Settings) and "problems" in vars(c)]
        problems = [problem for cls in classes for problem in cls.problems(self)]
        values = {name: getattr(self, name) for name in type(self).model_fields}
        for name, condition in without_effect(type(self), values):
            deciding = values[condition.name]
            state = "is not given" if deciding in (None, "", ()) else f"is {deciding!r}"
            problems.append(
                f"{name}={values[name]!r} counts only with {condition.words}, and {condition.name} {state}. "
                f"Leave {name} out, or change {condition.name}"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


def together(*checks: Callable[[], Any]) -> list[Any]:
    """Return the results of all checks. If some raise a ConfigError, raise one error with the lines of all of
    them."""
    results, problems = [], []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return results


def bounds(field: FieldInfo) -> str:
    """Return the values that a field takes as text: '1 to 4096', "'off', 'bf16' or 'fp16'", 'above 0, at most
    10'."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if choices:
        names = [repr(c) for c in choices]
        return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    limits = {
        k: getattr(m, k)
        for m in field.metadata
        for k in ("ge", "gt", "le", "lt", "multiple_of")
        if hasattr(m, k)
    }
    parts = []
    if "ge" in limits and "le" in limits:
        parts.append(f"{limits['ge']} to {limits['le']}")
    else:
        names_of = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        parts += [f"{names_of[k]} {limits[k]}" for k in ("ge", "gt", "le", "lt") if k in limits]
    if "multiple_of" in limits:
        parts.append(f"a multiple of {limits['multiple_of']}")
    return ", ".join(parts)


def explain(model: type[BaseModel], error: ValidationError, values: Mapping[str, Any]) -> str:
    """Return the message for a ValidationError of these values: one line for each bad field, with its value,
    its bounds and a remedy."""
    lines = []
    explained: set[str] = set()
    defaults = defaults_beside(model, values)
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        field = model.model_fields.get(name)
        # A field of several types has an error for each of them.
        if field is not None and len({*types_of(field)} - {NoneType}) > 1:
            if name in explained:
                continue
            explained.add(name)
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"{name} is not a setting of {model.__name__}.{did_you_mean(name, model.model_fields)} "
                f"Settings: {', '.join(model.model_fields)}"
            )
        elif field is None:
            lines.append(_reason(problem["msg"]))
        else:
            allowed = bounds(field)
            fix = f"Give a value within: {allowed}" if allowed else _reason(problem["msg"])
            default = f" (default {defaults[name]!r})" if defaults[name] is not None else ", or leave it out"
            lines.append(
                f"{name} = {problem['input']!r} is not valid. {fix}{default}. It is: {description(model, name)}."
            )
    return "\n".join(lines)


def types_of(field: FieldInfo) -> tuple[Any, ...]:
    """Return the types that a field takes, the members of a union: (int, NoneType) for `int | None`."""
    is_union = get_origin(field.annotation) in (Union, UnionType)
    return get_args(field.annotation) if is_union else (field.annotation,)


def as_text(value: Any) -> str:
    """Return a setting's value as a person would type it: '0.004', '24, 24, 16', and an empty text for None
    and ()."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        items = [str(item) for item in value]
        plain = all(item and item == item.strip() and not set(item) & set(",()[]") for item in items)
        return ", ".join(items) if plain else repr(value)
    return str(value)


def from_text(model: type[BaseModel], name: str, text: str) -> Any:
    """Parse a field's value from text that a person has typed. This is the inverse of `as_text`.

    Raises:
        ConfigError: the text is not a value of this type, or the model's own checks of the field refuse it.
            The message repeats the text and gives the bounds.
    """
    field = model.model_fields[name]
    allowed = bounds(field)
    fix = f". Give a value within: {allowed}" if allowed else ""
    if NoneType in types_of(field):
        fix += ", or leave it empty" if allowed else ". Give another one, or leave it empty"
    if text == as_text(field.default):
        value = field.default
    else:
        try:
            value = _parsed(field, text)
        except ValueError as error:
            raise ConfigError(f"{error}{fix}") from None
    try:
        model(**{name: value})
    except ValidationError as error:
        # Rules about several fields are checked elsewhere, with all values; here only this field's errors.
        problems = [problem for problem in error.errors() if problem["loc"][:1] == (name,)]
        if problems:
            reason = _reason(problems[0]["msg"])
            if not text.strip():
                reason = f"a value is missing{fix}"
            elif allowed:
                reason = f"{text.strip()} is not valid{fix}"
            elif text.strip() not in reason:
                reason = f"{text.strip()} is not valid: {reason}"
            raise ConfigError(reason) from None
    return value


def typed_value(model: type[BaseModel], name: str, value: Any) -> Any:
    """Return a value, which may be a path or a text from a command line, with the type of its field. A value
    that cannot be converted is returned unchanged, and the field's own check refuses it."""
    if isinstance(value, PurePath):
        return str(value)
    if not isinstance(value, str) or name not in model.model_fields:
        return value
    try:
        return _parsed(model.model_fields[name], value)
    except ValueError:
        return value


def _parsed(field: FieldInfo, text: str) -> Any:
    """Return the text as a value of the first of the field's types that accepts it; ValueError if none
    does."""
    types = types_of(field)
    if not text.strip() and NoneType in types:
        return None
    if not text.strip() and set(types) <= {int, float, bool}:
        raise ValueError("a value is missing")
    reasons = []
    for kind in types:
        if kind is not NoneType:
            try:
                return _read(kind, text)
            except ValueError as error:
                reasons.append(str(error))
    raise ValueError(reasons[0])


def _read(kind: Any, text: str) -> Any:
    """Parse a text as a value of one type; ValueError with the reason if it is none."""
    if kind is int:
        return _whole_number(text)
    if kind is float:
        return _number(text)
    if kind is bool:
        if text.strip() not in ("True", "False"):
            raise ValueError(f"{text!r} is neither True nor False")
        return text.strip() == "True"
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if str(choice) == text.strip():
                return choice
        raise ValueError(f"{text!r} is none of {', '.join(map(repr, get_args(kind)))}")
    if get_origin(kind) is tuple:
        return _parse_tuple(get_args(kind)[0], text)
    return text


def _whole_number(text: str) -> int:
    """Parse a whole number, also one that is written as '1e3' or '2.0'."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise ValueError(f"{text.strip()!r} is not a whole number")


def _number(text: str) -> float:
    """Parse a number. If the text has a decimal comma, the error names the number with a decimal point."""
    with suppress(ValueError):
        return float(text)
    reason = f"{text.strip()!r} is not a number"
    with_point = text.strip().replace(",", ".")
    if re.fullmatch(r"[-+]?\d*\.\d+(e[-+]?\d+)?", with_point, re.IGNORECASE):
        reason += f" (with a decimal point it would be {with_point})"
    raise ValueError(reason)


def _parse_tuple(kind: Any, text: str) -> tuple[Any, ...]:
    """Parse values of one type that are separated by commas; numbers also by spaces. Values that contain
    commas are written as a Python list."""
    text = text.strip()
    if text.startswith(("(", "[")):
        try:
            items = [as_text(item) for item in ast.literal_eval(text)]
        except (SyntaxError, TypeError, ValueError):
            raise ValueError(f"{text!r} is not a list of values, such as a, b, c") from None
        return tuple(_read(kind, item) for item in items)
    separators = r"[,\s]+" if kind in (int, float) else ","
    return tuple(_read(kind, item.strip()) for item in re.split(separators, text) if item.strip())


def _reason(message: str) -> str:
    """Return the message of a ValueError without pydantic's prefix."""
    return message.removeprefix("Value error, ")


def control_fields(model: type[BaseModel]) -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield (group, name, field) of every field that the control panel shows, in the order of the model."""
    for name, field in model.model_fields.items():
        group = mark_of(field, "control")
        if group is not None and name not in unused(model):
            yield group, name, field


def label_of(model: type[BaseModel], name: str) -> str:
    """Return the label of a setting in the control panel, such as 'Mixed precision' for `amp`."""
    return _control_text(model, name, "label") or name.replace("_", " ").capitalize()


def unit_of(model: type[BaseModel], name: str) -> str:
    """Return the unit of a setting's number, such as 'steps'; empty if it has none."""
    return _control_text(model, name, "unit")


def _control_text(model: type[BaseModel], name: str, kind: Literal["label", "unit"]) -> str:
    """Return the label or unit given to `control(...)` for a field, in the class itself or the nearest base
    class that gives one; empty if none does."""
    for base in model.__mro__:
        field = getattr(base, "model_fields", {}).get(name)
        if field is not None and (text := mark_of(field, kind)):
            return str(text)
    return ""


def unused(model: type[BaseModel]) -> frozenset[str]:
    """Return the fields without meaning in a recipe (`UNUSED` of its settings). They get no flag, no control
    and no row in the docs."""
    return frozenset(getattr(model, "UNUSED", ()))


def marked(model: type[BaseModel], mark: Literal["shapes_the_model", "divides_the_data"]) -> list[str]:
    """Return the names of the fields with a mark. A run that resumes from a checkpoint must have the same
    values of fields that shape the model and, with the same data, of fields that divide the data."""
    return [name for name, field in model.model_fields.items() if mark_of(field, mark)]


def steerable(model: type[BaseModel]) -> dict[str, Literal["step", "epoch"]]:
    """Return the fields that can be changed during a run, each with the unit at whose next beginning a change
    takes effect."""
    units = {name: mark_of(field, "steered") for name, field in model.model_fields.items()}
    return {name: unit for name, unit in units.items() if unit is not None and name not in unused(model)}
