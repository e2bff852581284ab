"""The rotations and reflections of a mask that rotate and reflect its image alike, for a given source and
aberrations.

For that, a rotation or reflection must leave both the source and the pupil unchanged, which is enough for any
mask and any focus. Whether it does follows from their names and numbers alone, so that settings which ask for
other augmentations are refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

NUM_FRINGE = 36
"""The number of Zernike polynomials whose Fringe number follows the formula below."""


def fringe_order(number: int) -> tuple[int, int]:
    """Return (n, m) of the Zernike polynomial with this Fringe number, 1 to 36; m < 0 stands for a sine.

    The number is (1 + (n + |m|) / 2)^2 - 2 |m| + (1 if m < 0 else 0).
    """
    assert 1 <= number <= NUM_FRINGE
    total = 0  # (n + |m|) / 2
    while (1 + total) ** 2 < number:
        total += 1
    # Counted down from the square come the cosine of m = 0, then sine and cosine of m = 1, of m = 2, ...
    m, is_cosine = divmod((1 + total) ** 2 - number + 1, 2)
    return 2 * total - m, m if is_cosine else -m


def broken_by_quarter_turns(source: str, zernikes: Iterable[int]) -> Iterator[str]:
    """Yield the reasons why the image of a mask turned by 90 degrees is not the turned image; none if it
    is."""
    if source == "dipole":
        yield "a dipole has an axis"
    for number in zernikes:
        # A polynomial with cos(m theta) or sin(m theta) is the same after a quarter turn if m is a multiple
        # of 4.
        _, m = fringe_order(number)
        if m % 4:
            yield f"Zernike {number} changes when it is turned by 90 degrees"


def broken_by_mirrors(source: str, angle_deg: float, zernikes: Iterable[int]) -> Iterator[str]:
    """Yield the reasons why the image of a mask mirrored along an axis is not the mirrored image; none if it
    is."""
    period_deg = {"dipole": 90, "quadrupole": 45, "quasar": 45}.get(source)
    if period_deg and angle_deg % period_deg:
        yield f"a {source} turned by {angle_deg:g} degrees is not its own mirror image"
    for number in zernikes:
        _, m = fringe_order(number)
        # sin(m theta) changes its sign when y does, and cos(m theta) with an odd m when x does.
        if m < 0 or m % 2:
            yield f"Zernike {number} changes when it is mirrored"
