"""From an Item to a decoded volume, and what becomes of a file that cannot be decoded."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose, Transform

from nbgpu.engine.data.volumes import READ_ERRORS, first_line
from nbgpu.errors import DataError

Item = Mapping[str, Any]
"""One volume to be decoded: `name` for messages, and what the recipe's steps take (paths, tensors, numbers)."""


class Decode(Transform):
    """Turns an Item into a decoded volume with the recipe's steps, and a failure into an item, too.

    Volumes are decoded in threads that belong to MONAI: an exception there would end the replacing thread of
    SmartCacheDataset unheard, and its `update_cache` would wait for it for ever. So a failure travels as
    {"failure": exception} and is raised where a batch is asked for. `failures` keeps all of them, so that
    those which happen while the cache is filled can be reported together.

    What is decoded keeps the item's `name`.
    """

    def __init__(self, steps: Compose) -> None:
        self.steps = steps
        self.failures: list[Exception] = []

    def __call__(self, item: Item) -> dict[str, Any]:
        try:
            return {**self.steps(dict(item)), "name": str(item["name"])}
        except Exception as error:  # noqa: BLE001  it is raised later, by `opened`
            failure = _named(error, str(item["name"]))
            self.failures.append(failure)
            return {"name": str(item["name"]), "failure": failure}

    def fingerprint(self) -> str:
        """Differs where the steps would decode the same file to something else, as far as their fields say."""
        # Not the Compose itself: it holds a random state, which is another one each time.
        steps = pickle.dumps(list(self.steps.flatten().transforms))
        return hashlib.sha256(steps + f"{version('nbgpu')} {version('monai')}".encode()).hexdigest()


def fingerprint_of(item: Item) -> str:
    """Differs between items, and for a file that was changed. OSError where a file is gone."""
    digest = hashlib.sha256()
    for name, value in sorted(item.items()):
        if isinstance(value, Path):
            there = value.stat()
            value = f"{value.resolve()} {there.st_size} {there.st_mtime_ns}"
        is_array = isinstance(value, torch.Tensor | np.ndarray)
        digest.update(f"{name}={tuple(value.shape) if is_array else repr(value)};".encode())
        if is_array:
            digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _named(error: Exception, name: str) -> Exception:
    """The DataError inside MONAI's chain of RuntimeErrors, or one that names the unreadable file."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, DataError):
        return root
    if isinstance(root, READ_ERRORS):
        return DataError(
            f"{name}: cannot be decoded ({type(root).__name__}: {first_line(root)}). The file is damaged or "
            "gone: copy it again, or leave it out"
        )
    return error  # a defect, not a bad file: it keeps its whole chain


def opened(decoded: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoded volume; raises what went wrong when it was decoded."""
    if "failure" in decoded:
        raise decoded["failure"]
    return decoded


def raise_together(failures: Sequence[Exception]) -> None:
    """Raises all DataErrors as one, a line for each, or the first of other errors; does nothing for none."""
    for failure in failures:
        if not isinstance(failure, DataError):
            raise failure
    if failures:
        # sorted: threads decode in any order, and every rank should show the same message
        raise DataError("\n".join(sorted({str(failure) for failure in failures})))
