"""Checks that all ranks have the same data before they divide it among themselves.

A rank with fewer samples than the others ends its epoch earlier, and the others wait for it for ever. If the
ranks have the samples in different orders, some are trained on twice and others never. So before the first
step the ranks compare the number of their samples and digests of a few samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nbgpu.engine.group import exchange
from nbgpu.engine.group.consensus import together
from nbgpu.engine.workload.recipe import Identity, Loaders
from nbgpu.errors import DataError
from nbgpu.text.ranks import named_ranks

_MAX_NUMBERS = 2**20
"""The most elements of a tensor that go into its digest; of a larger tensor evenly spaced ones."""


def digest(named: Mapping[str, Tensor]) -> str:
    """Return a digest of the names, types, shapes and numbers of a sample's tensors."""
    blake = hashlib.blake2b(digest_size=16)
    for name, tensor in named.items():
        blake.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().reshape(-1)
        numbers = flat[:: max(1, flat.numel() // _MAX_NUMBERS)].cpu().contiguous()
        blake.update(numbers.view(torch.uint8).numpy().tobytes())
    return blake.hexdigest()


def require_the_same(loaders: Loaders) -> None:
    """Raise DataError on every rank if the ranks do not have the same samples to divide among themselves. A
    collective."""

    def identities() -> list[dict[str, Identity]]:
        return exchange.gather(together(lambda: dict(loaders.identity())))

    if message := differences(identities(), identities):
        raise DataError(message)


def differences(
    first: Sequence[Mapping[str, Identity]], second: Callable[[], Sequence[Mapping[str, Identity]]]
) -> str:
    """Return a message about the differences between the ranks; '' if there are none. It is the same on every
    rank.

    Args:
        first: every rank's sets of samples by name, in order of rank.
        second: reads the sets of all ranks a second time. A sample that differs from its first reading is
            random in the dataset itself, and is not compared. Called on all ranks or on none.
    """
    if not _lines(first):
        return ""
    comparable = [
        {name: _without_random(identity, again.get(name)) for name, identity in once.items()}
        for once, again in zip(first, second(), strict=True)
    ]
    lines = _lines(comparable)
    advice = dict.fromkeys(identity["advice"] for sets in comparable for identity in sets.values())
    return "\n".join(["the ranks do not have the same data", *lines, *advice]) if lines else ""


def _without_random(once: Identity, again: Identity | None) -> Identity:
    """Return a rank's set of samples, with an empty digest for each sample that differs between two readings:
    such a sample is random in the dataset itself."""
    digests = again["samples"] if again is not None else {}
    samples = {name: value if digests.get(name) == value else "" for name, value in once["samples"].items()}
    return {**once, "samples": samples}


def _lines(by_rank: Sequence[Mapping[str, Identity]]) -> list[str]:
    """Return lines about the sets of samples that differ between the ranks: one for a set that differs in
    length, and else one for each sample that differs. A sample is compared if every rank has a digest of it:
    an empty one marks a sample that is random in the dataset itself."""
    lines = []
    for what in dict.fromkeys(name for sets in by_rank for name in sets):
        lengths = [sets[what]["length"] if what in sets else 0 for sets in by_rank]
        if len(set(lengths)) > 1:
            numbers = ", ".join(
                f"{length:,} on {named_ranks(rank for rank, other in enumerate(lengths) if other == length)}"
                for length in dict.fromkeys(lengths)
            )
            lines.append(f"{what} differs in length: {numbers}")
            continue
        for name in by_rank[0][what]["samples"] if what in by_rank[0] else ():
            digests = [sets[what]["samples"].get(name, "") for sets in by_rank]
            if all(digests) and len(set(digests)) > 1:
                others = named_ranks(rank for rank, value in enumerate(digests) if value != digests[0])
                lines.append(f"{name} of {what} is another one on {others} than on rank 0")
    return lines
