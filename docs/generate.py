"""Writes the pages of the docs that come out of the code: docs/configuration.md and docs/commands.md."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

from pydantic import BaseModel

from nbgpu import cli
from nbgpu.cli.catalogue import GROUPS, Command
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig
from nbgpu.config.conditions import meaning
from nbgpu.config.settings import bounds, label_of, unused
from nbgpu.planning.trials import SweepConfig

CONFIGURATION = Path(__file__).with_name("configuration.md")
COMMANDS = Path(__file__).with_name("commands.md")

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

_OF_COMMANDS = """\
# Commands

`make docs` writes this page from the commands themselves: below each command is its `--help`.

- `nbgpu` alone lists the commands, and `nbgpu --version` prints the version.
- `nbgpu COMMAND --help` shows the flags that matter most, in groups, and `--help-all` every one. With a recipe or a
  run's folder it has that one's settings and defaults: `nbgpu train survival --help`. All settings are in
  [Settings](configuration.md).
- A misspelt command, recipe or flag is answered with the nearest one.
- Tab completes commands, recipes, flags, presets and values: `nbgpu completion bash`, `zsh` or `fish` prints the script.

| exit code | |
|---|---|
| 0 | all went well |
| 1 | something failed or was refused: a run, a setting, a file |
| 2 | the command line was not understood |
| 130 | interrupted, as by Ctrl-C |
| 141 | the reader of the output stopped reading, as `head` does |

On macOS and Windows `notebooks`, `recipes`, `new`, `completion`, `--version` and every `--help` work, and the others say
what to do instead ([Start](start.md#on-macos-and-windows)).
"""


def commands() -> str:
    """The page of the commands: each with its help."""
    sections = [_OF_COMMANDS]
    for title, members in GROUPS.items():
        sections += [f"## {title}\n", *(f"### `nbgpu {each.usage}`\n\n{_help(each)}" for each in members)]
    return "\n".join(sections)


def _help(command: Command) -> str:
    """What `nbgpu COMMAND --help` prints on a page of 88 columns, which fits the site, as a block."""
    said = io.StringIO()
    # rich reads how wide a terminal is, and whether it has colours, from the environment.
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "88", "TERM": "dumb", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        cli.main([command.name, "--help"])
    return f"```text\n{said.getvalue().strip()}\n```\n"


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


def markdown_table(model: type[BaseModel]) -> str:
    """The table of a model: setting, default, values, meaning."""
    rows = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name in unused(model):
            continue
        values = bounds(field).replace("|", "\\|")
        # The panel shows a word in place of the name, and who reads it there must find the setting here.
        label = label_of(model, name)
        shown = "" if label.lower() == name.replace("_", " ") else f"**{label}**: "
        rows.append(f"| `{name}` | `{field.default!r}` | {values} | {shown}{meaning(model, name)} |")
    return "\n".join(rows)


def _section(title: str, model: type[ClusterConfig | SweepConfig | TrainConfig]) -> str:
    return f"## {title}\n\n{model.__doc__}\n\n{markdown_table(model)}\n"


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration())
    COMMANDS.write_text(commands())
