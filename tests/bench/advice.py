"""What the advice of `run.explain` promises, beside what it brings, on runs whose bottleneck was made."""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from made_runs import CASES, RECIPE, STEPS, Case

import nbgpu
from nbgpu.performance.study_results import PointSummary

_BOUND_S = 600


def advice() -> str:
    """What an advice promises, and what it brings"""
    rows = [
        "| made | bound by | advice | promised | brought | 95 % | promised by brought | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as clusters:
        recipe = Path(place) / "made.py"
        recipe.write_text(RECIPE)
        by_link: dict[str, nbgpu.Cluster] = {}
        for case in CASES:
            if case.link not in by_link:
                made = by_link[case.link] = nbgpu.Cluster(gpus="none", ranks=2, link=case.link)
                made.parts.lifecycle.start()
                clusters.callback(made.stop)
            rows.append(_row(case, by_link[case.link], str(recipe), place, errors))
    return "\n".join(rows) + (
        f"\n\nOf {len(errors)} the promise is off by {statistics.median(errors):.1f} % (median) and {max(errors):.1f} % "
        "(worst) (aim: 20 %).\n\n"
    )


def _row(case: Case, cluster: nbgpu.Cluster, recipe: str, place: str, errors: list[float]) -> str:
    made = case.name + (f", {case.link}" if case.link else "")
    run = cluster.train(recipe, runs_dir=place, **STEPS, **case.settings).wait()
    told = run.explain()
    if not any(each.settings for each in told.advice):
        named = told.advice[0].text.split(",")[0] if told.advice else "none"
        return f"| {made} | {told.change_first} | {named} | | | | | |"
    study = nbgpu.try_advice(run, studies_dir=place, repeats=2).wait(_BOUND_S)
    found = study.summary()[1]
    assert isinstance(found, PointSummary), str(study)
    off = 100 * (study.plan.promised / found.relative - 1)
    errors.append(abs(off))
    low, high = found.relative_between
    return (
        f"| {made} | {told.change_first} | {study.plan.vary}={study.plan.values[1]} in place of {study.plan.values[0]} | "
        f"x{study.plan.promised:.2f} | x{found.relative:.2f} | {low:.2f} to {high:.2f} | {off:+.1f} % | "
        f"{os.getloadavg()[0]:.1f} |"
    )
