"""The tests that are marked `gpu`, one check for each file with such tests."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

from checks import REPOSITORY, Place, Skipped, check

_MARK = "pytest.mark." + "gpu"
FILES = sorted(
    path.relative_to(REPOSITORY)
    for path in (REPOSITORY / "tests").rglob("test_*.py")
    if _MARK in path.read_text()
)
_TAKE_MUCH_MEMORY = {"test_memory_on_a_gpu"}


def _tests_in(path: str) -> Callable[[Place], None]:
    def run_tests(place: Place) -> None:
        report = place.folder / "report.xml"
        # The warnings of this machine's versions are not what the tests are about.
        options = ["-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = place.python("-m", "pytest", path, *options, timeout_s=270, OMP_NUM_THREADS="1")
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

    return run_tests


for _path in FILES:
    check(
        f"the tests with the mark `gpu` in {_path} pass",
        slice=2 if "nccl" in _path.name or "transports" in _path.name else 1,
        page="faults" if "faults" in _path.parts else "training",
        timeout_s=280,
        alone=_path.stem in _TAKE_MUCH_MEMORY,
        name=f"marked_{_path.stem.removeprefix('test_')}",
    )(_tests_in(str(_path)))
