"""Writes the pages of the docs that come out of the code: docs/configuration.md."""

from __future__ import annotations

from pathlib import Path

from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig
from nbgpu.config.settings import markdown_table
from nbgpu.planning.trials import SweepConfig

CONFIGURATION = Path(__file__).with_name("configuration.md")

_INTRODUCTION = """\
# Settings

Every setting of a cluster, a sweep and a run, with its default, its bounds and its meaning. Each is a flag in
a terminal (`--batch-size 4`), an argument in Python (`batch_size=4`) and a key in `run.toml`.
[words.md](words.md) explains the terms.

Written by `make docs` from `nbgpu/config/`; edit the descriptions there. The same models give the command
line its flags, the control panel its controls and a run's `run.toml` its keys. A bad value is refused before
any engine starts, with its name, its bounds and what to do. Where a meaning begins with a name in bold, that
is what the control panel calls the setting.
"""


def configuration() -> str:
    """The whole page: one table for the cluster, one for each recipe."""
    sections = [
        _INTRODUCTION,
        _section("The cluster: `[cluster]` in `run.toml`", ClusterConfig),
        _section("A sweep: `[sweep]` in `sweep.toml`", SweepConfig),
        *(
            _section(f'A training run: `[train]` with `recipe = "{name}"`', TRAIN_CONFIGS[name])
            for name in sorted(TRAIN_CONFIGS)
        ),
    ]
    return "\n".join(sections)


def _section(title: str, model: type[ClusterConfig | SweepConfig | TrainConfig]) -> str:
    return f"## {title}\n\n{model.__doc__}\n\n{markdown_table(model)}\n"


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration())
