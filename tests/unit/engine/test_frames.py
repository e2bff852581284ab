"""Whose code a frame runs, and what is left of a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nbgpu
from nbgpu.engine.frames import error_as_text, is_library


def test_a_folder_beside_the_package_whose_name_begins_alike_is_the_persons() -> None:
    package = Path(nbgpu.__file__).parent
    assert is_library(str(package / "runs.py"))
    assert not is_library(f"{package}_runs/my_recipe.py")


def test_an_error_as_text_has_the_persons_lines_and_counts_the_others() -> None:
    try:
        try:
            json.loads("[")
        except ValueError as error:
            raise OSError("no such\nthing") from error
    except OSError as error:
        told = error_as_text(error)
    first, second = told.split("\nThe above exception was the direct cause of the following exception:\n\n")
    assert first.count("File ") == 1
    assert 'json.loads("[")' in first
    assert second.endswith("OSError: no such\nthing\n")
    try:
        json.loads("[")
    except ValueError as error:
        lines = error_as_text(error).splitlines()
    assert sum("File " in line for line in lines) == 1
    assert lines[-2] == "  (3 frames of libraries left out)"


def test_with_no_line_of_the_persons_all_are_there() -> None:
    namespace: dict[str, object] = {}
    exec(compile("import json\ndef f():\n    json.loads('[')", "<string>", "exec"), namespace)
    with pytest.raises(ValueError, match="Expecting") as caught:
        namespace["f"]()  # type: ignore[operator]
    # Without the line above.
    error = caught.value.with_traceback(caught.tb.tb_next)
    assert error_as_text(error).count("File ") == 4
