"""`nbgpu characterize`: microstructures from a terminal, each a target for the recipe."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY

import nbgpu
from nbgpu import cli
from nbgpu.protocol.records import Event, Sample
from nbgpu.recipes.microstructure.characterize import characterize
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.grids import indicated
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.target import load_target

PNG = b"\x89PNG"


def _saved(path: Path, phases: np.ndarray) -> Path:
    np.save(path, phases)
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Blocks of 8 x 8 pixels, in turns of phase 0 and 1: each chord is 8 pixels long."""
    return _saved(tmp_path / "blocks.npy", np.kron(np.indices((4, 4)).sum(axis=0) % 2, np.ones((8, 8), int)))


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return _saved(tmp_path / "volume.npy", np.random.default_rng(0).integers(0, 3, (16, 20, 18)))


def _refused(*arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["characterize", *arguments])
    return str(ended.value)


def test_each_file_becomes_a_target_with_a_table_and_a_picture(
    tmp_path: Path, picture: Path, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    names = ["FFTCorrelations", "VolumeFractions", "LinealPath"]
    flags = ["--limit-to", "4", "--multiphase", "--descriptor-types", *names]
    cli.main(["characterize", str(picture), str(volume), "--out", str(out), *flags])
    said = capsys.readouterr().out
    assert f"{volume}: {out / 'volume'}.npz, .csv and .png" in said
    heading, first, second, *_ = said[said.index("\n\n") :].strip().splitlines()
    assert heading.split("  ")[-1] == "mean chord, px"
    assert first.split() == [str(picture), "32", "x", "32", "0", "0.5000", "2.5", "8.0"]
    assert second.split() == ["1", "0.5000", "2.5", "8.0"]
    for path, shape in ((picture, (32, 32)), (volume, (16, 20, 18))):
        phases = torch.from_numpy(np.load(path))
        field = indicated(phases, int(phases.max()) + 1)
        wanted = characterize(field, names, Measure(4))
        found = load_target(
            MicrostructureConfig(
                data=str(out / f"{path.stem}.npz"),
                limit_to=4,
                multiphase=True,
                descriptor_types=("FFTCorrelations", "VolumeFractions"),
            ),
            only_measured=["LinealPath"],
        )
        assert found.shape == shape
        assert found.structure
        for direction, descriptors in enumerate(found.descriptors):
            for name in names:
                expected = wanted[name] if len(shape) == 2 else wanted[name][direction]
                assert torch.equal(descriptors[name], expected)
        assert len(found.descriptors) == (1 if len(shape) == 2 else 3)
        assert (out / f"{path.stem}.png").read_bytes().startswith(PNG)
        rows = list(csv.DictReader((out / f"{path.stem}.csv").read_text().splitlines()))
        assert [float(row["share"]) for row in rows] == pytest.approx(
            (phases.flatten().bincount() / phases.numel()).tolist()
        )


@pytest.mark.long
def test_a_length_beyond_limit_to_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = _saved(tmp_path / "halves.npy", np.repeat([0, 1], 32)[:, None] * np.ones((1, 64), int))
    cli.main(["characterize", str(halves), "--out", str(tmp_path / "out"), "--limit-to", "4"])
    assert "at least 3.0" in capsys.readouterr().out


@pytest.mark.long
def test_three_pictures_become_one_target(tmp_path: Path, picture: Path) -> None:
    others = [_saved(tmp_path / f"{n}.npy", np.random.default_rng(1).integers(0, 2, (32, 32))) for n in "ab"]
    data = ",".join(map(str, [picture, *others]))
    cli.main(["characterize", data, "--out", str(tmp_path / "out"), "--limit-to", "4"])
    config = MicrostructureConfig(data=str(tmp_path / "out" / "blocks+a+b.npz"), limit_to=4)
    assert len(load_target(config).descriptors) == 3


def test_files_are_compared_with_another_one(
    tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks of twice the size have as many pixels in each phase, half as much border, and chords of 16."""
    coarse = _saved(tmp_path / "coarse.npy", np.kron(np.load(picture), np.ones((2, 2), int)))
    out = tmp_path / "out"
    flags = ["--limit-to", "4", "--out", str(out), "--against", str(coarse)]
    cli.main(["characterize", str(coarse), str(picture), *flags])
    heading, same, other = capsys.readouterr().out.splitlines()[-3:]
    names = heading.split()
    assert names[:3] == ["FFTCorrelations", "Variation", "VolumeFractions"]
    assert dict(zip(names, map(float, same.split()[1:]), strict=True)) == dict.fromkeys(names, 0)
    errors = dict(zip(names, map(float, other.split()[1:]), strict=True))
    assert errors["VolumeFractions"] == 0
    variations = [np.load(out / f"{n}.npz")["direction_0/Variation"][0, 0, 0] for n in ("blocks", "coarse")]
    assert errors["Variation"] == pytest.approx(variations[0] - variations[1], rel=1e-3)
    assert errors["chord_error_px"] > 2
    rows = dict(csv.reader((out / "blocks.differences.csv").read_text().splitlines()[1:]))
    assert float(rows["Variation"]) == pytest.approx(errors["Variation"], rel=1e-3)


@pytest.mark.long
def test_what_cannot_be_compared_is_told(tmp_path: Path, picture: Path, volume: Path) -> None:
    arguments = ["--limit-to", "4", "--multiphase", "--out", str(tmp_path / "out"), "--against"]
    said = _refused(str(picture), *arguments, str(volume))
    assert said == f"DataError: {picture}: has 2 phases, and {volume} has 3 phases"
    said = _refused(str(tmp_path / "one.npy"), *arguments, str(tmp_path / "other.npy"))
    assert [f"{name}.npy: there is no such file" in said for name in ("one", "other")] == [True, True]


def test_mcrpys_descriptors_become_such_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mcrpys = REPOSITORY / "tests" / "oracles" / "mcrpy" / "default_characterization.pickle"
    out = tmp_path / "out"
    flags = ["--limit-to", "4", "--descriptor-types", "Correlations"]
    cli.main(["characterize", str(mcrpys), "--out", str(out), *flags])
    shares = [line.split()[-2] for line in capsys.readouterr().out.splitlines()[-2:]]
    picture = np.load(mcrpys.with_name("fields.npz"), allow_pickle=False)["picture"]
    assert shares == [f"{1 - picture.mean():.4f}", f"{picture.mean():.4f}"]
    settings = {"limit_to": 4, "descriptor_types": ("Correlations",)}
    found = load_target(MicrostructureConfig(data=str(out / f"{mcrpys.stem}.npz"), **settings))
    wanted = load_target(MicrostructureConfig(data=str(mcrpys), **settings))
    assert found.levels == wanted.levels == 2
    assert torch.equal(found.descriptors[0]["Correlations"], wanted.descriptors[0]["Correlations"])


@pytest.mark.long
def test_descriptors_that_were_not_measured_are_told(tmp_path: Path, picture: Path) -> None:
    out = tmp_path / "out"
    cli.main(["characterize", str(picture), "--out", str(out), "--limit-to", "4"])
    said = _refused(str(out / "blocks.npz"), "--out", str(tmp_path / "again"), "--limit-to", "5")
    assert "limit_to is 4 there, and 5 in the settings" in said


def test_all_that_is_wrong_is_told_before_anything_is_measured(tmp_path: Path, picture: Path) -> None:
    gaps = _saved(tmp_path / "gaps.npy", np.load(picture) * 2)
    torn = tmp_path / "torn.npy"
    torn.write_text("no array")
    (tmp_path / "other").mkdir()
    same = _saved(tmp_path / "other" / "blocks.npy", np.load(picture))
    out = tmp_path / "out"
    out.mkdir()
    (out / "gaps.csv").write_text("of an earlier day")
    files = [picture, same, gaps, torn, tmp_path / "missing.npy"]
    said = _refused(*map(str, files), "--out", str(out), "--limit-to", "4").splitlines()
    assert [
        f"{picture} and {same} would both be written to" in said[0],
        f"{out / 'gaps'}.csv would be written over" in said[1],
        f"{tmp_path / 'missing.npy'}: there is no such file" in said[2],
        "gaps.npy: holds 2 values to 2" in said[3],
        "torn.npy: cannot be read as a .npy file of numbers: it does not begin as one" in said[4],
    ] == [True] * 5
    assert len(said) == 5
    assert [path.name for path in out.iterdir()] == ["gaps.csv"]


@pytest.mark.long
def test_bad_contents_alone_are_told_before_anything_is_measured(tmp_path: Path, picture: Path) -> None:
    files = [
        picture,
        _saved(tmp_path / "a.npy", np.load(picture) * 2),
        _saved(tmp_path / "b.npy", np.ones(9)),
    ]
    said = _refused(*map(str, files), "--out", str(tmp_path / "out"), "--limit-to", "4").splitlines()
    assert ["a.npy" in said[0], "b.npy" in said[1], len(said)] == [True, True, 2]
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.long
def test_a_network_that_does_not_fit_is_told_with_the_files(tmp_path: Path, picture: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"torn")
    arguments = ["--descriptor-types", "GramMatrices", "--gram-network", str(weights)]
    said = _refused(str(picture), "--out", str(tmp_path / "out"), *arguments)
    assert "weights.safetensors cannot be read" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "usage: nbgpu characterize FILE"),
        (["x.npy", "--limit-to", "1"], "limit_to = 1 is not valid"),
        (["x.npy", "--gram-network", "w"], "counts only with GramMatrices among descriptor_types"),
        (["x.npy", "--descriptor-types", "Variation", "Variation"], "names one twice"),
        (["x.npy", "--descriptor-types", "CrossCorrelations"], "needs multiphase=True"),
    ],
)
def test_bad_settings_are_refused_at_once(arguments: list[str], expected: str) -> None:
    assert expected in _refused(*arguments)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, picture: Path) -> None:
    arguments = [str(picture), "--limit-to", "4", "--out"]
    assert f"{picture} is a file. Take a folder with --out" in _refused(*arguments, str(picture))
    said = _refused(*arguments, str(picture / "inside"))
    assert f"RunError: {picture / 'inside'} cannot be made: Not a directory" in said


def test_a_process_that_ends_before_it_has_read_its_job_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is larger than what a pipe takes while nobody reads from it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch is broken on purpose')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    files = []
    for number in range(40):
        files.append(tmp_path / f"{'a' * 200}-{number}.npy")
        np.save(files[-1], np.indices((16, 16)).sum(axis=0) % 2)
    said = _refused(*map(str, files), "--out", str(tmp_path / "out"))
    assert "torch is broken on purpose" in said


def test_help_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["characterize", "--help-all"])
    said = capsys.readouterr().out
    assert "Measure descriptors of microstructures" in said
    assert "LinealPath" in said
    assert "--optimizer-type" not in said


def test_the_commands_own_process_loads_no_torch(tmp_path: Path, picture: Path) -> None:
    code = (
        "import sys; from nbgpu import cli; "
        f"cli.main(['characterize', {str(picture)!r}, '--out', {str(tmp_path / 'out')!r}, '--limit-to', '4']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=360)


@pytest.mark.long
def test_ranks_look_for_what_mcrpy_has_measured(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    mcrpys = REPOSITORY / "tests" / "oracles" / "mcrpy" / "volume_characterization.pickle"
    run = cluster2.train(
        "microstructure",
        data=str(mcrpys),
        limit_to=4,
        shape=(12, 12, 16),
        steps=30,
        val_every=0,
        runs_dir=str(tmp_path / "runs"),
    )
    run.wait()
    assert run.status == "finished", run.failures
    records, _ = run.reader.since()
    losses = [r.values["loss"] for r in records if isinstance(r, Sample) and "loss" in r.values]
    assert min(losses) < losses[0] / 2
    (result,) = [r.detail for r in records if isinstance(r, Event) and r.kind == "result"]
    assert result["table"]["found"]["volume_fraction_error"] < 0.011
    assert "lineal_path_error" not in result["table"]["found"]
    config = MicrostructureConfig(data=str(run.folder / "descriptors.npz"), limit_to=4)
    assert load_target(config).levels == 1
