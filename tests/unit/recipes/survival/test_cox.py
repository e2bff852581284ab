"""Cox's partial likelihood against closed cases, other libraries, and itself on several ranks."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from warm_start import on_ranks

from nbgpu.engine.group import group
from nbgpu.engine.group.group import Membership
from nbgpu.recipes.survival.cox import Ties, cox_loss, gathered

NUM_SAMPLES = 40


def _cohort(num_samples: int = NUM_SAMPLES, num_times: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(covariates, scores, times with ties, events)."""
    generator = torch.Generator().manual_seed(3)
    covariates = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    scores = covariates.sum(dim=1)
    times = torch.randint(1, num_times + 1, (num_samples,), generator=generator)
    events = torch.rand(num_samples, generator=generator) < 0.6
    return covariates, scores, times, events


def test_three_samples_by_hand() -> None:
    scores, times = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64), torch.tensor([2.0, 1.0, 3.0])
    a, b, c = scores.exp().tolist()
    # The second is first, then the first; the third is never seen to have its event.
    expected = -(math.log(b / (a + b + c)) + math.log(a / (a + c))) / 2
    for ties in ("breslow", "efron"):
        found = cox_loss(scores, times, torch.tensor([1, 1, 0]), ties)
        assert found.item() == pytest.approx(expected, abs=1e-14)


def test_ties_by_hand() -> None:
    scores, times = torch.tensor([0.5, -1.0, 0.2, 2.0], dtype=torch.float64), torch.tensor([1, 1, 1, 2])
    events = torch.tensor([True, True, False, True])
    a, b, c, d = scores.exp().tolist()
    at_risk = a + b + c + d
    breslow = -(math.log(a * b / at_risk**2)) / 3
    efron = -math.log(a * b / (at_risk * (at_risk - (a + b) / 2))) / 3
    for order in permutations(range(4)):
        shuffled = [values[list(order)] for values in (scores, times, events)]
        assert cox_loss(*shuffled, "breslow").item() == pytest.approx(breslow, abs=1e-14)
        assert cox_loss(*shuffled, "efron").item() == pytest.approx(efron, abs=1e-14)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_with_no_event_loss_and_gradient_are_zero(ties: Ties) -> None:
    scores = torch.randn(6, requires_grad=True)
    loss = cox_loss(scores, torch.arange(6), torch.zeros(6), ties)
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert not scores.grad.any()


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_the_gradient_is_that_of_the_loss(ties: Ties) -> None:
    _, scores, times, events = _cohort(12, 5)
    assert torch.autograd.gradcheck(lambda s: cox_loss(s, times, events, ties), (scores.requires_grad_(),))


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_large_scores_stay_finite(ties: Ties) -> None:
    _, scores, times, events = _cohort()
    large = (scores * 1000).requires_grad_()
    loss = cox_loss(large, times, events, ties)
    loss.backward()
    assert loss.isfinite()
    assert large.grad is not None
    assert large.grad.isfinite().all()
    half = torch.zeros(NUM_SAMPLES, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cox_loss(half, times, events, ties).dtype == torch.float64


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_nothing_but_shapes_is_needed(ties: Ties) -> None:
    """What a step takes of the memory is worked out on the device meta."""
    scores = torch.empty(8, device="meta", requires_grad=True)
    loss = cox_loss(
        scores, torch.empty(8, dtype=torch.int64, device="meta"), torch.empty(8, device="meta"), ties
    )
    loss.backward()
    assert loss.is_meta


@pytest.mark.filterwarnings("ignore:Ties in `time` detected:UserWarning")
@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_torchsurv_gives_the_same(ties: Ties) -> None:
    cox = pytest.importorskip("torchsurv.loss.cox")
    _, scores, times, events = _cohort()
    theirs = cox.neg_partial_log_likelihood(scores, events, times.float(), ties_method=ties, reduction="sum")
    found = cox_loss(scores, times, events, ties).item() * int(events.sum())
    assert found == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:lifelines", "ignore:Starting with pandas version 4")
def test_lifelines_gives_the_same() -> None:
    """Its fit is where the gradient is zero, and its log-likelihood (Efron) is that of all events
    together."""
    lifelines = pytest.importorskip("lifelines")
    pandas = pytest.importorskip("pandas")
    covariates, _, times, events = _cohort()
    table = pandas.DataFrame(covariates.numpy(), columns=list("abcde"))
    table["time"], table["event"] = times.numpy(), events.numpy()
    fit = lifelines.CoxPHFitter().fit(table, "time", "event", fit_options={"precision": 1e-12})
    weights = torch.tensor(fit.params_.to_numpy(), requires_grad=True)
    loss = cox_loss(covariates @ weights, times, events, "efron")
    loss.backward()
    assert -loss.item() * int(events.sum()) == pytest.approx(fit.log_likelihood_, abs=1e-9)
    assert weights.grad is not None
    assert weights.grad.abs().max() < 1e-8


def _on_a_rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", world_size)  # type: ignore[attr-defined]
    group.form(Membership(rank, world_size, rank, torch.device("cpu"), "gloo"), store)
    covariates, _, times, events = _cohort()
    own = slice(rank * NUM_SAMPLES // world_size, (rank + 1) * NUM_SAMPLES // world_size)
    found = {}
    for ties in ("breslow", "efron"):
        network = _network()
        # Kept: gradients are exchanged for as long as this object lives.
        replica = DistributedDataParallel(network)
        scores = replica(covariates[own]).flatten()
        loss = cox_loss(*gathered(scores, times[own], events[own]), ties)
        loss.backward()
        found[ties] = (loss.detach(), [parameter.grad for parameter in network.parameters()])
    torch.save(found, Path(folder, f"{world_size}-{rank}.pt"))
    # Where a replica is the last to have the group, that ends without giving way to its own threads (torch
    # 2.13), and now and then waits for one that waits for it.
    del replica
    dist.destroy_process_group()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_have_the_loss_and_the_gradient_of_one(world_size: int, tmp_path: Path) -> None:
    on_ranks(_on_a_rank, world_size, str(tmp_path))
    covariates, _, times, events = _cohort()
    for ties in ("breslow", "efron"):
        network = _network()
        loss = cox_loss(network(covariates).flatten(), times, events, ties)
        loss.backward()
        expected = [parameter.grad for parameter in network.parameters()]
        largest = max(float(g.abs().max()) for g in expected if g is not None)
        for rank in range(world_size):
            their_loss, gradients = torch.load(tmp_path / f"{world_size}-{rank}.pt")[ties]
            torch.testing.assert_close(their_loss, loss.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10 * largest)
