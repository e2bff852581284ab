"""MCRpy's files of descriptors, as MCRpy 0.2.0 itself has written them, and what they may not contain."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY

from nbgpu.errors import DataError
from nbgpu.recipes.microstructure import mcrpy_files
from nbgpu.recipes.microstructure.characterize import DESCRIPTORS
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.objective import Objective
from nbgpu.recipes.microstructure.target import Target, load_target

FILES = REPOSITORY / "tests" / "oracles" / "mcrpy"
OF_PICTURE = (
    "FFTCorrelations",
    "Correlations",
    "TwoPointCorrelations",
    "LineCorrelations",
    "VolumeFractions",
    "Variation",
    "LinealPathApproximation",
    "LineLinealPathApproximation",
)
USUAL = ("FFTCorrelations", "VolumeFractions", "Variation")


def _file(name: str) -> str:
    return str(FILES / f"{name}_characterization.pickle")


def _field(tmp_path: Path, name: str) -> str:
    path = tmp_path / f"{name}.npy"
    np.save(path, np.load(FILES / "fields.npz", allow_pickle=False)[name])
    return str(path)


def _target(data: str, **settings: Any) -> Target:
    return load_target(MicrostructureConfig(data=data, **({"limit_to": 4} | settings)))


@pytest.mark.parametrize(
    ("file", "field", "settings"),
    [
        ("picture", "picture", {"descriptor_types": OF_PICTURE}),
        ("picture", "picture", {"descriptor_types": USUAL, "multigrid_descriptor": False}),
        ("match", "picture", {"descriptor_types": USUAL, "shape": (32, 24)}),
        ("default", "picture", {"descriptor_types": ("Correlations",)}),
        ("default", "picture", {"descriptor_types": ("Correlations",), "multiphase": True}),
        # MCRpy has two levels in one direction of this volume, whose edges differ.
        ("volume", "volume2", {"descriptor_types": USUAL}),
        ("volume", "volume2", {"descriptor_types": USUAL, "isotropic": True}),
        ("phases", "volume3", {"descriptor_types": USUAL, "multiphase": True}),
    ],
)
def test_a_file_is_the_target_that_measuring_the_field_gives(
    tmp_path: Path, file: str, field: str, settings: dict[str, Any]
) -> None:
    found = _target(_file(file), **settings)
    wanted = _target(_field(tmp_path, field), **settings)
    assert found.shape == wanted.shape
    assert found.num_phases == wanted.num_phases
    assert found.levels == wanted.levels
    assert len(found.descriptors) == len(wanted.descriptors)
    for one, other in zip(found.descriptors, wanted.descriptors, strict=True):
        for name in settings["descriptor_types"]:
            torch.testing.assert_close(one[name], other[name][:, : found.levels], rtol=0, atol=1e-12)
        torch.testing.assert_close(
            one["FFTCorrelations"][:, 0], other["FFTCorrelations"][:, 0], rtol=0, atol=1e-12
        )
    torch.testing.assert_close(found.shares, wanted.shares, rtol=0, atol=1e-12)
    assert found.correlation_lengths_px == pytest.approx(wanted.correlation_lengths_px)


@pytest.mark.parametrize(
    ("file", "field", "multiphase", "names"),
    [
        ("picture", "picture", False, OF_PICTURE),
        ("default", "picture", True, ("Correlations",)),
        ("volume", "volume2", False, USUAL),
        ("phases", "volume3", True, USUAL),
    ],
)
def test_a_volume_has_the_same_loss_and_gradient_against_either(
    tmp_path: Path, file: str, field: str, multiphase: bool, names: tuple[str, ...]
) -> None:
    volume = torch.rand(
        3 if field == "volume3" else 1 + multiphase,
        *(9, 8, 10),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    weights = {name: DESCRIPTORS[name].weight for name in names}
    results = []
    for data in (_file(file), _field(tmp_path, field)):
        target = _target(data, descriptor_types=names, multiphase=multiphase)
        results.append(Objective(Loss(target.descriptors, weights, target.measure))(volume))
    (loss, gradient), (wanted, wanted_gradient) = results
    assert wanted > 0
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-9, atol=1e-14)


def test_numbers_of_another_grid_are_read_from_their_own_format(tmp_path: Path) -> None:
    """The numbers that the descriptors are held against, written as MCRpy writes them."""
    oracle = np.load(REPOSITORY / "tests" / "oracles" / "mcrpy.npz", allow_pickle=False)
    path = tmp_path / "ms_characterization.pickle"
    names = (*USUAL, "LinealPathApproximation")
    with _mcrpys_settings(limit_to=8, desired_shape_extended=(1, 64, 64, 1)) as settings:
        content = {name: oracle[f"{name}_mg1"] for name in names} | {"settings": settings}
        path.write_bytes(pickle.dumps(content))
    picture = tmp_path / "ms.npy"
    np.save(picture, oracle["ms"])
    found = _target(str(path), limit_to=8, descriptor_types=names)
    wanted = _target(str(picture), limit_to=8, descriptor_types=names)
    assert found.shape == (64, 64)
    assert found.levels == 3
    for name in names:
        torch.testing.assert_close(
            found.descriptors[0][name], wanted.descriptors[0][name], rtol=0, atol=1e-12
        )


def test_what_the_file_does_not_say_is_in_the_summary() -> None:
    assert "does not say how it was measured" in _target(_file("match"), shape=(32, 24)).summary
    of_default = _target(_file("default"), descriptor_types=("Correlations",)).summary
    assert "FFTCorrelations worked out from Correlations" in of_default


@contextmanager
def _mcrpys_settings(**values: Any) -> Iterator[Any]:
    """Give an object of a class with the name of MCRpy's, which is there only as long as it is pickled."""
    module = ModuleType("mcrpy.src.Settings")
    kind = type("CharacterizationSettings", (), {"__module__": module.__name__})
    module.CharacterizationSettings = kind  # type: ignore[attr-defined]
    settings = kind()
    vars(settings).update(values)
    names = ("mcrpy", "mcrpy.src", module.__name__)
    sys.modules.update(dict.fromkeys(names, module))
    try:
        yield settings
    finally:
        for name in names:
            del sys.modules[name]


def _written(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
    """Write MCRpy's file of the picture again, with something changed in its arrays or its settings."""
    content = mcrpy_files.load(Path(_file("picture")), mcrpy_files._SETTINGS)
    state = content.pop("settings")
    change(content, state)
    with _mcrpys_settings(**state) as settings:
        path.write_bytes(pickle.dumps({**content, "settings": settings}))
    return str(path)


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (lambda a, s: None, {"limit_to": 5}, "limit_to is 4 there, and 5 in the settings"),
        (lambda a, s: s.update(limit_to=5), {"limit_to": 5}, "49 values for each phase and level, and 81"),
        (lambda a, s: None, {"periodic": False}, "and periodic is False"),
        (lambda a, s: s.update(periodic=False), {}, "were measured without periodic edges"),
        (lambda a, s: s.update(threshold_steepness=20.0), {}, "Correlations has soft steps of steepness 20"),
        (
            lambda a, s: s.update(full_3d=False),
            {"descriptor_types": ("LinealPathApproximation",)},
            "newer than 0.2.0",
        ),
        (lambda a, s: a.pop("Variation"), {}, "it lacks Variation, and has FFTCorrelations, Corr"),
        (lambda a, s: None, {"multiphase": True}, "it has the second of two phases alone"),
        (
            lambda a, s: a.update({n: v[[0, 0, 0]] for n, v in a.items()}),
            {},
            "it has 3 phases, and multiphase is",
        ),
        (
            lambda a, s: a.update(Variation=np.full_like(a["Variation"], np.nan)),
            {},
            "Variation holds values that are no",
        ),
        (
            lambda a, s: a.update(Variation=a["Variation"][[0, 0]]),
            {},
            "descriptors have different numbers of phases",
        ),
        (lambda a, s: s.pop("desired_shape_extended"), {}, "Give the shape that is looked for"),
        (
            lambda a, s: [a.pop(name) for name in [*a] if name != "Variation"],
            {"descriptor_types": ("Variation",)},
            "it lacks FFTCorrelations, by which results are judged",
        ),
        (
            lambda a, s: (a.pop("FFTCorrelations"), s.update(grey_values=True)),
            {"descriptor_types": ("Variation",)},
            "has grey values, of which TwoPointCorrelations does not tell them",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name(
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, Any]], None],
    settings: dict[str, Any],
    said: str,
) -> None:
    path = _written(tmp_path / "ms.pickle", change)
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        _target(path, **({"descriptor_types": ("Correlations", *USUAL)} | settings))
    assert all(line.startswith(path) for line in str(caught.value).splitlines())


def test_all_that_cannot_be_mapped_is_told_at_once() -> None:
    names = ("CrossCorrelations", "MultiPhaseGramMatrices", "FFTCrossCorrelations", "Variation")
    with pytest.raises(DataError) as caught:
        _target(_file("other"), descriptor_types=names, multiphase=True, limit_to=5)
    said = str(caught.value).splitlines()
    assert len(said) == 6
    refused = [f" {name} cannot be taken from it" for name in names[:3]]
    for part in ("limit_to is 4", "lacks Variation", *refused, "lacks FFTCorrelations"):
        assert sum(part in line for line in said) == 1, part


@dataclass
class _Calls:
    """Has a function called when it is unpickled."""

    call: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _ran(path: Path) -> _Calls:
    return _Calls((os.mkdir, (str(path),)))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (lambda ran: {"FFTCorrelations": _ran(ran)}, rf"{os.mkdir.__module__}\.mkdir"),
        (lambda ran: {"settings": _ran(ran)}, r"mkdir"),
        (lambda ran: {"FFTCorrelations": np.array([[_ran(ran)]])}, "mkdir"),
        (lambda ran: {"FFTCorrelations": _Calls((eval, ("1",)))}, r"builtins\.eval"),
        (lambda ran: {"FFTCorrelations": _Calls((np.load, (str(ran),)))}, r"numpy\.load"),
        (
            lambda ran: {"FFTCorrelations": np.array([[None]])},
            "array of 'O8', which are not numbers|array of objects",
        ),
        (lambda ran: {"FFTCorrelations": np.array([["a"]])}, "array of 'U1', which are not numbers"),
        (lambda ran: {"FFTCorrelations": np.zeros(2, "f8,i4")}, "array of 'V12', which are not numbers"),
        (lambda ran: {"FFTCorrelations": np.random.default_rng}, r"numpy\.random\.\S*default_rng"),
        (lambda ran: {"FFTCorrelations": Path("x")}, r"pathlib\.\w+"),
        (lambda ran: {"FFTCorrelations": np.ndarray}, "something of the type"),
        (lambda ran: {"FFTCorrelations": b"bytes"}, "something of the type bytes"),
        (lambda ran: {"FFTCorrelations": 1j}, r"builtins\.complex"),
    ],
)
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_nothing_in_a_file_is_run_and_what_it_names_is_told(
    tmp_path: Path, content: Callable[[Path], Mapping[str, Any]], named: str, protocol: int
) -> None:
    ran, path = tmp_path / "ran", tmp_path / "bad.pickle"
    path.write_bytes(pickle.dumps(content(ran), protocol=protocol))
    with pytest.raises(DataError, match=named) as caught:
        _target(str(path))
    assert str(caught.value).startswith(f"{path}: holds ")
    assert not ran.exists()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_plain_values_are_read_as_they_are(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "plain.pickle"
    turned = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    content = {
        "a": [1, 2.5, None, True, "text", (turned, np.arange(3, dtype=">i2"))],
        "b": np.float64(0.5),
        "c": np.zeros((0, 2)),
        3: {"d": np.array([True])},
    }
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    found = mcrpy_files.load(path)
    assert found["a"][:5] == content["a"][:5]
    assert np.array_equal(found["a"][5][0], turned)
    assert found["a"][5][1].tolist() == [0, 1, 2]
    assert found["b"] == 0.5
    assert found["c"].shape == (0, 2)
    assert found[3]["d"].tolist() == [True]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps([1]), "is not a characterization of MCRpy"),
        (pickle.dumps({"settings": 3}), "is not a characterization of MCRpy"),
        (pickle.dumps({"raw_data": [], "line_data": np.zeros((2, 2))}), "is not a characterization of MCRpy"),
        (pickle.dumps({"VolumeFractions": (np.zeros((1, 1)),) * 2}), "is not a characterization of MCRpy"),
        (b"", "cannot be read as a pickle"),
        (b"\x93NUMPY", "cannot be read as a pickle"),
        # Python would make room for two thousand million objects.
        (b"\x80\x04}r\xff\xff\xff\x7f.", "it keeps an object as the 2147483647th"),
        (b"(dp2147483647\n.", "it keeps an object as the 2147483647th"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        _target(str(path))
    assert str(path) in str(caught.value)


def test_a_torn_or_forged_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Whatever its bytes are, reading ends, and with a DataError or with plain values."""
    whole = Path(_file("volume")).read_bytes()
    path = tmp_path / "torn.pickle"
    random = np.random.default_rng(0)
    refused = 0
    for attempt in range(600):
        content = bytearray(whole[: random.integers(len(whole))] if attempt % 2 else whole)
        for place in random.integers(max(1, len(content)), size=attempt % 5):
            if content:
                content[place] = random.integers(256)
        path.write_bytes(content)
        try:
            mcrpy_files.load(path, mcrpy_files._SETTINGS)
        except DataError:
            refused += 1
    assert refused > 300


def test_a_file_that_holds_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.pickle"
    loop: list[Any] = []
    loop.append(loop)
    buffer = io.BytesIO()
    pickle.dump({"FFTCorrelations": loop}, buffer)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="cannot be read as a pickle"):
        _target(str(path))
