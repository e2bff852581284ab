"""Targets from files of descriptors: as if the field had been measured with the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nbgpu.errors import DataError
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.target import Target, load_target, save_descriptors


def _target(path: Path, **settings: Any) -> Target:
    return load_target(MicrostructureConfig(data=str(path), limit_to=4, **settings))


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    path = tmp_path / "volume.npy"
    np.save(path, np.random.default_rng(0).integers(0, 2, (16, 17, 18)))
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {"multiphase": True},
        {},
        {"multigrid_descriptor": False},
        {"isotropic": True},
        {"isotropic": True, "multigrid_descriptor": False, "multiphase": True},
    ],
)
def test_a_file_of_all_gives_what_measuring_with_the_settings_gives(
    tmp_path: Path, volume: Path, settings: dict[str, Any]
) -> None:
    file = tmp_path / "volume.npz"
    save_descriptors(file, _target(volume, multiphase=True))
    found, wanted = _target(file, **settings), _target(volume, **settings)
    assert found.num_phases == wanted.num_phases
    assert found.levels == wanted.levels
    assert len(found.descriptors) == len(wanted.descriptors)
    assert len(found.structure) == len(wanted.structure)
    for one, other in zip(found.descriptors, wanted.descriptors, strict=True):
        assert one.keys() == other.keys()
        for name, values in other.items():
            torch.testing.assert_close(one[name], values, rtol=0, atol=1e-15)


def test_the_first_of_two_phases_cannot_be_had_from_the_second(tmp_path: Path, volume: Path) -> None:
    file = tmp_path / "volume.npz"
    save_descriptors(file, _target(volume))
    with pytest.raises(DataError, match="it has the second of two phases alone, and multiphase is True"):
        _target(file, multiphase=True)
