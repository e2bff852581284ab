"""The measurements that a cluster asks of its ranks before a run.

All code that a run will use is imported first, so that its memory counts as held before the run. An import
that ran out of memory would leave half a module behind; so the rank's limit does not hold for it.
"""

from nbgpu.engine.memory import limit

with limit.lifted():
    from nbgpu.engine import train as train
    from nbgpu.engine.dry_run.batch_size import find as find_batch_size
    from nbgpu.engine.dry_run.from_data import choose as choose_from_data
    from nbgpu.engine.dry_run.memory import estimate_run, held_bytes
    from nbgpu.engine.dry_run.memory import measure as measure_memory
    from nbgpu.engine.dry_run.memory import predict as predict_memory
    from nbgpu.engine.scaling.step_timing import measure as time_step

__all__ = [
    "choose_from_data",
    "estimate_run",
    "find_batch_size",
    "held_bytes",
    "measure_memory",
    "predict_memory",
    "time_step",
]
