"""Executes notebooks and keeps them with their outputs: `make notebooks`, or `make notebooks ONLY="00 03"`.

A notebook is written only after all of its cells ran. What belongs to this machine or this minute does not
stay: folders, the user's name, the time in the names of runs, warnings, execution times, and widgets, which
need a kernel; the still pictures that they leave stay. A kept notebook carries a fingerprint of its code, by
which a test can tell outputs that are older than their cells.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from rich.console import Console

from nbgpu.client import demo

REPOSITORY = Path(__file__).resolve().parent.parent
NOTEBOOKS = REPOSITORY / "notebooks"
MARK = "nbgpu"
"""The notebook's metadata that hold the fingerprint."""
_WIDGET = "application/vnd.jupyter.widget-view+json"
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(?:  .*\n)?", re.MULTILINE)
_RUN = re.compile(r"\b20\d{6}-\d{6}-([\w-]+?)-[0-9a-f]{4}\b")


# The folders of runs do not stay, and a reader cannot follow links into them.
_LINK = re.compile(r'<a\s[^>]*href="nbgpu_runs/[^"]*"[^>]*>(.*?)</a>', re.DOTALL)
_ABOUT_LINKS = "Where these links do not work, as outside of the folder that Jupyter serves: "


def sources_of(notebook: Any) -> str:
    """The fingerprint of a notebook's code: another one, once a cell was changed, added, moved or removed."""
    code = "\0".join(cell.source for cell in _code(notebook))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and not demo.is_skipped(cell)]


def execute(path: Path, console: Console) -> bool:
    """Execute a notebook in an empty folder, and keep it with its outputs where all cells ran."""
    begun_s = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        if (problem := demo.run_cells(notebook, Path(folder), console)) is not None:
            console.print(problem)
            return False
        kept(notebook, Path(folder))
    # Its text may have been edited meanwhile.
    present = nbformat.read(path, as_version=4)
    if sources_of(present) != notebook.metadata[MARK]["outputs_of"]:
        console.print(f"{path.name} was changed while it was executed, and stays as it is")
        return False
    present.metadata = notebook.metadata
    for cell, executed in zip(_code(present), _code(notebook), strict=True):
        cell.update(outputs=executed.outputs, execution_count=executed.execution_count)
        cell.metadata.pop("execution", None)
    nbformat.write(present, path)
    num_bytes = path.stat().st_size
    console.print(f"{path.name}: {time.monotonic() - begun_s:.0f} s, kept with {num_bytes / 1e6:.2f} MB")
    return True


def kept(notebook: Any, folder: Path) -> None:
    """Take from a notebook that was executed in `folder` what another execution would have otherwise."""
    neutral = _neutral(folder)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": notebook.metadata.kernelspec,
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
            MARK: {"outputs_of": sources_of(notebook)},
        }
    )
    for cell in _code(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = [
            _mapped(output, neutral) for output in _joined(cell.outputs) if _has_something(output)
        ]


def _neutral(folder: Path) -> Callable[[str], str]:
    """What replaces, in a text, the names of this machine and this minute."""
    places = {f"{folder}/": "", str(folder): ".", f"{REPOSITORY}/": "", f"{sys.prefix}/": ".venv/"}
    runs: dict[str, str] = {}

    def run_name(found: re.Match[str]) -> str:
        number = len(runs) + 1
        return runs.setdefault(found[0], f"20260101-{number:06d}-{found[1]}-{number:04x}")

    def neutral(text: str) -> str:
        text = _WARNING.sub("", text)
        for place, name in places.items():
            text = text.replace(place, name)
        text = _LINK.sub(r"\1", _RUN.sub(run_name, text)).replace(_ABOUT_LINKS, "They are in ")
        return re.sub(rf"(?<=/home/){re.escape(getpass.getuser())}\b", "you", text)

    return neutral


def _joined(outputs: list[Any]) -> Iterator[Any]:
    """The outputs, with pieces of one stream that follow each other as one: where they were cut is chance."""
    last: Any = None
    for output in outputs:
        if (
            last is not None
            and output.output_type == "stream" == last.output_type
            and output.name == last.name
        ):
            last.text += output.text
            continue
        if last is not None:
            yield last
        last = output
    if last is not None:
        yield last


def _has_something(output: Any) -> bool:
    """Whether anything is left of an output without a kernel. Takes its widget from it."""
    if output.output_type == "stream":
        output.text = _WARNING.sub("", output.text)
        return bool(output.text)
    if output.output_type == "error":
        return True
    had_widget = output.data.pop(_WIDGET, None) is not None
    # A widget's text alone names a Python object.
    return bool(output.data) and not (
        had_widget and set(output.data) == {"text/plain"} and not output.data["text/plain"]
    )


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed, other than pictures."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    if isinstance(value, dict):
        return nbformat.from_dict(
            {name: each if name == "image/png" else _mapped(each, change) for name, each in value.items()}
        )
    return value


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute notebooks, and keep them with their outputs.")
    parser.add_argument("only", nargs="*", help="numbers of notebooks, such as 00 03; left out: all of them")
    only = parser.parse_args(arguments).only
    found = [
        path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if not only or path.name.partition("_")[0] in only
    ]
    if missing := set(only) - {path.name.partition("_")[0] for path in found}:
        parser.error(f"there is no notebook {', '.join(sorted(missing))} in {NOTEBOOKS}")
    console = Console()
    failed = [path.name for path in found if not execute(path, console)]
    if failed:
        console.print(f"these failed and are as they were: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
