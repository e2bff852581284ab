"""NaN and Inf in training: every rank decides the same at the same step, and the weights never have them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import faults
import pytest
from rows import Measured, row

import nbgpu
from nbgpu.client.runs.run import Run
from nbgpu.protocol.records import Event
from nbgpu.ui.run.snapshot import bundle

SETTINGS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 8,
    "schedule": "constant",
    "warmup_steps": 0,
    "val_every": 0,
    "ema_decay": 0.9,
    "adversarial_weight": 0.01,
    "adversarial_after": 0,
}
BAD_STEP = 4


@pytest.fixture(autouse=True)
def ranks_are_well_afterwards(cluster2: nbgpu.Cluster) -> Any:
    cluster2.execute("kept = 3 + rank")
    yield
    told = cluster2.execute(
        f"{faults.MEND}\ntotal = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
    )
    assert told == {0: "2 3\n", 1: "2 4\n"}


@pytest.fixture(scope="module")
def before_the_bad_step(
    cluster2: nbgpu.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The state of a run that was never hurt and ended one step before the others' bad one."""
    runs_dir = tmp_path_factory.mktemp("sound")
    settings = {**SETTINGS, "steps": BAD_STEP - 1, "runs_dir": str(runs_dir)}
    return state(cluster2.train("autoencoder", **settings).wait(400))


def state(run: Run) -> dict[str, bytes]:
    """Weights, their average, the optimizer's state and the discriminator of a run's newest checkpoint."""
    return {path.name: path.read_bytes() for path in run.checkpoint().glob("*.safetensors")}


def events(run: Run, kind: str) -> list[Event]:
    return [r for r in run.reader.since()[0] if isinstance(r, Event) and r.kind == kind]


@row(
    "{bad}: one rank, one step of a run",
    "both ranks stop at that step, which is named with its rank; weights and optimizer are those of the step before",
    bound_s=1,
)
@pytest.mark.parametrize(
    ("bad", "rank", "cause"),
    [
        ("nan_loss", 1, "loss is nan on rank 1 at step 4"),
        ("nan_input", 0, "its batch holds NaN or Inf in: image) at step 4"),
        ("inf_gradient", 1, "the norm of the gradient is nan at step 4"),
    ],
    ids=["loss", "input", "gradient"],
)
def test_a_bad_number_stops_the_run(
    cluster2: nbgpu.Cluster,
    before_the_bad_step: dict[str, bytes],
    measured: Measured,
    tmp_path: Path,
    bad: faults.BadNumber,
    rank: int,
    cause: str,
) -> None:
    cluster2.execute(faults.in_training(rank, step=BAD_STEP, action=bad))
    run = cluster2.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path))
    with pytest.raises(nbgpu.RankError) as caught:
        run.wait(400)
    measured.ended(str(caught.value))
    advice = "Look at the data" if "its batch holds" in cause else "Lower lr"
    assert f"{cause}; weights are those of step 3. {advice}" in str(caught.value)
    assert "on_nonfinite='skip'" in str(caught.value)
    # Every rank says the same; one that is slow to say so counts as freed by the other.
    assert len({(f.error_type, f.message) for f in caught.value.failures}) == 1
    assert run.checkpoint().name == "step-00000003"
    assert state(run) == before_the_bad_step
    # The step that was under way when the news came counts on no rank.
    assert run.metrics().groupby("rank")["step"].max().tolist() == [4, 4]
    assert all(cause in event.text for event in events(run, "failure"))


def test_bad_input_of_a_later_micro_batch_is_blamed_on_the_data(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    # The injection counts micro-batches: the fourth is the second one of step 2.
    cluster2.execute(faults.in_training(0, step=4, action="nan_input"))
    run = cluster2.train("autoencoder", **{**SETTINGS, "accumulate": 2, "runs_dir": str(tmp_path)})
    with pytest.raises(
        nbgpu.RankError, match=r"its batch holds NaN or Inf in: image\) at step 2.*Look at the data"
    ):
        run.wait(400)


@pytest.mark.long
def test_a_step_that_is_left_out_changes_nothing_and_the_run_goes_on(
    cluster2: nbgpu.Cluster, before_the_bad_step: dict[str, bytes], tmp_path: Path
) -> None:
    skip = {**SETTINGS, "on_nonfinite": "skip", "runs_dir": str(tmp_path)}
    cluster2.execute(faults.in_training(1, step=BAD_STEP, action="nan_loss"))
    run = cluster2.train("autoencoder", **{**skip, "steps": BAD_STEP}).wait(400)
    assert run.checkpoint().name == "step-00000004"
    assert state(run) == before_the_bad_step
    cluster2.execute(f"{faults.MEND}\n{faults.in_training(1, step=BAD_STEP, action='nan_loss')}")
    run = cluster2.train("autoencoder", **skip).wait(400)
    frame = run.metrics().dropna(subset=["lr"]).set_index(["rank", "step"])["loss"]
    assert [step for (rank, step), loss in frame.items() if not math.isfinite(loss)] == [4]
    assert frame[(1, 8)] < frame[(1, 1)]
    (event,) = events(run, "nonfinite")
    assert (event.rank, event.step) == (1, 4)
    assert event.text == "loss is nan on rank 1 at step 4, which was left out (1 of at most 10 in a row)"
    # What stays in the notebook shows the mark, and JSON has no NaN.
    figure = json.dumps(bundle(run)["application/vnd.plotly.v1+json"], allow_nan=False)
    assert f"nonfinite: {event.text}" in figure


def test_compressed_gradients_are_sound_again_after_a_step_that_was_left_out(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    # PowerSGD compresses from its tenth step on.
    settings = {**SETTINGS, "comm_hook": "powersgd", "on_nonfinite": "skip", "steps": 18, "ema_decay": 0.0}
    cluster2.execute(faults.in_training(1, step=14, action="nan_loss"))
    run = cluster2.train("autoencoder", **settings, runs_dir=str(tmp_path)).wait(400)
    assert [event.step for event in events(run, "nonfinite")] == [14]
    norms = run.metrics().dropna(subset=["grad_norm"]).query("step > 14")["grad_norm"]
    assert len(norms) == 2 * 4
    assert norms.map(math.isfinite).all()


def test_too_many_in_a_row_stop_the_run(
    cluster2: nbgpu.Cluster, before_the_bad_step: dict[str, bytes], tmp_path: Path
) -> None:
    cluster2.execute(faults.in_training(0, step=BAD_STEP, action="nan_loss", num_times=5))
    settings = {**SETTINGS, "on_nonfinite": "skip", "max_nonfinite_skips": 2, "runs_dir": str(tmp_path)}
    run = cluster2.train("autoencoder", **settings)
    words = (
        "loss is nan on rank 0 at step 6, and no step since step 3 was better; weights are those of step 3"
    )
    with pytest.raises(nbgpu.RankError, match=words):
        run.wait(400)
    assert [event.step for event in events(run, "nonfinite")] == [4, 5]
    assert state(run) == before_the_bad_step


def test_one_bad_micro_batch_spoils_its_step(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    settings = {**SETTINGS, "accumulate": 3, "runs_dir": str(tmp_path)}
    sound = cluster2.train("autoencoder", **{**settings, "steps": 1}).wait(400)
    cluster2.execute(faults.in_training(1, step=3 + 2, action="nan_loss"))
    run = cluster2.train("autoencoder", **settings)
    with pytest.raises(nbgpu.RankError, match="loss is nan on rank 1 at step 2; weights are those of step 1"):
        run.wait(400)
    assert state(run) == state(sound)


def test_a_discriminators_bad_loss_stops_the_run_as_the_models_does(
    cluster2: nbgpu.Cluster, before_the_bad_step: dict[str, bytes], tmp_path: Path
) -> None:
    cluster2.execute(
        f"""
from nbgpu.recipes.autoencoder.recipe import Autoencoder
good = Autoencoder.discriminator_loss
calls = []
def faulty(self, discriminator, seen):
    calls.append(1)
    return good(self, discriminator, seen) + (float("nan") if rank == 1 and len(calls) == {BAD_STEP} else 0)
Autoencoder.discriminator_loss = faulty
"""
    )
    run = cluster2.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path))
    try:
        words = "discriminator_loss is nan on rank 1 at step 4; weights are those of step 3"
        with pytest.raises(nbgpu.RankError, match=words):
            run.wait(400)
        assert state(run) == before_the_bad_step
    finally:
        cluster2.execute("Autoencoder.discriminator_loss = good")


def test_without_telemetry_too(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.execute(faults.in_training(1, step=BAD_STEP, action="nan_loss"))
    run = cluster2.train("autoencoder", **SETTINGS, telemetry=False, runs_dir=str(tmp_path))
    with pytest.raises(nbgpu.RankError, match="loss is nan on rank 1 at step 4; weights are those of step 3"):
        run.wait(400)


def test_the_search_for_a_loss_scale_is_no_failure_and_its_collapse_is(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    # Small, because a CPU has no fp16 arithmetic of its own.
    fp16 = {**SETTINGS, "amp": "fp16", "patch_size": 8, "batch_size": 1, "runs_dir": str(tmp_path)}
    # A discriminator has to search, too, and its first steps would be left out.
    del fp16["adversarial_weight"], fp16["adversarial_after"]
    cluster2.execute(faults.in_training(1, step=2, action="inf_gradient", num_times=3))
    assert cluster2.train("autoencoder", **fp16).wait(400).status == "finished"
    cluster2.execute(f"{faults.MEND}\n{faults.in_training(1, step=2, action='inf_gradient', num_times=1000)}")
    run = cluster2.train("autoencoder", **{**fp16, "steps": 1000})
    with pytest.raises(nbgpu.RankError, match=r"overflows fp16 at step \d+ .* weights are those of step 1\."):
        run.wait(400)
    cluster2.execute(f"{faults.MEND}\n{faults.in_training(1, step=3, action='nan_loss')}")
    run = cluster2.train("autoencoder", **fp16)
    with pytest.raises(nbgpu.RankError, match="loss is nan on rank 1 at step 3"):
        run.wait(400)
