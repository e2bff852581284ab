"""Decodes an Item into a volume, and turns errors of bad files into messages that name them."""

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
"""A volume to decode: `name` for messages, and the input of the recipe's steps (paths, tensors, numbers)."""


class Decode(Transform):
    """Decodes an Item with the recipe's steps, and returns a failure as a value.

    Volumes are decoded in MONAI's threads. An exception there would silently end the replacing thread of
    SmartCacheDataset, and its `update_cache` would wait for that thread for ever. So a failure is returned as
    {"name": ..., "failure": exception}, and `opened` raises it when the volume is used. `failures` collects
    all failures, so that those from filling the cache can be reported together.

    A decoded volume keeps the item's `name`.
    """

    def __init__(self, steps: Compose) -> None:
        self.steps = steps
        self.failures: list[Exception] = []

    def __call__(self, item: Item) -> dict[str, Any]:
        try:
            return {**self.steps(dict(item)), "name": str(item["name"])}
        except Exception as error:  # noqa: BLE001 - `opened` raises it later
            failure = _named(error, str(item["name"]))
            self.failures.append(failure)
            return {"name": str(item["name"]), "failure": failure}

    def fingerprint(self) -> str:
        """Return a digest of the decoding steps' pickled fields, and of the versions of nbgpu and MONAI:
        another digest means that a file may be decoded differently."""
        # The Compose itself is left out: it holds a random state, which differs each time.
        steps = pickle.dumps(list(self.steps.flatten().transforms))
        return hashlib.sha256(steps + f"{version('nbgpu')} {version('monai')}".encode()).hexdigest()


def fingerprint_of(item: Item) -> str:
    """Return a digest of an item that changes with its files. OSError if a file is gone."""
    digest = hashlib.sha256()
    for name, value in sorted(item.items()):
        if isinstance(value, Path):
            # Size and modification time stand for the content, which would take long to read.
            status = value.stat()
            value = f"{value.resolve()} {status.st_size} {status.st_mtime_ns}"
        is_array = isinstance(value, torch.Tensor | np.ndarray)
        digest.update(f"{name}={tuple(value.shape) if is_array else repr(value)};".encode())
        if is_array:
            digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _named(error: Exception, name: str) -> Exception:
    """Return the DataError in MONAI's chain of RuntimeErrors, or one that names the unreadable file."""
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
    return error  # a bug rather than a bad file: it keeps its whole chain


def opened(decoded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoded volume, or raise the error of its decoding."""
    if "failure" in decoded:
        raise decoded["failure"]
    return decoded


def raise_together(failures: Sequence[Exception]) -> None:
    """Raise all DataErrors as one, with a line for each, or else the first other error; without failures do
    nothing."""
    for failure in failures:
        if not isinstance(failure, DataError):
            raise failure
    if failures:
        # sorted, because threads decode in any order and every rank should show the same message
        raise DataError("\n".join(sorted({str(failure) for failure in failures})))
