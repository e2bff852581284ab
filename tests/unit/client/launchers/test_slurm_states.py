"""What Slurm prints of a job, read and in words. test_slurm_jobs.py reads what a real one prints."""

from __future__ import annotations

from datetime import datetime

import pytest

from nbgpu.client.launchers.slurm_state import JobState, duration_s, from_accounting, from_scontrol

NOW = datetime(2026, 5, 1, 14, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("02:00", 120),
        ("1:02:03", 3723),
        ("1-00:00:05", 86_405),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
    ],
)
def test_durations(text: str, expected: float | None) -> None:
    assert duration_s(text) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "JobId=7 JobState=PENDING Reason=Resources Dependency=(null) Restarts=0 ExitCode=0:0 RunTime=00:00:00 "
            "TimeLimit=01:00:00 StartTime=2026-05-01T14:12:00 EndTime=Unknown",
            "job 7 waits: no nodes are free for it (Resources); expected to start at 14:12, in 12 min",
        ),
        (
            "JobId=7 JobState=PENDING Reason=BeginTime Restarts=1 StartTime=2026-05-02T01:00:00",
            "job 7 waits to start again, after it was requeued once: Slurm starts a requeued job only after a while "
            "(BeginTime); expected to start at 2026-05-02 01:00, in 11 h",
        ),
        (
            "JobId=7 JobState=PENDING Reason=JobHeldUser Dependency=(null) StartTime=Unknown",
            "job 7 waits: it is held; `scontrol release 7` lets it start (JobHeldUser)",
        ),
        (
            "JobId=7 JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:n7 Dependency=(null) StartTime=N/A",
            "job 7 waits: a node that it asks for is not available (ReqNodeNotAvail)",
        ),
        ("JobId=7 JobState=PENDING Reason=NewOne Dependency=(null)", "job 7 waits (NewOne)"),
        (
            "JobId=7 JobState=RUNNING Reason=None Dependency=(null) Restarts=2 RunTime=00:10:30 TimeLimit=01:00:00",
            "job 7 runs on n1, n2; 49 min 30 s left; requeued twice before",
        ),
        (
            "JobId=7 JobState=COMPLETING Reason=None RunTime=00:10:30 TimeLimit=01:00:00",
            "job 7 is ending on n1, n2",
        ),
        ("JobId=7 JobState=RUNNING Reason=None RunTime=00:10:30 TimeLimit=UNLIMITED", "job 7 runs on n1, n2"),
        (
            "JobId=7 JobState=TIMEOUT Reason=TimeLimit Dependency=(null) ExitCode=0:0 TimeLimit=00:02:00",
            "job 7 was ended by its time limit of 2 min; launcher_options={'time': ...} asks for more",
        ),
        (
            "JobId=7 JobState=DEADLINE Reason=DeadLine Dependency=(null) ExitCode=0:0 TimeLimit=00:02:00",
            "job 7 was ended by its deadline",
        ),
        (
            "JobId=7 JobState=OUT_OF_MEMORY Reason=OutOfMemory ExitCode=0:125",
            "job 7 was ended because it took more memory than it had; launcher_options={'mem': ...} asks for more",
        ),
        ("JobId=7 JobState=NODE_FAIL Reason=None", "job 7 was ended because a node of n1, n2 failed"),
        ("JobId=7 JobState=CANCELLED Reason=None", "job 7 was cancelled"),
        (
            "JobId=7 JobState=FAILED Reason=NonZeroExitCode Dependency=(null) ExitCode=3:0",
            "job 7 failed (FAILED, exit status 3)",
        ),
        (
            "JobId=7 JobState=FAILED Reason=RaisedSignal:9(Killed) ExitCode=0:9",
            "job 7 failed (FAILED, signal 9, RaisedSignal:9(Killed))",
        ),
    ],
)
def test_the_words_for_a_state(line: str, words: str) -> None:
    assert from_scontrol(line + " Comment=x", ["n1", "n2"]).in_words(NOW) == words


def test_the_accounting() -> None:
    state = from_accounting("7|CANCELLED by 1000|0:15|60|1\n")
    assert state == JobState("7", "CANCELLED", restarts=1, time_limit_s=3600, exit_signal=15)
    assert from_accounting("Slurm accounting storage is disabled") is None


def test_a_job_that_nobody_knows() -> None:
    state = JobState("7", "")
    assert (state.phase, state.in_words()) == (
        "unknown",
        "job 7 is over, and Slurm no longer knows how it ended",
    )
