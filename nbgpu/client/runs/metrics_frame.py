"""The records of a run's ranks as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbgpu.performance import step_parts
from nbgpu.protocol.records import Sample
from nbgpu.run_folder.reader import Reader

if TYPE_CHECKING:
    import pandas as pd


def frame_of(reader: Reader) -> pd.DataFrame:
    """Return a table with one row for each sample, with rank, step, time_s and the series."""
    # The import takes a third of a second, so a start of a cluster does without it.
    import pandas as pd

    frames = []
    for records, _ in reader.batches():
        rows = [
            {"rank": r.rank, "step": r.step, "time_s": r.time_s, **r.values}
            for r in records
            if isinstance(r, Sample)
        ]
        # Each batch becomes a table at once, which takes a tenth of the memory of its samples.
        if rows:
            frames.append(pd.DataFrame(rows))
    empty = pd.DataFrame(columns=["rank", "step", "time_s"])
    return pd.concat(frames, ignore_index=True) if frames else empty


def parts_frame(reader: Reader, num_ranks: int) -> pd.DataFrame:
    """Return a table with one row for each step and rank: the parts of the step, in seconds."""
    import pandas as pd

    rows = [
        {
            "step": parts.step,
            "rank": parts.rank,
            "step_s": parts.step_s,
            **parts.parts_s,
            "hidden_s": parts.hidden_s,
            "waited_for": parts.last_rank,
        }
        for parts in step_parts.parts_of(reader.records(), num_ranks)
    ]
    columns = ["step", "rank", "step_s", *step_parts.PARTS, "hidden_s", "waited_for"]
    # A single rank has only None in this column, which pandas would store as objects.
    return pd.DataFrame(rows, columns=columns).astype({"hidden_s": float})
