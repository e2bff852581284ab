"""The slices of a volume across its three directions, and which rank has which."""

from __future__ import annotations

from torch import Tensor

NUM_DIRECTIONS = 3


def slices_along(field: Tensor, direction: int) -> Tensor:
    """(N, P, H, W): the slices of (P, D, H, W) across one of its three directions, a view."""
    return field.movedim(direction + 1, 0)


def share_of(num_slices: int, rank: int, world_size: int) -> range:
    """The slices of a rank: neighbours, and as many for each rank, but for the last ones, which may have
    fewer."""
    size = -(-num_slices // world_size)
    return range(min(rank * size, num_slices), min((rank + 1) * size, num_slices))
