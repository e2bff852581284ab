"""Checks the results of the functions of a person's own recipe, with messages that name the line."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbgpu.errors import ConfigError


def dataset(made: Any, function: Callable[..., Any]) -> Dataset[Any]:
    """Return the result of `dataset` or `val_dataset` if it has samples by number.

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
            f"{_where(function)}: `{function.__name__}` returned {_described(made)}, and must return a dataset with "
            f"samples by number. {advice}"
        )
    found: Dataset[Any] = made
    return found


def losses(given: Any, function: Callable[..., Any]) -> dict[str, Tensor]:
    """Return the result of `loss` as scalars by name.

    Raises:
        ConfigError: the result is no usable loss; the message names the line, the result and the expected
        value.
    """
    terms = dict(given) if isinstance(given, Mapping) else {"loss": given}

    def refuse(what: str, advice: str) -> ConfigError:
        return ConfigError(
            f"{_where(function)}: `{function.__name__}` must return the mean loss of the batch, a real tensor with one number, "
            f"or a dict with it as 'loss' and others to be shown; it returned {what}. {advice}"
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


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape = " x ".join(map(str, value.shape))
        return f"a {dtype} tensor" + (f" of {shape}" if shape else " with one number")
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _where(function: Callable[..., Any]) -> str:
    """Return the file and line of a function's only `return`, or of its beginning."""
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
