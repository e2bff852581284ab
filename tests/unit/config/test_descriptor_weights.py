"""The weights of a microstructure's descriptors, where they are given and where they are not."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.config import flags, train_config
from nbgpu.recipes.microstructure.config import MicrostructureConfig


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"FFTCorrelations": 1, "Variation": 1, "VolumeFractions": 1}),
        (["--descriptor-types", "Correlations", "Variation"], {"Correlations": None, "Variation": None}),
        (
            ["--descriptor-types", "Correlations", "Variation", "--descriptor-weights", "1", "10"],
            {"Correlations": 1, "Variation": 10},
        ),
    ],
)
def test_descriptors_without_weights_have_their_own(arguments: list[str], expected: dict[str, Any]) -> None:
    values = flags.parse([MicrostructureConfig], arguments, prog="train")
    config = train_config(**values)
    assert isinstance(config, MicrostructureConfig)
    assert config.weights == expected


def test_an_empty_list_asks_for_each_descriptors_own_weight() -> None:
    config = train_config("microstructure", descriptor_weights=())
    assert isinstance(config, MicrostructureConfig)
    assert set(config.weights.values()) == {None}
