"""The tests that are marked `gpu`, one check for each of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from checks import REPOSITORY, Place, Skipped, check

_MARK = "pytest.mark." + "gpu"


def marked_tests() -> Iterator[tuple[Path, str]]:
    """Yield the files and names of the tests that are marked, one by one or all of a file."""
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        text = path.read_text()
        if _MARK not in text:
            continue
        body = ast.parse(text).body
        all_are = any(isinstance(node, ast.Assign) and _MARK in ast.unparse(node) for node in body)
        for node in body:
            if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test_")):
                continue
            if all_are or any(_MARK in ast.unparse(decorator) for decorator in node.decorator_list):
                yield path.relative_to(REPOSITORY), node.name


def _test(path: Path, name: str) -> Callable[[Place], None]:
    def run_test(place: Place) -> None:
        report = place.folder / "report.xml"
        # The warnings of this machine's versions are not what the tests are about.
        options = ["-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}"]
        test = f"{path}::{name}"
        done = place.python("-m", "pytest", test, *options, timeout_s=60, OMP_NUM_THREADS="1")
        assert report.exists(), f"{done.stdout}{done.stderr}"[-3000:]
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
        skipped = [case for case in cases if case.find("skipped") is not None]
        bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
        place.figure("tests that passed", len(cases) - len(skipped) - len(bad))
        place.figure("tests that were skipped", len(skipped))
        reasons = sorted({node.get("message", "") for case in skipped for node in case.iter("skipped")})
        for reason in reasons:
            print(f"skipped: {reason}")
        messages = [
            f"{case.get('name')}: {node.get('message', '')[:600]}"
            for case in bad
            for node in (*case.iter("failure"), *case.iter("error"))
        ]
        assert not messages, "\n".join(messages)
        if len(skipped) == len(cases):
            raise Skipped("; ".join(reasons) or "there is no such test in it")

    return run_test


_BUDGET_S = 22
_BUDGET_OF_SKIPPED_S = 8
_SEVERAL_GPUS = ("test_faults_with_nccl.py", "test_nccl_is_communication_hidden_or_not")
"""Files and tests that one GPU makes skip, which takes as long as the imports do."""

for _path, _name in marked_tests():
    check(
        f"{_path}: {_name.removeprefix('test_').replace('_', ' ')}",
        slice=3 if "nccl" in _path.name or "transports" in _path.name else 6,
        page="faults" if "faults" in _path.parts else "training",
        shows=("engine",),
        budget_s=_BUDGET_OF_SKIPPED_S if {_path.name, _name} & {*_SEVERAL_GPUS} else _BUDGET_S,
        name=f"marked_{_name.removeprefix('test_')}",
    )(_test(_path, _name))
