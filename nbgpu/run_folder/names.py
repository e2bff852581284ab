"""The names of the files in a run's folder."""

from __future__ import annotations

SETTINGS = "run.toml"
"""What the run was asked for; it also starts the run again, under torchrun or with `--config`."""
ENVIRONMENT = "env.json"
"""Versions, host and commit."""
RESUMED_FROM = "resume.json"
"""The checkpoint that the run goes on from."""
CHOSEN = "chosen.json"
"""What the data and the memory have decided of the settings that were left out, and why."""
JOB = "job.json"
"""The job that the run belongs to, which goes on in this folder when it is started again."""
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
