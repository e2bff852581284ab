"""Checks that all ranks have the same data before they divide it among themselves.

A rank with fewer samples than the others ends its epoch earlier, and the others wait for it for ever. With
samples in another order training runs, but some samples are used twice and others never. So before the first
step the ranks compare the number of their samples and a few of the samples.
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
"""The number of evenly spaced elements of a larger tensor that are compared."""


def digest(named: Mapping[str, Tensor]) -> str:
    """Return a digest of the names, types, shapes and numbers of a sample's tensors."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in named.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        flat = tensor.detach().reshape(-1)
        numbers = flat[:: max(1, flat.numel() // _MAX_NUMBERS)].cpu().contiguous()
        found.update(numbers.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def require_the_same(loaders: Loaders) -> None:
    """Raise DataError on every rank if the ranks do not have the same samples to divide among themselves. A
    collective."""

    def identities() -> list[dict[str, Identity]]:
        own = together(lambda: dict(loaders.identity()))
        return exchange.gather(own)

    if found := differences(identities(), identities):
        raise DataError(found)


def differences(
    first: Sequence[Mapping[str, Identity]], second: Callable[[], Sequence[Mapping[str, Identity]]]
) -> str:
    """Describe the differences between the ranks; '' if there are none. Every rank returns the same.

    Args:
        first: every rank's sets of samples by name, in order of rank.
        second: reads the sets a second time. A sample that differs from its first reading is random in the
            dataset itself, and is not compared. Called on all ranks or on none.
    """
    if not _lines(first):
        return ""
    again = second()
    kept = [
        {what: _only_the_same(identity, twice.get(what)) for what, identity in once.items()}
        for once, twice in zip(first, again, strict=True)
    ]
    lines = _lines(kept)
    advice = dict.fromkeys(identity["advice"] for sets in kept for identity in sets.values())
    return "\n".join(["the ranks do not have the same data", *lines, *advice]) if lines else ""


def _only_the_same(once: Identity, twice: Identity | None) -> Identity:
    """Return a rank's set of samples, with an empty digest for each sample that differs between two readings:
    such a sample is random in the dataset itself."""
    there = twice["samples"] if twice is not None else {}
    samples = {name: found if there.get(name) == found else "" for name, found in once["samples"].items()}
    return {**once, "samples": samples}


def _lines(by_rank: Sequence[Mapping[str, Identity]]) -> list[str]:
    """Return a line for each set of samples that differs between the ranks, in length or in one of the
    compared samples."""
    lines = []
    for what in dict.fromkeys(what for sets in by_rank for what in sets):
        lengths = [sets[what]["length"] if what in sets else 0 for sets in by_rank]
        if len(set(lengths)) > 1:
            numbers = ", ".join(
                f"{length:,} on {named_ranks(rank for rank, theirs in enumerate(lengths) if theirs == length)}"
                for length in dict.fromkeys(lengths)
            )
            lines.append(f"{what} differs in length: {numbers}")
            continue
        for name in by_rank[0][what]["samples"] if what in by_rank[0] else ():
            digests = [sets[what]["samples"].get(name, "") for sets in by_rank]
            if all(digests) and len(set(digests)) > 1:
                other = named_ranks(rank for rank, found in enumerate(digests) if found != digests[0])
                lines.append(f"{name} of {what} is another one on {other} than on rank 0")
    return lines
