"""The time until the jobs of a cluster end, where Slurm does not always answer."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from nbgpu.client.cluster import time_limit
from nbgpu.client.state import release
from nbgpu.errors import ClusterError

NO_ANSWER = ClusterError("Slurm does not answer")


class Job:
    """A job that gives these answers, and then the last one again and again."""

    def __init__(self, *answers: float | ClusterError | None) -> None:
        self.num_asked = 0
        self._answers = answers

    def time_left_s(self) -> float | None:
        answer = self._answers[min(self.num_asked, len(self._answers) - 1)]
        self.num_asked += 1
        if isinstance(answer, ClusterError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "_ASK_PERIOD_S", 0.01)


def left_s(*jobs: Job) -> float | None:
    """The time left after each job was asked several times."""
    state: Any = SimpleNamespace(pool=SimpleNamespace(jobs=lambda: jobs))
    nothing: Any = None
    watch = time_limit.watch_over(state, nothing, nothing)
    assert watch is not None
    try:
        while min(job.num_asked for job in jobs) < 5:
            time.sleep(0.01)
        return watch.left_s
    finally:
        watch.close()


def test_a_job_that_does_not_answer_ends_when_it_said_last() -> None:
    known = left_s(Job(1000.0, NO_ANSWER), Job(None))
    assert known is not None
    assert 900 < known <= 1000


def test_the_first_job_that_ends_counts_and_a_limit_may_go() -> None:
    shorter = left_s(Job(NO_ANSWER), Job(500.0), Job(1000.0))
    assert shorter is not None
    assert 400 < shorter <= 500
    assert left_s(Job(1000.0, None)) is None
    assert left_s(Job(NO_ANSWER)) is None
