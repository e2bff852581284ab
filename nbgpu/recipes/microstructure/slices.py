"""The slices of a volume perpendicular to its three directions."""

from __future__ import annotations

from torch import Tensor

NUM_DIRECTIONS = 3


def slices_along(field: Tensor, direction: int) -> Tensor:
    """Return the slices (N, P, H, W) of (P, D, H, W) perpendicular to one of its three directions, as a
    view."""
    return field.movedim(direction + 1, 0)
