"""The state of a Slurm job: parsed from the output of scontrol and sacct, and described in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from nbgpu.text.durations import duration

Phase = Literal["waiting", "running", "ended", "unknown"]

_PHASES: Mapping[str, Phase] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"), "waiting"),
    **dict.fromkeys(("SPECIAL_EXIT", "RESV_DEL_HOLD"), "waiting"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"), "running"),
    **dict.fromkeys(("STOPPED", "SUSPENDED"), "running"),
}
"""Slurm's states. Each that is not listed is the end of a job."""

_REASONS = {
    "None": "Slurm has not looked at it yet",
    "Resources": "no nodes are free for it",
    "Priority": "jobs of a higher priority come before it",
    "BeginTime": "Slurm starts a requeued job only after a while",
    "Dependency": "it waits for another job",
    "JobHeldUser": "it is held; `scontrol release {job}` lets it start",
    "JobHeldAdmin": "an administrator holds it",
    "Licenses": "licences that it needs are taken",
    "Reservation": "its reservation has not begun",
    "ReqNodeNotAvail": "a node that it asks for is not available",
    "NodeDown": "a node that it asks for is down",
    "PartitionDown": "the partition takes no jobs now",
    "PartitionInactive": "the partition takes no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to a job",
    "PartitionTimeLimit": "it asks for more time than the partition gives to a job",
    "PartitionConfig": "the partition cannot give what it asks for",
    "BadConstraints": "no node has what it asks for",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "QOSNotAllowed": "its QOS is not allowed in this partition or for this account",
    "launch failed requeued held": "it could not be started, and is held",
}
"""Why a job waits, by Slurm's reason."""
_ENDS = {
    "": "is over, and Slurm no longer knows how it ended",
    "COMPLETED": "has ended",
    "CANCELLED": "was cancelled",
    "DEADLINE": "was ended by its deadline",
    "OUT_OF_MEMORY": "was ended because it took more memory than it had; launcher_options={'mem': ...} asks for more",
    "PREEMPTED": "was ended because a job of a higher priority needed its nodes",
}
"""How a job ended, by Slurm's state, for the states that need no details; see `_end`."""


@dataclass(frozen=True)
class JobState:
    """The state of a job at one moment."""

    job: str
    """Its number."""
    state: str
    """Slurm's state, such as 'PENDING'; empty if Slurm does not know the job any more."""
    reason: str = ""
    """Slurm's reason why it waits or has ended, such as 'Resources'."""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    """How often the job was requeued."""
    time_limit_s: float | None = None
    run_time_s: float = 0.0
    expected_start: datetime | None = None
    """The start that Slurm predicts, in the local time of Slurm's host."""
    exit_code: int = 0
    exit_signal: int = 0

    @property
    def phase(self) -> Phase:
        """The state, reduced to four cases."""
        return _PHASES.get(self.state, "ended") if self.state else "unknown"

    @property
    def time_left_s(self) -> float | None:
        """The seconds until the time limit; None if there is none, or the job does not run or is ending."""
        if self.phase != "running" or self.state == "COMPLETING" or self.time_limit_s is None:
            return None
        return max(0.0, self.time_limit_s - self.run_time_s)

    def in_words(self, now: datetime | None = None) -> str:
        """Return a sentence without its full stop: 'job 7 waits: no nodes are free for it (Resources)'.

        Args:
            now: the local time, from which the time until the expected start is counted; None for now.
        """
        if self.phase == "waiting":
            return self._waiting(now or datetime.now())
        if self.phase == "running":
            return self._running()
        return f"job {self.job} {self._end()}"

    def _waiting(self, now: datetime) -> str:
        """'job 7 waits: REASON; expected to start at 14:30, in 2 h'."""
        if self.state == "CONFIGURING":
            return f"job {self.job} waits until {', '.join(self.nodes) or 'its nodes'} are ready"
        reason = f" ({self.reason})" if self.reason else ""
        if explanation := _REASONS.get(self.reason, "").format(job=self.job):
            reason = f": {explanation}{reason}"
        again = f" to start again, after it was requeued {_times(self.restarts)}" if self.restarts else ""
        start = ""
        if self.expected_start is not None and (until_s := (self.expected_start - now).total_seconds()) > 0:
            is_today = self.expected_start.date() == now.date()
            at = self.expected_start.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M")
            start = f"; expected to start at {at}, in {duration(until_s)}"
        return f"job {self.job} waits{again}{reason}{start}"

    def _running(self) -> str:
        """'job 7 runs on n1, n2; 3 h left'."""
        where = f" on {', '.join(self.nodes)}" if self.nodes else ""
        verbs = {"SUSPENDED": "is suspended", "STOPPED": "is stopped", "COMPLETING": "is ending"}
        left = "" if self.time_left_s is None else f"; {duration(self.time_left_s)} left"
        again = f"; requeued {_times(self.restarts)} before" if self.restarts else ""
        return f"job {self.job} {verbs.get(self.state, 'runs')}{where}{left}{again}"

    def _end(self) -> str:
        """Say how the job has ended, as 'was cancelled'."""
        if self.state in _ENDS:
            return _ENDS[self.state]
        match self.state:
            case "TIMEOUT":
                limit = "" if self.time_limit_s is None else f" of {duration(self.time_limit_s)}"
                return f"was ended by its time limit{limit}; launcher_options={{'time': ...}} asks for more"
            case "NODE_FAIL" | "BOOT_FAIL":
                named = f" of {', '.join(self.nodes)}" if self.nodes else ""
                return f"was ended because a node{named} failed"
            case _:
                how = f"signal {self.exit_signal}" if self.exit_signal else f"exit status {self.exit_code}"
                reason = f", {self.reason}" if self.reason not in {"", "None", "NonZeroExitCode"} else ""
                return f"failed ({self.state}, {how}{reason})"


def from_scontrol(line: str, nodes: Sequence[str] = ()) -> JobState:
    """Parse the line that `scontrol show job --oneliner` prints for a job.

    Args:
        line: 'JobId=7 JobName=... JobState=PENDING Reason=Resources ...'.
        nodes: the node names to which the line's NodeList expands.
    """

    def value(key: str) -> str:
        match = re.search(rf"(?:^|\s){key}=(\S*)", line)
        return match[1] if match else ""

    # Unlike the other values, the reason may contain spaces.
    reason = re.search(r"\sReason=(.*?)\s+(?=\w+=)", line)
    code, _, signal_number = value("ExitCode").partition(":")
    state = value("JobState")
    return JobState(
        job=value("JobId"),
        state=state,
        reason=_reason(reason[1] if reason else ""),
        nodes=tuple(nodes),
        restarts=_number(value("Restarts")),
        time_limit_s=duration_s(value("TimeLimit")),
        run_time_s=duration_s(value("RunTime")) or 0.0,
        expected_start=_time(value("StartTime")) if state == "PENDING" else None,
        exit_code=_number(code),
        exit_signal=_number(signal_number),
    )


ACCOUNTING_FIELDS = "JobIDRaw,State,ExitCode,TimelimitRaw,Restarts"
"""For `sacct --format`; `from_accounting` parses them."""


def from_accounting(line: str) -> JobState | None:
    """Parse the line that `sacct --parsable2 --noheader` prints for a job; None for any other line."""
    fields = line.strip().split("|")
    if len(fields) != len(ACCOUNTING_FIELDS.split(",")) or not fields[0].isdecimal():
        return None
    job, state, status, limit_min, restarts = fields
    code, _, signal_number = status.partition(":")
    return JobState(
        job,
        state.partition(" ")[0],  # of 'CANCELLED by 1000'
        restarts=_number(restarts),
        time_limit_s=60.0 * int(limit_min) if limit_min.isdecimal() else None,
        exit_code=_number(code),
        exit_signal=_number(signal_number),
    )


def duration_s(text: str) -> float | None:
    """Parse Slurm's durations, 'days-hours:minutes:seconds', where days and hours may be left out. Return the
    seconds, or None for 'UNLIMITED' and any other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _reason(text: str) -> str:
    """Slurm's reason, without a comment that may follow: 'ReqNodeNotAvail, UnavailableNodes:n7'. Some
    versions of Slurm write 'launch_failed_requeued_held', and others 'launch failed requeued held'."""
    text = text.split(",")[0].strip()
    return text.replace("_", " ") if text.startswith("launch_failed") else text


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _time(text: str) -> datetime | None:
    """Parse a time; None for 'Unknown', and for a format of the site's own."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
