"""Checks the results of the functions of a person's own recipe, with messages that name the line."""

from __future__ import annotations

import dis
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbgpu.engine.model import optimizers
from nbgpu.engine.workload.recipe import ParameterGroup
from nbgpu.errors import ConfigError

_WEIGHTS = "weights"
_GROUP_KEYS = ("params", "lr_factor", "weight_decay", "name")
"""The keys that a group of `parameter_groups` may have."""


def dataset(made: Any, function: Callable[..., Any]) -> Dataset[Any]:
    """Return the result of `dataset` or `val_dataset`, checked to have `__len__` and `__getitem__`.

    Raises:
        ConfigError: the result is unusable; the message names the line.
    """
    kind = type(made)
    advice = ""
    if isinstance(made, DataLoader):
        advice = "Give the loader's dataset: nbgpu makes the batches itself, of `batch_size` samples"
    elif isinstance(made, Mapping):
        advice = (
            "Samples are looked up by 0, 1, 2, ...: give a list of samples, or a TensorDataset of the values"
        )
    elif isinstance(made, IterableDataset) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        advice = (
            "It needs __len__ and __getitem__, because all ranks share its samples out by number. list(...) makes such a "
            "dataset of anything that is iterated over"
        )
    if advice:
        raise ConfigError(
            f"{_location(function)}: `{function.__name__}` returned {_described(made)}, and must return a dataset with "
            f"samples by number. {advice}"
        )
    found: Dataset[Any] = made
    return found


def model(made: Any, function: Callable[..., Any]) -> nn.Module:
    """Return the result of `model`, checked to be a module without lazy layers, whose weights have no shape
    yet.

    Raises:
        ConfigError: the result is unusable; the message names the line.
    """
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"{_location(function)}: `model` returned {_described(made)}, and must return an nn.Module"
        )
    for name, layer in made.named_modules():
        if any(isinstance(weight, UninitializedParameter) for weight in layer.parameters(recurse=False)):
            raise ConfigError(
                f"{_location(function)}: the layer {name!r} of the model is a {type(layer).__name__}, whose weights have no shape "
                "until it has seen a sample. Name its sizes, or call the model in `model` with a batch of zeros before you "
                "return it"
            )
    return made


def losses(given: Any, function: Callable[..., Any]) -> dict[str, Tensor]:
    """Return the result of `loss` as scalar tensors by name.

    Raises:
        ConfigError: the result is no usable loss; the message names the line, the result and what is
            expected.
    """
    terms = dict(given) if isinstance(given, Mapping) else {"loss": given}
    refuse = _refusal(
        function,
        "the mean loss of the batch, a real tensor with one number, or a dict with it as 'loss' and others to be "
        "shown; it returned ",
    )
    if "loss" not in terms:
        raise refuse(f"a dict with {', '.join(map(repr, terms)) or 'nothing'} and no 'loss'", "Name it so")
    loss = terms["loss"]
    if loss is None:
        raise refuse("None", "Is a `return` missing?")
    if isinstance(loss, tuple | list):
        raise refuse(_described(loss), "Return a dict: {'loss': ..., 'another': ...}")
    if not isinstance(loss, Tensor):
        raise refuse(
            _described(loss),
            "Only a tensor knows how it was computed: leave out .item(), float(...) and NumPy",
        )
    for name, term in terms.items():
        if isinstance(term, bool | int | float):
            terms[name] = term = torch.tensor(float(term), dtype=torch.float32, device=loss.device)
        if not isinstance(term, Tensor):
            raise refuse(f"{_described(term)} as {name!r}", "Give a tensor with one number, or a float")
        if term.is_complex():
            advice = "Take .abs() or .real of what is complex before the mean"
            raise refuse(f"{_described(term)} as {name!r}", advice)
        if term.numel() != 1:
            advice = "Is .mean() missing, or reduction='mean'?"
            raise refuse(f"{_described(term)} as {name!r}", advice)
        # A mean over one sample may have kept its dimension.
        terms[name] = term.reshape(())
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise refuse(
            f"{_described(loss)} that no weight of the model has a part in",
            "Was it cut off by .detach(), .item(), torch.no_grad() or torch.tensor(...), or does no parameter of the model "
            "require a gradient?",
        )
    return terms


def parameter_groups(given: Any, model: nn.Module, function: Callable[..., Any]) -> list[ParameterGroup]:
    """Return the result of `parameter_groups` as ParameterGroups, with a name for each.

    Raises:
        ConfigError: the result is unusable; the message names the line.
    """
    others = ", ".join(map(repr, _GROUP_KEYS[1:]))
    refuse = _refusal(function, f"a list of dicts with 'params', and any of {others}; ")
    if not isinstance(given, list | tuple):
        raise refuse(f"it returned {_described(given)}", "Is a `return` missing, or a list around the dicts?")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[ParameterGroup] = []
    taken: dict[int, int] = {}
    for number, group in enumerate(given):
        if not isinstance(group, Mapping):
            raise refuse(f"entry {number} is {_described(group)}", "Give {'params': ..., 'lr_factor': ...}")
        if unknown := [name for name in group if name not in _GROUP_KEYS]:
            advice = (
                "For another rate give 'lr_factor', by which `lr` is multiplied: schedule and run.set then act on it"
                if "lr" in unknown
                else "What an optimizer needs besides can be given to it in `optimizer`"
            )
            raise refuse(f"entry {number} has {', '.join(map(repr, unknown))}", advice)
        if "params" not in group:
            raise refuse(f"entry {number} has no 'params'", "Give some of the model's parameters")
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, Tensor) else parameters
        parameters = list(parameters) if isinstance(parameters, Iterable) else [parameters]
        for parameter in parameters:
            if id(parameter) not in names:
                raise refuse(
                    f"'params' of entry {number} has {_described(parameter)} that is not a parameter of the model",
                    "Give parameters of the `model` that it is called with, such as model[0].parameters()",
                )
            if id(parameter) in taken:
                where = f"entries {taken[id(parameter)]} and {number}"
                raise refuse(f"{names[id(parameter)]} is in {where}", "Leave it out of one of them")
            taken[id(parameter)] = number
        for name in ("lr_factor", "weight_decay"):
            if name in group and not _is_nonnegative(group[name]):
                raise refuse(
                    f"{name!r} of entry {number} is {_in_words(group[name])}",
                    "Give a finite number, 0 or above",
                )
        name = group.get("name", f"group{number}")
        if not isinstance(name, str) or not name.isidentifier() or name in [made.name for made in groups]:
            raise refuse(
                f"'name' of entry {number} is {_in_words(name)}",
                "Give letters, digits and _, another for each group",
            )
        decay = group.get("weight_decay")
        factor = float(group.get("lr_factor", 1.0))
        groups.append(ParameterGroup(name, parameters, factor, None if decay is None else float(decay)))
    return groups


def optimizer(given: Any, groups: Sequence[Mapping[str, Any]], function: Callable[..., Any]) -> Optimizer:
    """Return the result of `optimizer`, checked to be an optimizer over exactly these groups, which needs no
    closure and whose state a checkpoint can hold.

    Raises:
        ConfigError: the result is unusable; the message names the line.
    """
    refuse = _refusal(function, "a torch.optim.Optimizer over the groups that it is given; ")
    if not isinstance(given, Optimizer):
        advice = (
            "Is a `return` missing?" if given is None else "Return one, such as torch.optim.RMSprop(groups)"
        )
        raise refuse(f"it returned {_described(given)}", advice)
    kind = type(given).__name__
    given_ids, expected_ids = (
        [[id(parameter) for parameter in group["params"]] for group in param_groups]
        for param_groups in (given.param_groups, groups)
    )
    if given_ids != expected_ids or not all("lr_factor" in group for group in given.param_groups):
        raise refuse(
            f"the groups of its {kind} are others",
            "Give it `groups` as they are: their 'lr' and 'lr_factor' are what schedule and run.set act on",
        )
    closure = inspect.signature(given.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise refuse(
            f"{kind} computes the loss several times in a step",
            "nbgpu computes it once. Take an optimizer whose step() needs no closure",
        )
    if unsaved := optimizers.unsaved_settings(given.param_groups):
        raise refuse(
            f"its groups have {', '.join(map(repr, unsaved))}, which no checkpoint can hold",
            "Give numbers, texts and lists of them",
        )
    return given


def factor(given: Any, step: int, function: Callable[..., Any]) -> float:
    """Return the result of `schedule` for a step, a finite factor of at least 0.

    Raises:
        ConfigError: the result is unusable; the message names the line.
    """
    if _is_nonnegative(given):
        return float(given)
    advice = "Is a `return` missing?" if given is None else "A tensor becomes a number by .item()"
    raise ConfigError(
        f"{_location(function)}: `{function.__name__}` must return the factor on `lr`, a finite number, 0 or above; for "
        f"step {step} it returned {_in_words(given)}."
        + (f" {advice}" if given is None or isinstance(given, Tensor) else "")
    )


def result(given: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """Return what the person's `result` returned as plain values that JSON can hold; tensors and arrays
    become numbers or lists.

    Raises:
        ConfigError: the result is unusable; the message names the line.
    """
    refuse = _refusal(function, "results by name, such as {'accuracy': 0.9}; ")
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise refuse(f"it returned {_described(given)}", "Return {} where there are none")
    if _WEIGHTS in given:
        raise refuse(
            f"one has the name {_WEIGHTS!r}",
            "nbgpu says there which weights the result is of: name it otherwise",
        )
    try:
        plain: dict[str, Any] = json.loads(json.dumps(given, default=_as_plain))
    except (AttributeError, TypeError, ValueError) as error:
        raise refuse(
            f"one of them cannot be written ({error})",
            "Give texts, numbers, tensors, and lists and dicts of them",
        ) from None
    return plain


def _as_plain(value: Any) -> Any:
    """Convert a mapping, tensor or array for JSON; AttributeError if the value is none of these."""
    return dict(value) if isinstance(value, Mapping) else value.tolist()


def _refusal(function: Callable[..., Any], wanted: str) -> Callable[[str, str], ConfigError]:
    """Return a function that builds the ConfigError for a wrong result of the person's function, from a
    description of the result and an advice."""
    begin = f"{_location(function)}: `{function.__name__}` must return {wanted}"
    return lambda what, advice: ConfigError(f"{begin}{what}. {advice}")


def _is_nonnegative(value: Any) -> bool:
    """Return whether a value is a finite number of at least 0."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


def _in_words(value: Any) -> str:
    """Return a number or text as Python writes it, and any other value by its type and size."""
    return repr(value) if isinstance(value, Real | str) else _described(value)


def _described(value: Any) -> str:
    """Return a value's type and size in words for a message, such as 'a float32 tensor of 4 x 2'."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape = " x ".join(map(str, value.shape))
        return f"{_with_article(dtype)} tensor" + (f" of {shape}" if shape else " with one number")
    if isinstance(value, tuple | list):
        return f"{_with_article(type(value).__name__)} of {len(value)}"
    return "None" if value is None else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def _location(function: Callable[..., Any]) -> str:
    """Return the file and line, as text, of a function's only `return`, or of its beginning."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return repr(function)
    returns = {
        position.lineno
        for step in dis.get_instructions(code)
        if step.opname.startswith("RETURN_") and step.opname != "RETURN_GENERATOR"
        if (position := step.positions) is not None
    }
    line = returns.pop() if len(returns) == 1 else code.co_firstlineno
    return f"{Path(code.co_filename).name}, line {line}"
