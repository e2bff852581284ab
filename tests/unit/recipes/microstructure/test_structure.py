"""What a reconstruction is judged by and does not minimise, and the cut that keeps the shares of the
phases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nbgpu.config import train_config
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.cutting import cut_near_share
from nbgpu.recipes.microstructure.grids import cut, decided
from nbgpu.recipes.microstructure.recipe import Microstructure
from nbgpu.recipes.microstructure.sample import micrograph
from nbgpu.recipes.microstructure.structure import structure_errors, structures
from nbgpu.recipes.microstructure.target import Target, load_target, save_descriptors


def _config(**settings: object) -> MicrostructureConfig:
    config = train_config("microstructure", **settings)  # type: ignore[arg-type]
    assert isinstance(config, MicrostructureConfig)
    return config


def _stripes() -> Tensor:
    """Stripes of 3 and 5 columns; the last one goes on at the left edge."""
    return ((torch.arange(16) + 1) % 8 < 3).long().expand(16, 16)


def test_lines_chords_and_clusters_of_stripes_by_hand() -> None:
    (found,) = structures(_stripes(), 2, limit_to=4, periodic=True)
    # Along the stripes every line is inside; across them, 3, 2, 1 of 8 places are.
    across = torch.tensor([3, 2, 1, 0, 0], dtype=torch.float64) / 8
    torch.testing.assert_close(found.lineal_path[1, :5], (across + 3 / 8) / 2)
    # All chords of this phase have 3 pixels, and those of the other 5.
    assert found.chords[1, :5].tolist() == pytest.approx([1, 1, 1, 0, 0])
    assert found.chords[0, :7].tolist() == pytest.approx([1, 1, 1, 1, 1, 0, 0])
    across = torch.tensor([2, 1, 0], dtype=torch.float64) / 8
    torch.testing.assert_close(found.cluster[1], (across + 3 / 8) / 2)


def test_a_field_that_is_not_periodic_ends_at_its_edges() -> None:
    (found,) = structures(_stripes(), 2, limit_to=4, periodic=False)
    # Two columns, five, three, five and one; a line over 2 columns has 15 places, of which 1 + 2 are inside.
    assert float(found.lineal_path[1, 1]) == pytest.approx((3 / 15 + 6 / 16) / 2)
    assert float(found.cluster[1, 0]) == pytest.approx((3 / 15 + 6 / 16) / 2)
    assert found.lineal_path.isfinite().all()


def test_clusters_know_what_lines_do_not() -> None:
    """Two rings: in one a gap on either side separates the halves."""
    ring = torch.zeros(1, 12, 12, dtype=torch.long)
    ring[0, 2:9, [2, 8]] = 1
    ring[0, [2, 8], 2:9] = 1
    broken = ring.clone()
    broken[0, 5, [2, 8]] = 0
    whole, parts = (structures(field[0], 2, 8, periodic=True)[0] for field in (ring, broken))
    # Opposite sides are six pixels apart, both ways round the field: 7 pairs along rows and 7 along columns.
    # With the gaps, 6 rows are left, and the upper side no longer belongs to the lower one.
    assert float(whole.cluster[1, 5]) == pytest.approx(2 * (7 + 7) / 144 / 2)
    assert float(parts.cluster[1, 5]) == pytest.approx(2 * (0 + 6) / 144 / 2)


def test_a_volume_is_compared_in_each_direction_with_its_own_picture() -> None:
    volume = micrograph((16, 16, 16), 1.5, [0.4], seed=0)
    own = structures(volume, 2, 4, periodic=True)
    assert len(own) == 3
    assert set(structure_errors(own, own).values()) == {0.0}
    other = structures(micrograph((32, 32), 3.0, [0.4], seed=0), 2, 4, periodic=True)
    errors = structure_errors(own, other)
    assert all(value > 0 for value in errors.values())
    # Pictures twice as coarse have chords that are about twice as long: 5 pixels in place of 3.
    assert 1 < errors["chord_error_px"] < 5


@pytest.mark.parametrize("shares", [[0.65, 0.35], [0.2, 0.5, 0.3]])
def test_a_cut_gives_each_phase_its_share_to_the_pixel(shares: list[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    num = len(shares) if len(shares) > 2 else 1
    field = torch.rand(num, 15, 14, 13, generator=generator, dtype=torch.float64)
    phases = cut(field, torch.tensor(shares, dtype=torch.float64))
    counts = phases.flatten().bincount() / phases.numel()
    np.testing.assert_allclose(counts, shares, atol=1 / phases.numel())
    if num == 1:
        # That is a threshold.
        assert float(field[0][phases == 0].max()) <= float(field[0][phases == 1].min()) + 1e-5
    else:
        assert float((phases == decided(field)).double().mean()) > 0.7


def test_neighbours_decide_where_pixels_are_equal() -> None:
    field = torch.zeros(1, 8, 8, dtype=torch.float64)
    field[0, 2:5, 2:5] = 1
    phases = cut(field, torch.tensor([63 / 64, 1 / 64], dtype=torch.float64))
    assert phases.nonzero().tolist() == [[3, 3]]


@pytest.mark.requires_shared_data
def test_real_micrographs_keep_their_shares_within_a_hundredth(shared_data: Path) -> None:
    for path in sorted((shared_data / "microstructures").glob("*.npy")):
        several = bool(np.load(path).max() > 1)
        problem = Microstructure(_config(data=str(path), multiphase=several, limit_to=8))
        problem.load()
        target = problem.target
        generator = torch.Generator().manual_seed(0)
        field = torch.rand(target.num_phases, *target.shape, generator=generator, dtype=torch.float64)
        most = 0 if several else min(0.01, 0.05 * float(target.shares.min()))
        assert problem.measure(field)["volume_fraction_error"] <= most + 1 / field[0].numel(), path


def test_a_cut_leaves_the_share_by_a_hundredth_where_the_correlations_ask_for_it() -> None:
    """The error is told by an oracle that wants other shares, as correlations of one finite picture may."""
    field = torch.rand(1, 40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def share_of_cut(share: float, wanted: float) -> float:
        shares = torch.tensor([1 - share, share], dtype=torch.float64)
        phases = cut_near_share(field, shares, lambda phases: abs(float(phases.double().mean()) - wanted))
        return float(phases.double().mean())

    assert share_of_cut(0.4, wanted=0.4) == pytest.approx(0.4, abs=1e-9)
    assert share_of_cut(0.4, wanted=0.405) == pytest.approx(0.405, abs=1e-9)
    assert share_of_cut(0.4, wanted=0.3925) == pytest.approx(0.3925, abs=1e-9)
    assert share_of_cut(0.4, wanted=0.5) == pytest.approx(0.41, abs=1e-9)
    # A rare phase keeps all but a twentieth of its share.
    assert share_of_cut(0.05, wanted=0.5) == pytest.approx(0.0525, abs=1e-9)


def _target(**settings: object) -> Target:
    return load_target(_config(**settings))


def test_a_field_of_one_phase_has_no_correlation_length(tmp_path: Path) -> None:
    np.save(tmp_path / "zeros.npy", np.zeros((64, 64)))
    target = _target(data=str(tmp_path / "zeros.npy"), limit_to=8)
    assert target.correlation_lengths_px == [0.0]


def test_a_small_volume_is_said_to_be_one() -> None:
    """The generated picture's covariance falls to 1 / e at 3 pixels, for a correlation length of 2."""
    assert max(_target().correlation_lengths_px) == pytest.approx(3.0, abs=0.1)
    assert not _target().warnings
    coarse = _target(generated_correlation_length=6.0)
    assert max(coarse.correlation_lengths_px) == pytest.approx(8.5, abs=1)
    (warning,) = coarse.warnings
    assert "32 pixels, is less than 5 correlation lengths of" in warning
    (warning,) = _target(generated_correlation_length=30.0).warnings
    assert "at least 15.0 pixels" in warning
    problem = Microstructure(_config(generated_correlation_length=6.0))
    problem.load()
    assert problem.summary[-1].startswith("the shortest axis, 32 pixels")


def test_a_file_of_descriptors_carries_what_a_result_is_judged_by(tmp_path: Path) -> None:
    target = _target(limit_to=8)
    save_descriptors(tmp_path / "descriptors.npz", target)
    again = _target(limit_to=8, data=str(tmp_path / "descriptors.npz"))
    assert structure_errors(target.structure, again.structure) == {
        "lineal_path_error": 0,
        "chord_error_px": 0,
        "cluster_error": 0,
    }
