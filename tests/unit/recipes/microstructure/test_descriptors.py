"""The descriptors of microstructures, against the reference's numbers, by hand and against their own
definitions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import save_file
from torch import Tensor

from nbgpu.errors import DataError
from nbgpu.recipes.microstructure.characterize import DESCRIPTORS, characterize, described
from nbgpu.recipes.microstructure.measure import Measure

PHASE = [name for name, d in DESCRIPTORS.items() if d.of == "phase"]
PHASES = [name for name, d in DESCRIPTORS.items() if d.of == "phases"]


def _field(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _binary(*shape: int) -> Tensor:
    return (_field(*shape) < 0.4).double()


def _of(name: str, x: Tensor, measure: Measure) -> Tensor:
    return DESCRIPTORS[name].compute(x, measure)


@pytest.mark.parametrize("multigrid", [False, True])
def test_all_descriptors_equal_the_references(multigrid: bool) -> None:
    oracle = np.load(REPOSITORY / "tests" / "oracles" / "mcrpy.npz", allow_pickle=False)
    ending = f"_mg{int(multigrid)}"
    names = [key.removesuffix(ending) for key in oracle if key.endswith(ending)]
    assert len(names) == 5
    field = torch.from_numpy(oracle["ms"] == 1).double()[None]
    for name, values in characterize(field, names, Measure(limit_to=8), multigrid=multigrid).items():
        expected = oracle[name + ending].ravel()
        found = values.numpy().ravel()[:: 97 if name == "Correlations" else 1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("periodic", [True, False])
def test_two_point_correlations_are_the_means_over_all_pairs(periodic: bool) -> None:
    x = _binary(2, 9, 12)
    first, second = x
    limit = 4
    found = _of("FFTCrossCorrelations", x.flip(0)[None], Measure(limit, periodic))[0, 0]
    auto = _of("FFTCorrelations", x, Measure(limit, periodic))[0]
    for i in range(-limit + 1, limit):
        for j in range(-limit + 1, limit):
            rows, columns = torch.arange(9)[:, None], torch.arange(12)[None]
            inside = (rows + i >= 0) & (rows + i < 9) & (columns + j >= 0) & (columns + j < 12)
            shifted = first[(rows + i) % 9, (columns + j) % 12]
            counted = torch.ones_like(inside) if periodic else inside
            at = (i + limit - 1, j + limit - 1)
            assert found[at] == pytest.approx(float((shifted * second)[counted].mean()), abs=1e-14)
            assert auto[at] == pytest.approx(float((shifted * first)[counted].mean()), abs=1e-14)


def test_soft_correlations_of_a_field_of_two_values_are_nearly_the_hard_ones() -> None:
    """A pair of which one pixel is in the phase counts soft_step(1/2) = 0.08 in place of 0, and its square in
    the mean."""
    x = _binary(1, 16, 16)
    limit = 4
    hard = _of("FFTCorrelations", x, Measure(limit))[0]
    soft = _of("TwoPointCorrelations", x, Measure(limit))[0]
    share = float(x.mean())
    assert soft[0] == pytest.approx(share, abs=1e-6)
    one_of_two = 2 * (share - hard[limit - 1, limit])
    assert soft[1] == pytest.approx(float(hard[limit - 1, limit] + one_of_two * 0.0821**2), abs=1e-3)
    # (i, -j) comes after all (i, j).
    at = limit * limit
    one_of_two = 2 * (share - hard[limit, limit - 2])
    assert soft[at] == pytest.approx(float(hard[limit, limit - 2] + one_of_two * 0.0821**2), abs=1e-3)


@pytest.mark.parametrize("periodic", [True, False])
def test_correlations_agree_among_themselves(periodic: bool) -> None:
    x, measure, limit = _field(2, 16, 14), Measure(3, periodic), 3
    whole = _of("Correlations", x, measure)
    torch.testing.assert_close(_of("TwoPointCorrelations", x, measure), whole.diagonal(dim1=1, dim2=2))
    along_axes = [limit, 2 * limit, *range(limit)]
    torch.testing.assert_close(_of("LineCorrelations", x, measure), whole[:, along_axes][:, :, along_axes])


def test_three_point_correlations_inside_a_field_that_is_not_periodic() -> None:
    """By hand: of (0, 1) and (1, -1), over the positions from which all vectors end inside."""
    x = _field(1, 5, 6)
    found = _of("Correlations", x, Measure(2, periodic=False))[0]
    assert found.shape == (5, 5)

    def soft(value: float) -> float:
        def sigmoid(v: float) -> float:
            return 1 / (1 + math.exp(-10 * (v - 0.75)))

        return (sigmoid(value) - sigmoid(0)) / (sigmoid(1) - sigmoid(0))

    products = [
        soft(float(x[0, i, j] + x[0, i, j + 1]) / 2) * soft(float(x[0, i, j] + x[0, i + 1, j - 1]) / 2)
        for i in range(4)
        for j in range(1, 5)
    ]
    assert found[1, 4] == pytest.approx(float(np.mean(products)), abs=1e-8)


def test_variation_counts_the_borders_of_stripes() -> None:
    x = torch.zeros(1, 8, 8, dtype=torch.float64)
    x[:, :, :4] = 1
    assert _of("Variation", x, Measure(2, periodic=False)).item() == 8 / 64
    # Two borders of 8 pixels, and once more those of the row that is set behind the last one.
    assert _of("Variation", x, Measure(2)).item() == 18 / 64


@pytest.mark.parametrize("name", ["LinealPath", "LinealPathApproximation", "LineLinealPathApproximation"])
def test_a_lineal_path_is_the_share_of_the_phase_and_falls_with_the_length(name: str) -> None:
    x = torch.zeros(1, 32, 32, dtype=torch.float64)
    x[:, :, :12] = 1
    values = _of(name, x, Measure(3))[0]
    assert values.max() == pytest.approx(12 / 32, abs=1e-6)
    if name == "LinealPath":
        across, down = values[3], values[4]  # of 3 pixels: two diagonals, then these
        assert (across.item(), down.item()) == (10 / 32, 12 / 32)
        # A line of 7 pixels that goes 3 columns aside on its way down.
        assert values.min() == pytest.approx(6 / 32)


@pytest.mark.slow
@pytest.mark.requires_shared_data
def test_phases_of_a_real_micrograph_add_up(shared_data: Path) -> None:
    """Somewhere each pixel is in some phase: sum over q of S2(p, q; r) = share of p, for every r."""
    picture = torch.from_numpy(np.load(shared_data / "microstructures" / "composite_resized.npy"))
    field = torch.stack([(picture == phase).double() for phase in range(3)])
    names = ["FFTCorrelations", "FFTCrossCorrelations", "VolumeFractions", "CrossCorrelations"]
    found = characterize(field, names, Measure(limit_to=8), multigrid=False)
    auto, cross = found["FFTCorrelations"][:, 0], found["FFTCrossCorrelations"][0, 0]
    (of_1_0, of_2_0, of_2_1), back = cross, cross.flip(1, 2)
    sums = torch.stack([auto[0] + back[0] + back[1], auto[1] + of_1_0 + back[2], auto[2] + of_2_0 + of_2_1])
    expected = found["VolumeFractions"][:, :, None].expand_as(sums)
    torch.testing.assert_close(sums, expected, rtol=0, atol=1e-12)
    assert found["CrossCorrelations"].shape == (1, 1, 3 * 113, 113)


@pytest.mark.slow
@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("name", [name for name, d in DESCRIPTORS.items() if d.differentiable])
def test_gradients_are_those_of_the_values(name: str, periodic: bool) -> None:
    descriptor, measure = DESCRIPTORS[name], Measure(2, periodic)
    shape = (2, 2, 7, 7) if name in PHASES else (2, 7, 7)
    if "GramMatrices" in name:
        shape = (*shape[:-2], 12, 12)
    x = _field(*shape).requires_grad_()
    # Of a random combination of all values: the whole Jacobian of the Gram matrices would take minutes.
    weights = torch.randn_like(descriptor.compute(x, measure).detach())
    assert torch.autograd.gradcheck(lambda x: (descriptor.compute(x, measure) * weights).sum(), (x,))


@pytest.mark.parametrize("name", PHASE + PHASES)
def test_slices_are_described_each_for_itself(name: str) -> None:
    slices = _field(3, 2, 16, 20)
    values = described(slices, DESCRIPTORS[name], Measure(4), levels=2)
    assert values.shape[:3] == (3, 2 if name in PHASE else 1, 2)
    alone = described(slices[1:2], DESCRIPTORS[name], Measure(4), levels=2)
    torch.testing.assert_close(values[1:2], alone)


@pytest.mark.parametrize("periodic", [True, False])
def test_the_smallest_field_that_is_taken_has_every_descriptor(periodic: bool) -> None:
    """2 x limit_to pixels, which the longest lines are longer than."""
    found = characterize(_binary(2, 8, 8), [*PHASE, *PHASES], Measure(4, periodic))
    assert all(values.isfinite().all() and values.shape[1] == 1 for values in found.values())
    # One pixel first; lines of 9 pixels do not fit into 8.
    first, last = found["LinealPath"][0, 0, [0, -1]]
    if not periodic:
        assert first == found["VolumeFractions"][0, 0]
        assert last == 0


def test_a_lineal_path_inside_a_field_counts_the_places_where_the_line_fits() -> None:
    x = torch.zeros(1, 16, 16, dtype=torch.float64)
    x[:, :, 8:] = 1
    values = _of("LinealPath", x, Measure(3, periodic=False))[0]
    across, down = values[3], values[4]
    assert (across.item(), down.item()) == (6 / 14, 8 / 16)
    soft = _of("LinealPathApproximation", x, Measure(3, periodic=False))[0]
    assert soft[4] == pytest.approx(8 / 16, abs=1e-6)
    # Two places at the border have one or two of three pixels in the phase.
    partly = (0.0153 - 0.00055) / 0.9236 + (0.3029 - 0.00055) / 0.9236
    assert soft[3] == pytest.approx((6 + partly) / 14, abs=1e-3)


def test_a_volume_is_described_by_the_mean_over_its_slices() -> None:
    volume = _binary(1, 8, 10, 12)
    measure = Measure(4)
    found = characterize(volume, ["FFTCorrelations"], measure)["FFTCorrelations"]
    assert found.shape == (3, 1, 1, 7, 7)
    expected = torch.stack([_of("FFTCorrelations", volume[:, :, i], measure)[0] for i in range(10)]).mean(
        dim=0
    )
    torch.testing.assert_close(found[1, 0, 0], expected)
    isotropic = characterize(volume, ["FFTCorrelations"], measure, isotropic=True)["FFTCorrelations"]
    torch.testing.assert_close(isotropic, found.mean(dim=0))


def test_gram_matrices_take_a_network_from_a_file_and_refuse_a_bad_one(tmp_path: Path) -> None:
    path = tmp_path / "network.safetensors"
    save_file(
        {
            "0.weight": torch.randn(4, 3, 3, 3),
            "0.bias": torch.zeros(4),
            "1.weight": torch.randn(5, 4, 3, 3),
            "1.bias": torch.ones(5),
        },
        path,
    )
    values = _of("GramMatrices", _field(2, 16, 16), Measure(gram_network=str(path)))
    assert values.shape == (2, 4 * 5 // 2 + 5 * 6 // 2)
    with pytest.raises(DataError, match="takes 3 channels, and the field has 2 phases"):
        _of("MultiPhaseGramMatrices", _field(1, 2, 16, 16), Measure(gram_network=str(path)))

    bad = tmp_path / "bad.safetensors"
    save_file({"0.weight": torch.randn(4, 3, 2, 2), "0.bias": torch.zeros(3), "x": torch.ones(1)}, bad)
    with pytest.raises(DataError, match=r"layer 0 has weights[\s\S]*unexpected names: x"):
        _of("GramMatrices", _field(1, 16, 16), Measure(gram_network=str(bad)))
    with pytest.raises(DataError, match="cannot be read as a safetensors file"):
        _of("GramMatrices", _field(1, 16, 16), Measure(gram_network=str(tmp_path / "none")))


def test_the_correlation_of_orientations_is_the_cosine_between_them() -> None:
    """Columns in turn not rotated and rotated by a right angle: trace(R) / 3 = (1 + 2 cos 90 degrees) / 3 =
    1/3."""
    vectors = torch.zeros(3, 8, 8, dtype=torch.float64)
    vectors[2, :, ::2] = math.pi / 2
    found = characterize(vectors, ["OrientationDescriptor"], Measure(3), multigrid=False)
    row = found["OrientationDescriptor"][0, 0, 2]
    torch.testing.assert_close(row, torch.tensor([1, 1 / 3, 1, 1 / 3, 1], dtype=torch.float64))
