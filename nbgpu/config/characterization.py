"""The settings of `nbgpu characterize`, which measures the descriptors of microstructures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import Field

from nbgpu.config.settings import Settings, read_from
from nbgpu.recipes.microstructure.config import DescriptorType, MicrostructureConfig

MEASURING = (
    *("limit_to", "periodic", "isotropic", "multigrid_descriptor"),
    *("multiphase", "threshold", "gram_network"),
)
"""The settings of the recipe microstructure that determine how descriptors are measured."""


class CharacterizeConfig(Settings):
    """Measure the descriptors of microstructures, and write them as targets for the recipe microstructure."""

    descriptor_types: tuple[Literal[DescriptorType, "LinealPath"], ...] = Field(
        ("FFTCorrelations", "Variation", "VolumeFractions"), min_length=1
    )
    """the statistics to measure; FFTCorrelations are measured in any case, because results are judged by
    them"""
    out: str = Field("descriptors", min_length=1)
    """folder for the results: for each FILE its name with .npz, .csv and .png"""
    against: str = Field("", json_schema_extra=read_from())
    """a microstructure or descriptors with which each FILE is compared; empty for none"""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for a descriptor that is named twice."""
        if len(set(self.descriptor_types)) < len(self.descriptor_types):
            yield f"descriptor_types={self.descriptor_types} names one twice"

    def recipes_settings(self, data: str, measuring: Mapping[str, Any]) -> MicrostructureConfig:
        """Return the settings with which the recipe would measure `data`.

        Args:
            data: a file, as the recipe's own `data`.
            measuring: values of the settings in `MEASURING`.

        Raises:
            ConfigError: the settings do not go together.
        """
        reconstructible = [name for name in dict.fromkeys(self.descriptor_types) if name in _RECONSTRUCTIBLE]
        return MicrostructureConfig.checked(
            data=data, descriptor_types=tuple(reconstructible) or ("FFTCorrelations",), **measuring
        )

    @property
    def only_measured(self) -> tuple[str, ...]:
        """The descriptors that can be measured, but not be matched by a reconstruction."""
        return tuple(name for name in self.descriptor_types if name not in _RECONSTRUCTIBLE)


_RECONSTRUCTIBLE = get_args(DescriptorType)
