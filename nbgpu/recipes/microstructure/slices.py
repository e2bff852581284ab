"""The slices of a volume perpendicular to its three directions, and their distribution over the ranks."""

from __future__ import annotations

from torch import Tensor

NUM_DIRECTIONS = 3


def slices_along(field: Tensor, direction: int) -> Tensor:
    """Return the slices (N, P, H, W) of (P, D, H, W) perpendicular to one of its three directions, as a
    view."""
    return field.movedim(direction + 1, 0)


def share_of(num_slices: int, rank: int, world_size: int) -> range:
    """Return the range of slices of a rank: contiguous and of equal size on all ranks, but for the last
    ranks, which may have fewer."""
    size = -(-num_slices // world_size)
    return range(min(rank * size, num_slices), min((rank + 1) * size, num_slices))
