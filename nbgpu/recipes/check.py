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
"""The exit code if the data cannot be used; stderr then has the problems."""


def main() -> None:
    """Check the data of a run or a prediction, and report slow work on stdout.

    The first argument is the process id of the parent, with which this process ends. Stdin has JSON: the
    settings of the run, or the fields of the prediction's `Job`.
    """
    end_with(int(sys.argv[1]))
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("nbgpu").setLevel(logging.INFO)
    # A user's own recipe file may import modules from the working folder.
    interpreter.look_in([""])
    fields = json.load(sys.stdin)
    try:
        if sys.argv[2] == "prediction":
            prediction.check(fields)
        else:
            _check_training(fields)
    except (DataError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BAD_DATA)


def _check_training(settings: dict[str, Any]) -> None:
    """Let the recipe with these settings inspect its data; DataError lists all problems."""
    recipe: object = by_name.load(from_data.complete(train_config(**settings)))
    if isinstance(recipe, Problem):
        recipe.load()
    else:
        if isinstance(recipe, Inspecting):
            recipe.inspect()
        recipe.amount()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
