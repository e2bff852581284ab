"""A study of a user's own training loop: a cell's function `step`, timed with several numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nbgpu.client import presenting
from nbgpu.client.cluster.cluster import Cluster
from nbgpu.client.engines.calls import reference
from nbgpu.client.scaling import study_table
from nbgpu.errors import ConfigError, RankError
from nbgpu.performance.study_results import Gap, Measured, PointSummary, summarise
from nbgpu.planning import studies
from nbgpu.planning.studies import RANKS, Mode, StudyConfig, StudyPlan
from nbgpu.protocol.calls import Call

if TYPE_CHECKING:
    import pandas as pd


class CellStudy:
    """The times of a cell's `step()` by number of ranks. Prints as a table.

    Args:
        plan: the numbers of ranks, the repeats and the mode.
    """

    def __init__(self, plan: StudyPlan) -> None:
        """Make a study without measurements, which prints as an empty table."""
        self.plan = plan
        self.folder = None
        """None, because a cell's study is not saved."""
        self._measured: list[Measured] = []
        self._samples: dict[int, float] = {}
        """The samples, or units of work, of all ranks in one step, by number of ranks."""
        self.now = ""
        """The repeat that is measured now, such as 'ranks = 2, repeat 1 of 3'; empty at the end."""

    def __str__(self) -> str:
        summary = self.summary()
        table = study_table.lines(self.plan, summary)
        return "\n".join(
            [self.describe(), *table, *study_table.law_lines(self.plan, self._measured, summary)]
        )

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        views = presenting.cell_presenter
        return {"text/plain": str(self)} if views is None else views.bundle_of_cell_study(self)

    def describe(self) -> str:
        """Return a line about the progress."""
        num_all = len(self.plan.values) * self.plan.config.repeats
        return f"{len(self._measured)} of {num_all} repeats done" + (f"; now {self.now}" if self.now else "")

    def summary(self) -> list[PointSummary | Gap]:
        """Return each number of ranks with medians and intervals, in order."""
        points = [(ranks, ranks, self._samples.get(ranks, ranks)) for ranks in self.plan.values]
        return summarise(points, self._measured)

    def verdict(self, value: Any = None) -> str:
        """Return a line that says how fast `value` ranks are compared with the first number of ranks; with
        None, which number of ranks is the fastest. If the intervals overlap, the line says so."""
        return study_table.verdict(self.plan, self.summary(), value)

    def frame(self) -> pd.DataFrame:
        """Return a table with one row for each number of ranks; times are in seconds."""
        return study_table.frame(self.plan, self.summary())

    def measure(self, cluster: Cluster, code: str, show: Callable[[], None]) -> None:
        """Run the cell and time its `step()` for each number of ranks, in turns; then resize the cluster to
        the former number of ranks.

        If the cell or a step fails, the table has a gap, and the next number of ranks is measured.

        Args:
            cluster: a cluster that runs.
            code: the cell, which defines `step`.
            show: called when there is something new to show.

        Raises:
            KeyboardInterrupt: the kernel was interrupted; finished measurements are kept.
        """
        before = cluster.world_size
        failed: dict[int, str] = {}
        try:
            for repeat, point in studies.order(len(self.plan.values), self.plan.config.repeats):
                ranks = self.plan.values[point]
                self.now = f"ranks = {ranks}, repeat {repeat + 1} of {self.plan.config.repeats}"
                show()
                if point not in failed:
                    cluster.resize(ranks)
                    try:
                        self._measured.append(self._once(cluster, code, repeat, point))
                        continue
                    except RankError as error:
                        failed[point] = f"{type(error).__name__}: {error}"
                self._measured.append(Measured(point, repeat, (), why_failed=failed[point]))
        finally:
            self.now = ""
            cluster.resize(before)
            show()

    def _once(self, cluster: Cluster, code: str, repeat: int, point: int) -> Measured:
        """Run the cell on the cluster's present ranks and time its `step()`. Return the time of each measured
        step, in seconds, on the slowest rank; note the samples of a step in `_samples`."""
        config = self.plan.config
        # The cell runs before each repeat, because new ranks are empty.
        cluster.execute(code)
        by_rank = cluster.apply(reference(Call.TIME_CELL), config.warm_up_steps, config.measured_steps)
        samples = [timed["samples"] for timed in by_rank.values()]
        num_ranks = len(by_rank)
        if None not in samples:
            self._samples[num_ranks] = sum(samples)
        else:
            # step() does not return its number of samples. Each rank does one unit of work in a step, or with
            # strong scaling all ranks together do one.
            self._samples[num_ranks] = num_ranks if config.mode == "weak" else 1
        steps = zip(*(timed["step_s"] for timed in by_rank.values()), strict=True)
        return Measured(point, repeat, tuple(max(times_s) for times_s in steps))


def prepared(
    cluster: Cluster, ranks: Sequence[int], mode: Mode, repeats: int, num_steps: int, num_warm_ups: int
) -> CellStudy:
    """Check the arguments, and return a study without measurements.

    Raises:
        ConfigError: a number of ranks, of repeats or of steps is not valid.
    """
    config = StudyConfig.checked(
        mode=mode, repeats=repeats, measured_steps=num_steps, warm_up_steps=num_warm_ups
    )
    if not ranks or len(set(ranks)) < len(ranks):
        raise ConfigError(f"ranks = {list(ranks)} must be different numbers, such as 1,2")
    for num_ranks in ranks:
        cluster.parts.resizing.wanted_ranks(num_ranks)  # raises if there cannot be so many
    return CellStudy(StudyPlan("step() of the cell", config, cluster.config, RANKS, list(ranks), {}))
