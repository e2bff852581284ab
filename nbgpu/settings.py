"""What all settings have in common: how they are declared, checked and told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from nbgpu.errors import ConfigError


def control(group: str) -> Any:
    """Marks a field as shown in the control panel, under the heading `group`."""
    return {"control": group}


def shape_of_model() -> Any:
    """Marks a field that decides the shapes of the model's weights: a checkpoint fits only the same value."""
    return {"shapes_the_model": True}


def steered(at: Literal["step", "epoch"]) -> Any:
    """Marks a field that can be changed while a run goes on: between two steps, or two passes over the data."""
    return {"steered": at}


class Settings(BaseModel):
    """What all settings share: frozen, no unknown names, and errors that say what to do."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @classmethod
    def checked(cls, /, **values: Any) -> Self:
        """Builds the settings, or raises a ConfigError with one line for every bad value."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(explain(cls, error)) from None

    def changed(self, **values: Any) -> Self:
        """These settings with some values replaced, checked again as a whole."""
        return type(self).checked(**{**self.model_dump(), **values})

    def problems(self) -> Iterator[str]:
        """Values that do not go together, each in words; every class yields those of its own fields."""
        return iter(())

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        classes = [c for c in type(self).__mro__[::-1] if issubclass(c, Settings) and "problems" in vars(c)]
        if problems := [problem for cls in classes for problem in cls.problems(self)]:
            raise ValueError("\n".join(problems))
        return self


def bounds(field: FieldInfo) -> str:
    """What values a field takes, in words: '1 to 4096', "'off', 'bf16' or 'fp16'", 'above 0, at most 10'."""
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
    words = []
    if "ge" in limits and "le" in limits:
        words.append(f"{limits['ge']} to {limits['le']}")
    else:
        names_of = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        words += [f"{names_of[k]} {limits[k]}" for k in ("ge", "gt", "le", "lt") if k in limits]
    if "multiple_of" in limits:
        words.append(f"a multiple of {limits['multiple_of']}")
    return ", ".join(words)


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """A ValidationError in our words: one line for each bad field, with its value, bounds and a way out."""
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        field = model.model_fields.get(name)
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"{name} is not a setting of {model.__name__}. Settings: {', '.join(model.model_fields)}"
            )
        elif field is None:
            lines.append(str(problem["msg"]).removeprefix("Value error, "))
        else:
            allowed = bounds(field)
            fix = (
                f"Give a value within: {allowed}"
                if allowed
                else str(problem["msg"]).removeprefix("Value error, ")
            )
            default = f" (default {field.default!r})" if field.default is not None else ", or leave it out"
            lines.append(
                f"{name} = {problem['input']!r} is not valid. {fix}{default}. It is: {field.description}."
            )
    return "\n".join(lines)


def control_fields(model: type[BaseModel]) -> Iterator[tuple[str, str, FieldInfo]]:
    """(group, name, field) of every field that the control panel shows, in the order of the model."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and "control" in extra and name not in unused(model):
            yield str(extra["control"]), name, field


def unused(model: type[BaseModel]) -> frozenset[str]:
    """The fields that mean nothing in a recipe (`UNUSED` of its settings): no flags, no controls, no rows in the docs."""
    return frozenset(getattr(model, "UNUSED", ()))


def shapes_the_model(model: type[BaseModel]) -> list[str]:
    """The fields that a checkpoint and the run that goes on from it must have in common."""
    return [
        name
        for name, field in model.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and "shapes_the_model" in field.json_schema_extra
    ]


def steerable(model: type[BaseModel]) -> dict[str, Literal["step", "epoch"]]:
    """The fields that can be changed while a run goes on, and where that happens."""
    found: dict[str, Literal["step", "epoch"]] = {}
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and "steered" in extra and name not in unused(model):
            found[name] = "epoch" if extra["steered"] == "epoch" else "step"
    return found


def markdown_table(model: type[BaseModel]) -> str:
    """The docs' table of a model: setting, default, values, meaning."""
    rows = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name in unused(model):
            continue
        values = bounds(field).replace("|", "\\|")
        rows.append(f"| `{name}` | `{field.default!r}` | {values} | {field.description} |")
    return "\n".join(rows)
