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
    # Import it here, because it takes a third of a second, which every start of a cluster would pay.
    import pandas as pd

    frames = []
    for records, _ in reader.batches():
        rows = [
            {"rank": r.rank, "step": r.step, "time_s": r.time_s, **r.values}
            for r in records
            if isinstance(r, Sample)
        ]
        # As a table the samples take a tenth of the memory.
        frames += [pd.DataFrame(rows)] if rows else []
    return (
        pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["rank", "step", "time_s"])
    )


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
    # One rank hides nothing, of which pandas would make a column of objects.
    return pd.DataFrame(rows, columns=columns).astype({"hidden_s": float})
