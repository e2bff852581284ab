"""Microstructures on two real ranks: the same numbers as on one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import quality
import safetensors
import torch
from reconstruction import reconstruct

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.config import train_config
from nbgpu.engine.workload.descent import OPTIMIZERS
from nbgpu.protocol.records import Event, Sample
from nbgpu.recipes.microstructure.characterize import DESCRIPTORS, characterize
from nbgpu.recipes.microstructure.config import DescriptorType, MicrostructureConfig
from nbgpu.recipes.microstructure.grids import indicated
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.objective import Objective
from nbgpu.recipes.microstructure.sample import micrograph
from nbgpu.recipes.microstructure.swaps import OPTIMIZERS as SWAPPING
from nbgpu.recipes.microstructure.swaps import at_random, swap

WEIGHTS = {"FFTCorrelations": 1.0, "Variation": 100.0}

ON_RANKS = """
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.objective import Objective

loss = Loss([target], {"FFTCorrelations": 1.0, "Variation": 100.0}, Measure(4))
found = Objective(loss, rank, world_size)(field)

from nbgpu.engine.workload.shards import Shards

shards = Shards(field.shape, rank, world_size)
of_parts, part = Objective(loss, rank, world_size).part(field, shards)
joined = shards.whole(part)
"""


@pytest.mark.parametrize("shape", [(1, 16, 16, 16), (2, 9, 11, 13), (1, 16, 16)])
def test_two_ranks_find_the_loss_and_gradient_of_one(cluster2: nbgpu.Cluster, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    measure = Measure(4)
    picture = (torch.rand(shape[0], 32, 32, generator=generator) < 0.4).double()
    target = characterize(picture, [*WEIGHTS], measure)
    field = torch.rand(*shape, generator=generator, dtype=torch.float64)
    loss, gradient = Objective(Loss([target], WEIGHTS, measure))(field)
    cluster2.push(field=field, target=target)
    cluster2.execute(ON_RANKS)
    on_first, on_second = cluster2.pull("found", ranks="all").values()
    assert torch.equal(on_first[0], on_second[0])
    assert torch.equal(on_first[1], on_second[1])
    torch.testing.assert_close(on_first[0], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(on_first[1], gradient, rtol=0, atol=1e-12 * float(gradient.abs().max()))
    # The same in parts, of which no rank has all.
    assert len({*cluster2.pull("of_parts", ranks="all").values()}) == 1
    for rank, part in cluster2.pull("part", ranks="all").items():
        assert len(part) == [-(-shape[1] // 2), shape[1] // 2][rank]
    for joined in cluster2.pull("joined", ranks="all").values():
        assert torch.equal(joined, on_first[1])
    assert cluster2.pull("of_parts", ranks=[0])[0] == pytest.approx(float(loss), rel=1e-12)


SWAPS_ON_RANKS = """
from nbgpu.recipes.microstructure.swaps import swap

told = []
swap(loss, field, range(8), lambda *news: told.append(news), temperature=0.5, seed=1, rank=rank, world_size=world_size)
some = Objective(loss, rank, world_size, num_drawn=3, seed=1)(field, step=5)
"""


def test_two_ranks_swap_and_draw_what_one_does(cluster2: nbgpu.Cluster) -> None:
    measure = Measure(4)
    target = characterize(indicated(micrograph((64, 64), 2.0, [0.35], seed=1), 1), [*WEIGHTS], measure)
    field = indicated(at_random(torch.tensor([0.65, 0.35]), (16, 16, 16), seed=0), 1)
    loss = Loss([target], WEIGHTS, measure)
    alone: list[tuple[torch.Tensor, float]] = []
    swap(loss, field, range(8), lambda *news: alone.append(news), temperature=0.5, seed=1)
    expected = Objective(loss, num_drawn=3, seed=1)(field, step=5)
    cluster2.push(field=field, target=target)
    cluster2.execute(ON_RANKS + SWAPS_ON_RANKS)
    for told in cluster2.pull("told", ranks="all").values():
        assert [value for _, value in told] == pytest.approx([value for _, value in alone], rel=1e-12)
        assert torch.equal(told[-1][0], alone[-1][0])
    for value, gradient in cluster2.pull("some", ranks="all").values():
        torch.testing.assert_close(value, expected[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, expected[1], rtol=0, atol=1e-12)


def _settings(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    small = {"limit_to": 4, "shape": (16, 16, 16), "tolerance": 0, "threads": 1, "runs_dir": str(tmp_path)}
    return small | {"descriptor_types": tuple(WEIGHTS), "descriptor_weights": (1.0, 1.0)} | settings


def _ended(run: Run, status: str = "finished") -> Run:
    run.wait()
    assert run.status == status, run.failures
    return run


def _losses(run: Run, rank: int = 0) -> list[float]:
    records, _ = run.reader.since()
    return [
        r.values["loss"] for r in records if isinstance(r, Sample) and r.rank == rank and "loss" in r.values
    ]


def _wait_for_steps(run: Run, num_steps: int) -> None:
    give_up_s = time.monotonic() + 300
    while len(_losses(run)) < num_steps:
        assert time.monotonic() < give_up_s, run.status
        time.sleep(0.02)


@pytest.mark.long
def test_a_run_finds_what_one_process_finds_and_leaves_files(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = _settings(
        tmp_path, steps=40, multigrid_reconstruction=True, val_every=20, best_metric="s2_error"
    )
    assert "looks for 16 x 16 x 16 voxels on 2 grids with lbfgs, in float64" in str(
        cluster2.plan("microstructure", **settings)
    )
    run = _ended(cluster2.train("microstructure", **settings))

    target = characterize(indicated(micrograph((128, 128), 2.0, [0.35], seed=0), 1), [*WEIGHTS], Measure(4))
    alone = reconstruct(
        Loss([target], {"FFTCorrelations": 1.0, "Variation": 1.0}, Measure(4)),
        (16, 16, 16),
        levels=5,
        num_steps=40,
        tolerance=0,
    )
    expected = [loss for losses in alone.losses for loss in losses]
    assert _losses(run) == _losses(run, rank=1)
    # It goes over no samples, and holds none out.
    assert not {"samples_per_s", "val_loss"} & {*run.metrics().columns}
    assert "val_s2_error" in run.metrics().columns
    assert _losses(run)[:10] == pytest.approx(expected[:10], rel=1e-9)
    assert len(_losses(run)) == 40

    result = run.result()
    assert result is not None
    found, at_random, sample = result["table"].values()
    assert found["s2_error"] < at_random["s2_error"] / 3
    assert found["volume_fraction_error"] <= 0.01 + 1 / 16**3
    for name in ("lineal_path_error", "chord_error_px", "cluster_error"):
        assert found[name] < at_random[name] / 2
        assert sample[name] < at_random[name] / 2
        assert name in result["note"]
    assert len(result["images"]) == 4
    records, _ = run.reader.since()
    shown = [r for r in records if isinstance(r, Event) and r.kind == "pictures"]
    assert [shown[0].step, shown[-1].step] == [20, 40]
    assert all(len(source) < 50_000 for source in shown[-1].detail["images"].values())
    phases = np.load(run.folder / "microstructure.npy")
    assert phases.shape == (16, 16, 16)
    assert set(np.unique(phases)) == {0, 1}
    assert (run.folder / "microstructure.vtk").stat().st_size > phases.size * 12
    assert (run.folder / "best.json").exists()

    # What was found and what it was found by can be taken up again.
    again = _settings(
        tmp_path,
        steps=3,
        data=str(run.folder / "descriptors.npz"),
        initial=str(run.folder / "microstructure.npy"),
    )
    assert _losses(_ended(cluster2.train("microstructure", **again)))[0] < expected[0]


def test_swaps_after_the_search_keep_each_phase_and_lower_the_loss(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    run = _ended(cluster2.train("microstructure", **_settings(tmp_path, steps=20, swap_steps=15)))
    losses = _losses(run)
    assert losses == _losses(run, rank=1)
    assert len(losses) == 35
    # The first swaps begin with whole phases, which are worth more or less than the shares before.
    assert losses[34] < losses[20]
    found = np.load(run.folder / "microstructure.npy")
    again = _settings(
        tmp_path,
        steps=4,
        optimizer_type="ytpost",
        initial=str(run.folder / "microstructure.npy"),
        data=str(run.folder / "descriptors.npz"),
    )
    # A tolerance means nothing to swaps.
    del again["tolerance"]
    more = _ended(cluster2.train("microstructure", **again))
    assert _losses(more)[-1] <= losses[-1]
    later = np.load(more.folder / "microstructure.npy")
    assert later.sum() == found.sum()
    assert (later != found).any()


def test_a_run_can_be_paused_steered_stopped_and_taken_up_again(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    settings = _settings(tmp_path, optimizer_type="adam", val_every=0)
    run = cluster2.train("microstructure", steps=1_000_000, **settings)
    _wait_for_steps(run, 5)
    run.pause()
    give_up_s = time.monotonic() + 300
    while run.status != "paused":
        assert time.monotonic() < give_up_s, run.status
        time.sleep(0.02)
    run.set(lr=0.002)
    run.resume()
    num_steps = len(_losses(run))
    _wait_for_steps(run, num_steps + 5)
    run.stop()
    _ended(run, "stopped")
    assert '"lr": 0.002' in (run.folder / "changes.jsonl").read_text()
    assert (run.folder / "microstructure.npy").exists()

    done = len(_losses(run))
    more = _ended(cluster2.train("microstructure", steps=done + 4, resume=str(run.folder), **settings))
    assert len(_losses(more)) == 4
    assert _losses(more)[0] < _losses(run)[0]


@pytest.mark.parametrize("several_grids", [False, True])
def test_a_search_goes_on_from_a_checkpoint_as_if_it_had_never_ended(
    cluster2: nbgpu.Cluster, tmp_path: Path, several_grids: bool
) -> None:
    settings = _settings(tmp_path, multigrid_reconstruction=several_grids, val_every=0, history_size=6)
    settings |= {"checkpoint_every": 18, "keep_checkpoints": 2}
    in_one_go = _ended(cluster2.train("microstructure", steps=30, **settings))
    checkpoint = in_one_go.folder / "checkpoints" / "step-00000018"
    with safetensors.safe_open(checkpoint / "optimizer.safetensors", framework="pt") as stored:
        names = [
            f"{kind}.{number:03d}"
            for kind in ("change", "step")
            for number in range(3 if several_grids else 6)
        ]
        assert sorted(stored.keys()) == names
        # Whole vectors, whatever the number of ranks.
        assert {tuple(stored.get_slice(name).get_shape()) for name in names} == {(16, 16 * 16)}
    again = _ended(cluster2.train("microstructure", steps=30, resume=str(checkpoint), **settings))
    assert _losses(again) == _losses(in_one_go)[18:]
    assert np.array_equal(np.load(again.folder / "field.npy"), np.load(in_one_go.folder / "field.npy"))


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_a_rank_that_dies_is_replaced_and_the_search_goes_on(
    cluster2: nbgpu.Cluster, tmp_path: Path, optimizer: str
) -> None:
    run = cluster2.train(
        "microstructure", steps=20_000, log_every=1, **_settings(tmp_path, optimizer_type=optimizer)
    )
    _wait_for_steps(run, 20)
    os.kill(cluster2.pids[1], signal.SIGKILL)
    give_up_s = time.monotonic() + 300
    while not any(isinstance(r, Event) and r.kind == "heal" for r in run.reader.since()[0]):
        assert time.monotonic() < give_up_s, run.status
        time.sleep(0.05)
    _wait_for_steps(run, len(_losses(run)) + 10)
    run.stop()
    _ended(run, "stopped")
    losses = _losses(run)
    assert losses[-1] < losses[10]


_KILLS_WHILE_IT_MEASURES = """
import os, signal, time
from nbgpu.recipes.microstructure.recipe import Microstructure

_measure, _pids = Microstructure.measure, [{pid}]

def _measured(self, tensor):
    if _pids:
        os.kill(_pids.pop(), signal.SIGKILL)
        time.sleep(600)
    return _measure(self, tensor)

if rank == 0:
    Microstructure.measure = _measured
"""


@pytest.mark.long
def test_a_validation_during_which_a_rank_dies_is_made_after_the_heal(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    cluster2.execute(_KILLS_WHILE_IT_MEASURES.format(pid=cluster2.pids[1]))
    run = _ended(cluster2.train("microstructure", steps=30, val_every=10, log_every=1, **_settings(tmp_path)))
    cluster2.execute("if rank == 0: Microstructure.measure = _measure", ranks=[0])
    records, _ = run.reader.since()
    assert any(isinstance(r, Event) and r.kind == "heal" for r in records)
    assert [r.step for r in records if isinstance(r, Sample) and "val_s2_error" in r.values] == [10, 20, 30]


@pytest.mark.requires_shared_data
def test_three_phases_of_a_real_picture_become_a_volume(
    cluster2: nbgpu.Cluster, tmp_path: Path, shared_data: Path
) -> None:
    data = shared_data / "microstructures" / "composite_resized.npy"
    settings = _settings(tmp_path, data=str(data), multiphase=True, steps=60, phase_sum_multiplier=10)
    run = _ended(cluster2.train("microstructure", **settings))
    result = run.result()
    assert result is not None
    found, at_random = result["table"].values()
    assert found["s2_error"] < at_random["s2_error"] / 2
    assert found["volume_fraction_error"] <= 1 / 16**3
    assert set(np.unique(np.load(run.folder / "microstructure.npy"))) == {0, 1, 2}


def test_bad_data_are_refused_on_all_ranks_with_the_file(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", np.eye(32) - 0.5)
    run = cluster2.train("microstructure", **_settings(tmp_path, data=str(tmp_path / "bad.npy"), shape=()))
    with pytest.raises(
        nbgpu.RankError, match=r"bad\.npy: holds floats from -0.5 to 0.5; they must be shares"
    ):
        run.wait()


def test_settings_that_mean_nothing_here_are_refused_with_the_reason() -> None:
    with pytest.raises(nbgpu.ConfigError, match=r"amp='bf16' means nothing .* it computes in float64"):
        train_config("microstructure", amp="bf16")
    with pytest.raises(nbgpu.ConfigError, match="GramMatrices need limit_to of at least 16"):
        train_config("microstructure", descriptor_types=("GramMatrices",), descriptor_weights=(), limit_to=8)
    measured_only = {name for name, d in DESCRIPTORS.items() if not d.differentiable}
    assert {*DESCRIPTORS} - measured_only == {*get_args(DescriptorType)}
    assert {*OPTIMIZERS, *SWAPPING} == {
        *get_args(MicrostructureConfig.model_fields["optimizer_type"].annotation)
    }


@pytest.mark.quality
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_default_run_is_as_near_as_another_sample_of_the_process(
    cluster2: nbgpu.Cluster, tmp_path: Path, seed: int
) -> None:
    """Nearer in what is minimised, and far from random voxels in what is not."""
    run = cluster2.train("microstructure", threads=1, runs_dir=str(tmp_path), seed=seed)
    result = _ended(run).result()
    assert result is not None
    quality.note("Microstructure, a volume of 32^3 voxels from a picture", "s2_error", seed, result["table"])
    found, at_random, sample = result["table"].values()
    assert found["volume_fraction_error"] <= 0.01 + 1 / 32**3
    assert found["s2_error"] <= 0.35 * sample["s2_error"]
    assert found["lineal_path_error"] <= at_random["lineal_path_error"] / 4
    assert found["chord_error_px"] <= at_random["chord_error_px"] / 4
    assert found["cluster_error"] <= at_random["cluster_error"] / 6
