"""Check of a run's data in a separate process, before any engine starts.

python -m nbgpu.recipes.check PARENT_PID training < settings.json
python -m nbgpu.recipes.check PARENT_PID prediction < job.json
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from nbgpu.config import train_config
from nbgpu.engine.dry_run import from_data
from nbgpu.engine.workload import by_name
from nbgpu.engine.workload.problem import Problem
from nbgpu.engine.workload.recipe import Inspecting
from nbgpu.errors import ConfigError, DataError
from nbgpu.machine import interpreter
from nbgpu.machine.watched import end_with
from nbgpu.recipes import prediction

BAD_DATA = 3
"""Exit code if the data are unusable; the problems are on stderr."""


def main() -> None:
    """Read the settings of a training, or the fields of a `Job`, as JSON from stdin, check their data, and
    report slow work on stdout.

    The process ends with its parent, whose number is the first argument.
    """
    end_with(int(sys.argv[1]))
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("nbgpu").setLevel(logging.INFO)
    # A recipe file of the person may import modules from the working folder.
    interpreter.look_in([""])
    asked = json.load(sys.stdin)
    try:
        if sys.argv[2] == "prediction":
            prediction.check(asked)
        else:
            _check_training(asked)
    except (DataError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BAD_DATA)


def _check_training(settings: dict[str, Any]) -> None:
    """Let the recipe of these settings inspect its files; a DataError lists all problems."""
    recipe: object = by_name.load(from_data.complete(train_config(**settings)))
    if isinstance(recipe, Problem):
        recipe.load()
    else:
        if isinstance(recipe, Inspecting):
            recipe.inspect()
        recipe.amount()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
