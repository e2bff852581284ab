"""The names of the files in a run's folder."""

from __future__ import annotations

SETTINGS = "run.toml"
"""The run's settings, with which it can be started again under torchrun or with `--config`."""
ENVIRONMENT = "env.json"
"""Versions, host and commit."""
RESUMED_FROM = "resume.json"
"""The checkpoint that the run resumes."""
CHOSEN = "chosen.json"
"""The settings that were left out and chosen by the data and the memory, with the reasons."""
JOB = "job.json"
"""The job that the run belongs to. When that job is started again, it goes on in this folder."""
INFO = "run_info.json"
"""What the ranks found before the first step: devices, lengths, data."""
CHANGES = "changes.jsonl"
"""Settings that were changed while the run was going on."""
METRICS = "metrics.csv"
EPOCHS = "epochs.jsonl"
REPORT = "report.html"
PROFILES = "profile"
"""A folder with a trace for each rank, which chrome://tracing and ui.perfetto.dev open."""


def profile(rank: int) -> str:
    """The name of a rank's trace in that folder."""
    return f"rank{rank}.trace.json.gz"
