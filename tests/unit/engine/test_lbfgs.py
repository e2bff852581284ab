"""L-BFGS whose vectors are spread over the ranks: against scipy's, its memory, and its state."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from warm_start import on_ranks

from nbgpu.engine.group import group
from nbgpu.engine.group.group import Membership
from nbgpu.engine.memory.trace import trace_memory
from nbgpu.engine.workload.descent import descend
from nbgpu.engine.workload.lbfgs import Lbfgs, Trial, held_bytes, strong_wolfe
from nbgpu.engine.workload.shards import Shards
from nbgpu.errors import RunError
from nbgpu.recipes.microstructure.characterize import characterize
from nbgpu.recipes.microstructure.grids import indicated
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.objective import Objective
from nbgpu.recipes.microstructure.sample import micrograph

CPU = torch.device("cpu")


def _valley(x: Tensor) -> tuple[Tensor, Tensor]:
    """A convex function whose lowest point is out of bounds for many numbers, and which ties them to one
    another and bends them differently: 1 to 100."""
    flat = x.reshape(-1).clone().requires_grad_()
    places = torch.arange(flat.numel(), dtype=torch.float64)
    goals, stiffness = 0.5 + 0.9 * torch.sin(7 * places), 10 ** (1 + torch.cos(3 * places))
    with torch.enable_grad():
        rise = flat[1:] - flat[:-1]
        loss = (stiffness * (flat - goals).square()).sum() + (rise.square() + 3 * rise**4).sum()
    (gradient,) = torch.autograd.grad(loss, flat)
    return loss.detach(), gradient.view(x.shape)


def _start(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("num_pairs", [3, 10])
def test_it_ends_where_scipys_does(seed: int, num_pairs: int) -> None:
    found: dict[str, Tensor] = {}
    for optimizer in ("lbfgs", "lbfgsb"):

        def note(x: Tensor, loss: float, optimizer: str = optimizer) -> None:
            assert 0 <= float(x.min()) <= float(x.max()) <= 1
            found[optimizer] = x

        descend(
            _valley,
            _start(4, 25, seed=seed),
            2000,
            note,
            optimizer=optimizer,
            num_pairs=num_pairs,
            tolerance=1e-14,
        )
    losses = [float(_valley(x)[0]) for x in found.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    torch.testing.assert_close(found["lbfgs"], found["lbfgsb"], rtol=0, atol=1e-4)
    # Many numbers end at a bound, and many do not: otherwise nothing would have been tried.
    assert 20 < int(((found["lbfgs"] == 0) | (found["lbfgs"] == 1)).sum()) < 80


def test_a_start_out_of_bounds_is_brought_within() -> None:
    told: list[Tensor] = []
    descend(_valley, _start(2, 8, seed=0) * 4 - 2, 3, lambda x, _: told.append(x), optimizer="lbfgs")
    assert all(0 <= float(x.min()) <= float(x.max()) <= 1 for x in told)


def test_at_a_corner_with_the_gradient_outwards_nothing_is_left_to_do() -> None:
    corner = torch.ones(2, 3, dtype=torch.float64)
    told: list[float] = []
    ended = descend(lambda x: (-x.sum(), -torch.ones_like(x)), corner, 5, lambda _, loss: told.append(loss))
    assert "within its bounds" in ended
    assert not told


def test_a_gradient_that_lies_ends_the_search() -> None:
    ended = descend(
        lambda x: (x.sum(), -torch.ones_like(x)),
        torch.full((2, 2), 0.5, dtype=torch.float64),
        5,
        lambda *_: None,
    )
    assert ended == "no step along the gradient gives a lower loss"


@pytest.mark.parametrize(
    ("optimizer", "advice"), [("lbfgs", "try other start"), ("adam", "try a smaller lr")]
)
def test_what_is_not_finite_is_said_with_a_way_out(optimizer: str, advice: str) -> None:
    def search(loss: float, slope: float) -> None:
        evaluate = lambda x: (torch.tensor(loss), torch.full_like(x, slope))  # noqa: E731
        descend(evaluate, torch.ones(2, 2).double(), 3, lambda *_: None, optimizer=optimizer)

    with pytest.raises(RunError, match=rf"the loss is nan and the norm of its gradient 2\.0.*{advice}"):
        search(math.nan, 1.0)
    with pytest.raises(RunError, match=rf"the loss is 3\.0 and the norm of its gradient nan.*{advice}"):
        search(3.0, math.nan)


@pytest.mark.parametrize(
    ("loss", "slope", "longest"),
    [
        (lambda t: (t - 0.01) ** 2, lambda t: 2 * (t - 0.01), 1.0),
        (lambda t: (t - 30) ** 2, lambda t: 2 * (t - 30), 100.0),
        (lambda t: (t - 30) ** 2, lambda t: 2 * (t - 30), 2.0),
        (lambda t: math.cos(t + 0.5), lambda t: -math.sin(t + 0.5), 9.0),
    ],
)
def test_a_line_search_meets_the_strong_wolfe_conditions(
    loss: Callable[[float], float], slope: Callable[[float], float], longest: float
) -> None:
    tried: list[Trial] = []

    def try_step(step: float) -> Trial:
        tried.append(Trial(step, loss(step), slope(step)))
        return tried[-1]

    begin = Trial(0.0, loss(0.0), slope(0.0))
    found = strong_wolfe(try_step, begin, longest)
    assert found is tried[-1]
    assert 0 < found.step <= longest
    assert found.loss <= begin.loss + 1e-3 * found.step * begin.slope
    assert abs(found.slope) <= 0.9 * abs(begin.slope) or found.step == longest


def test_a_line_without_a_lower_point_gives_none() -> None:
    assert strong_wolfe(lambda t: Trial(t, t, 1.0), Trial(0.0, 0.0, -1.0), 1.0) is None


# ---- on several ranks ----

SHAPE = (2, 7, 5, 3)
"""Seven slices, which no number of ranks but one divides."""
SHAPE_OF_LARGE = (1, 12, 192, 192)
NUM_PAIRS_OF_LARGE = 6
BEFORE, AFTER = 12, 9


def _parts(shards: Shards) -> Callable[[Tensor], tuple[float, Tensor]]:
    def evaluate(whole: Tensor) -> tuple[float, Tensor]:
        loss, gradient = _valley(whole)
        return float(loss), shards.part(gradient)

    return evaluate


def _bowl(shards: Shards) -> Callable[[Tensor], tuple[float, Tensor]]:
    """A loss that takes no memory beside the whole tensor and the part of the gradient."""

    def evaluate(whole: Tensor) -> tuple[float, Tensor]:
        gradient = shards.part(whole)
        factors = torch.linspace(1, 90, shards.num_in_slice, dtype=torch.float64)
        for some in shards.pieces():
            gradient[some] = (gradient[some] - 0.4) * factors
        return float(shards.sums((gradient.square() / factors).sum(dim=1, keepdim=True))[0]) / 2, gradient

    return evaluate


def _continued(shards: Shards) -> dict[str, Any]:
    """Search in one go, and in two with the state between them, as a checkpoint has it: whole tensors."""
    evaluate = _parts(shards)
    steps: list[tuple[Tensor, float]] = []
    search = Lbfgs(shards, 4, CPU)
    start = _start(*SHAPE, seed=5)
    search.minimise(evaluate, start, BEFORE, lambda *step: steps.append(step), 0)
    parts, about = search.state()
    stored = {name: shards.whole(part.contiguous()).movedim(1, 0).flatten(1) for name, part in parts.items()}
    search.minimise(evaluate, steps[-1][0], AFTER, lambda *step: steps.append(step), 0)
    again = Lbfgs(shards, 4, CPU)
    again.load_state(stored.__getitem__, about)
    resumed: list[tuple[Tensor, float]] = []
    again.minimise(evaluate, steps[BEFORE - 1][0], AFTER, lambda *step: resumed.append(step), 0)
    whole: list[tuple[Tensor, float]] = []
    Lbfgs(shards, 4, CPU).minimise(evaluate, start, BEFORE + AFTER, lambda *step: whole.append(step), 0)
    return {"in one go": whole, "in two": steps, "resumed": resumed}


def _peak(shards: Shards) -> int:
    """The bytes that the tensors of a search take at most, with all of its pairs in use."""
    start = _start(*SHAPE_OF_LARGE, seed=1)
    with trace_memory(CPU) as trace:
        search = Lbfgs(shards, NUM_PAIRS_OF_LARGE, CPU)
        held: list[Tensor] = []

        def keep(whole: Tensor, loss: float) -> None:
            # As a run does, which has the newest tensor.
            held[:] = [whole]

        search.minimise(_bowl(shards), start, NUM_PAIRS_OF_LARGE + 1, keep, 0)
    return trace.log.peak_bytes


def _microstructure(shape: tuple[int, ...], rank: int, world_size: int) -> list[tuple[Tensor, float]]:
    """Search for a field with the statistics of a picture, as a run does."""
    names = ("FFTCorrelations", "Variation")
    picture = indicated(micrograph((32, 32), 2.0, [0.35] if shape[0] == 1 else [0.3, 0.3], seed=3), shape[0])
    target = characterize(picture, names, Measure(4))
    objective = Objective(Loss([target], dict.fromkeys(names, 1.0), Measure(4)), rank, world_size)
    shards = Shards(shape, rank, world_size)
    steps: list[tuple[Tensor, float]] = []
    Lbfgs(shards, 5, CPU).minimise(
        lambda field: objective.part(field, shards),
        _start(*shape, seed=2),
        15,
        lambda *step: steps.append(step),
        0,
    )
    return steps


def _found(rank: int, world_size: int) -> dict[str, Any]:
    return _continued(Shards(SHAPE, rank, world_size)) | {
        "volume": _microstructure((1, 10, 11, 9), rank, world_size),
        "phases": _microstructure((3, 8, 9, 10), rank, world_size),
        "picture": _microstructure((1, 10, 13), rank, world_size),
        "peak": _peak(Shards(SHAPE_OF_LARGE, rank, world_size)),
    }


def _on_a_rank(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", world_size)  # type: ignore[attr-defined]
    group.form(Membership(rank, world_size, rank, CPU, "gloo"), store)
    found = _found(rank, world_size)
    torch.save(found, Path(folder, f"{world_size}-{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank has found, by the number of ranks."""
    found: dict[int, list[dict[str, Any]]] = {}
    for world_size in (1, 2, 3):
        folder = tmp_path_factory.mktemp(f"ranks-{world_size}")
        on_ranks(_on_a_rank, world_size, str(folder))
        found[world_size] = [torch.load(folder / f"{world_size}-{rank}.pt") for rank in range(world_size)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", ["in one go", "volume", "phases", "picture"])
def test_ranks_take_the_steps_of_one(
    by_ranks: dict[int, list[dict[str, Any]]], num_ranks: int, kind: str
) -> None:
    expected = by_ranks[1][0][kind]
    assert len(expected) == (BEFORE + AFTER if kind == "in one go" else 15)
    assert expected[-1][1] < expected[0][1] / 2
    first = by_ranks[num_ranks][0][kind]
    for found in by_ranks[num_ranks]:
        for (tensor, loss), (of_first, loss_of_first) in zip(found[kind], first, strict=True):
            assert torch.equal(tensor, of_first)
            assert loss == loss_of_first
    for (tensor, loss), (of_one, loss_of_one) in zip(first, expected, strict=True):
        torch.testing.assert_close(tensor, of_one, rtol=0, atol=1e-10)
        assert loss == pytest.approx(loss_of_one, rel=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_search_continues_from_its_state_to_the_last_bit(
    by_ranks: dict[int, list[dict[str, Any]]], num_ranks: int
) -> None:
    for found in by_ranks[num_ranks]:
        in_one_go = found["in one go"]
        for kind, expected in (("in two", in_one_go), ("resumed", in_one_go[BEFORE:])):
            for (tensor, loss), (wanted, wanted_loss) in zip(found[kind], expected, strict=True):
                assert torch.equal(tensor, wanted), kind
                assert loss == wanted_loss


def test_what_a_rank_holds_falls_with_the_number_of_ranks(
    by_ranks: dict[int, list[dict[str, Any]]],
) -> None:
    """Two whole fields, and a share of the pairs and of some more vectors, to a fifth."""
    peaks = {}
    for num_ranks, found in by_ranks.items():
        promised = held_bytes(SHAPE_OF_LARGE, NUM_PAIRS_OF_LARGE, num_ranks).total_bytes
        peaks[num_ranks] = max(of_rank["peak"] for of_rank in found)
        assert 0.8 * promised <= peaks[num_ranks] <= promised
    pairs_bytes = 2 * NUM_PAIRS_OF_LARGE * 8 * math.prod(SHAPE_OF_LARGE)
    assert peaks[1] - peaks[2] >= pairs_bytes / 2
    assert peaks[2] - peaks[3] >= pairs_bytes / 6
