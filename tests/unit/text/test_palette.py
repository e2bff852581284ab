"""The ranks' colours can be told from the page, light and dark, and from one another, by everyone."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from nbgpu.text.palette import RANK_COLORS, rank_color

# Machado, Oliveira and Fernandes 2009, "A physiologically-based model for simulation of color vision
# deficiency", severity 1.0: from linear RGB to the linear RGB that looks the same to a common eye.
VISIONS = {
    "common": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
# Linear sRGB to XYZ, divided by the white point D65, so that white is (1, 1, 1).
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
) / np.array([[0.95047], [1.0], [1.08883]])


def _linear(color: str) -> np.ndarray:
    """Linear RGB of '#rrggbb', shape (3,), each 0 to 1."""
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def _contrast(one: str, other: str) -> float:
    """Contrast ratio as WCAG 2.1 defines it, 1 to 21."""
    darker, lighter = sorted(float(np.dot([0.2126, 0.7152, 0.0722], _linear(c))) for c in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def _lab(color: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of the colour as somebody with that vision sees it, shape (3,)."""
    x, y, z = TO_XYZ @ np.clip(VISIONS[vision] @ _linear(color), 0, 1)
    fx, fy, fz = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


def test_the_measures_agree_with_known_values() -> None:
    assert _contrast("#ffffff", "#000000") == pytest.approx(21)
    assert _lab("#ffffff", "common") == pytest.approx([100, 0, 0], abs=0.01)
    assert _lab("#ff0000", "common") == pytest.approx([53.24, 80.09, 67.20], abs=0.05)


@pytest.mark.parametrize("color", RANK_COLORS)
@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_a_colour_stands_out_from_the_page(color: str, page: str) -> None:
    assert _contrast(color, page) >= 3, f"{color} on {page}: {_contrast(color, page):.2f}"


@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_colours_can_be_told_apart(vision: str) -> None:
    assert len(RANK_COLORS) == 8
    for one, other in combinations(RANK_COLORS, 2):
        difference = math.dist(_lab(one, vision), _lab(other, vision))
        assert difference >= 18, f"{one} and {other} differ by {difference:.1f} with {vision}"


def test_colours_repeat_after_eight() -> None:
    assert rank_color(8) == rank_color(0)
    assert rank_color(13) == rank_color(5)
