"""A step of the search for a microstructure, with L-BFGS spread over the ranks and with scipy's on each of
them: `python tests/bench searches`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

EDGE, LIMIT_TO, NUM_PAIRS = 64, 16, 10
NUM_STEPS = 24


def measure(table: Callable[..., str], ratio: Callable[..., str]) -> str:
    from torch import multiprocessing

    seconds, grown = [], []
    by_optimizer: dict[tuple[str, int], list[float]] = {}
    for num_ranks in (1, 2):
        for optimizer in ("lbfgs", "lbfgsb"):
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.start_processes(
                    _search_on_a_rank, (num_ranks, optimizer, folder), nprocs=num_ranks, start_method="spawn"
                )
                found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]
            name = f"`{optimizer}`, {'one rank' if num_ranks == 1 else f'each of {num_ranks}'}"
            steps = [1000 * step_s for of_rank in found for step_s in of_rank["steps_s"]]
            seconds.append((name, steps))
            grown.append((name, [of_rank["grown_bytes"] / 1e6 for of_rank in found]))
            by_optimizer[optimizer, num_ranks] = steps
    told = (
        f"{EDGE} x {EDGE} x {EDGE} voxels, the default descriptors, `limit_to={LIMIT_TO}`, `history_size={NUM_PAIRS}`. "
        "Processor time of a step of one rank once all pairs are in use, and by how much its process grew.\n\n"
    )
    ratios = [
        ratio(f"lbfgs / lbfgsb, {n} ranks", by_optimizer["lbfgs", n], by_optimizer["lbfgsb", n])
        for n in (1, 2)
    ]
    return told + table("ms", seconds) + table("MB", grown) + "".join(ratios)


def _search_on_a_rank(rank: int, num_ranks: int, optimizer: str, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from nbgpu.config import train_config
    from nbgpu.engine.group import group
    from nbgpu.engine.group.group import Membership
    from nbgpu.engine.memory import usage
    from nbgpu.engine.workload.lbfgs import Lbfgs
    from nbgpu.engine.workload.shards import Shards
    from nbgpu.recipes.microstructure.recipe import Microstructure

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", num_ranks)  # type: ignore[attr-defined]
    group.form(Membership(rank, num_ranks, rank, torch.device("cpu"), "gloo"), store)
    config = train_config(
        "microstructure",
        shape=(EDGE, EDGE, EDGE),
        limit_to=LIMIT_TO,
        optimizer_type=optimizer,
        history_size=NUM_PAIRS,
        tolerance=0,
    )
    problem = Microstructure(config)
    problem.load()
    field = problem.begin(0, None)
    # The first evaluation loads what later ones need.
    problem.evaluate(field[:, :32, :32, :32].contiguous(), 0, 0, 0, 1)
    device = torch.device("cpu")
    usage.begin_peak(device)
    before_bytes = usage.Usage.of(device).used_bytes
    ends_s: list[float] = []
    newest = [field]

    def after_step(found: torch.Tensor, _: float) -> None:
        newest[0] = found
        ends_s.append(time.process_time())

    if problem.is_spread(0):
        shards = Shards(field.shape, rank, num_ranks)
        Lbfgs(shards, NUM_PAIRS, field.device).minimise(
            lambda whole: problem.evaluate_part(whole, 0, 0, shards), field, NUM_STEPS, after_step, 0
        )
    else:
        problem.search(
            field,
            0,
            range(NUM_STEPS),
            lambda whole: problem.evaluate(whole, 0, 0, rank, num_ranks),
            after_step,
            lambda: 0.0,
            rank,
            num_ranks,
        )
    peak_bytes = usage.peak_bytes(device)
    steps_s = [
        end_s - begin_s for begin_s, end_s in zip(ends_s[NUM_PAIRS:], ends_s[NUM_PAIRS + 1 :], strict=False)
    ]
    Path(folder, f"{rank}.json").write_text(
        json.dumps({"steps_s": steps_s, "grown_bytes": peak_bytes - before_bytes})
    )
    dist.destroy_process_group()
