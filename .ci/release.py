"""Prepares a release: checks what must agree, builds wheel and sdist into dist/, has both checked, and prints
what is left to do. It uploads nothing, and tags nothing.

    make wheel                      # build and check, whatever the state of the tree
    make release TESTED=COMMIT      # also hold version, changelog and tree to docs/releasing.md

COMMIT is the one that `.ci/run` passed on; it must be the present one.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# As PEP 440 has it for releases and their candidates: 1.2.0, 1.2.0rc1.
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _written(name: str, pattern: str) -> list[str]:
    """What stands in a file of the repository."""
    return re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)


def version() -> str:
    """The version in nbgpu/version.py, of which all others are read or must be copies."""
    (found,) = _written("nbgpu/version.py", r'^VERSION = "([^"]*)"$')
    return found


def problems(tested: str, today: datetime.date) -> Iterator[str]:
    """Yield what stands in the way of a release, each with what to do."""
    now = version()
    if not _VERSION.fullmatch(now):
        yield f"nbgpu/version.py: {now!r} is no version of a release. Write one such as 1.2.0 or 1.2.0rc1"
    headings = _written("CHANGELOG.md", r"^## (.*)$")
    newest = headings[0] if headings else ""
    heading = re.fullmatch(r"\[(.*)\] - (\d{4}-\d{2}-\d{2})", newest)
    dates = _written("CITATION.cff", r"^date-released: (.*)$")
    if heading is None or heading[1] != now:
        yield f"CHANGELOG.md begins with '## {newest}'. Make it '## [{now}] - {today}'"
    elif datetime.date.fromisoformat(heading[2]) > today:
        yield f"CHANGELOG.md: {heading[2]} is not yet. Today is {today}"
    elif dates != [heading[2]]:
        yield f"CITATION.cff: date-released is {dates}, and CHANGELOG.md says {heading[2]}"
    for name, pattern in (
        ("CITATION.cff", r"^version: (.*)$"),
        (".ci/conda/recipe.yaml", r'^  version: "(.*)"$'),
        ("widgets/labextension/package.json", r'^  "version": "(.*)",$'),
    ):
        if (found := _written(name, pattern)) != [now]:
            yield f"{name}: the version is {found}, and nbgpu/version.py says {now}"
    if changed := _output("git", "status", "--porcelain"):
        yield f"files differ from the commit:\n{changed}\nCommit them, or take them away"
    if _output("git", "tag", "--list", f"v{now}"):
        yield f"there is a tag v{now} already. Raise the version in nbgpu/version.py"
    commit = _output("git", "rev-parse", "HEAD")
    if len(tested) < 7 or not commit.startswith(tested):
        yield (
            f"nobody said that .ci/run passed on this commit. Run it, or look at what CI says of {commit[:12]}; "
            f"then: make release TESTED={commit[:12]}"
        )


def build() -> list[Path]:
    """Build sdist and wheel into an empty dist/, and have both checked. The wheel is built from the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    # The same commit gives the same bytes.
    when = _output("git", "log", "-1", "--format=%ct") if (ROOT / ".git").exists() else "0"
    run = [sys.executable, "-m"]
    subprocess.run(
        [*run, "build", "--no-isolation", "--outdir", str(DIST), str(ROOT)],
        env=os.environ | {"SOURCE_DATE_EPOCH": when},
        check=True,
    )
    made = sorted(DIST.iterdir())
    subprocess.run([*run, "twine", "check", "--strict", *map(str, made)], check=True)
    subprocess.run([*run, "check_wheel_contents", *(str(p) for p in made if p.suffix == ".whl")], check=True)
    return made


def main() -> int:
    """Build, or prepare a release; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("what", choices=["build", "release"])
    parser.add_argument("--tested", default="", metavar="COMMIT", help="the commit that .ci/run passed on")
    asked = parser.parse_args()
    if asked.what == "release":
        found = list(problems(asked.tested, datetime.datetime.now(datetime.UTC).date()))
        if found:
            sys.stderr.write("".join(f"- {problem}\n" for problem in found))
            sys.stderr.write("Nothing was built. docs/releasing.md has the steps\n")
            return 1
    try:
        made = build()
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(ROOT)}" for p in made]
    if asked.what == "release":
        lines += [
            "",
            "All is checked, and nothing was tagged or uploaded. What is left:",
            f"    git tag --annotate v{version()} --message 'nbgpu {version()}' && git push origin v{version()}",
            f"    {Path(sys.executable).parent / 'twine'} upload {' '.join(str(p.relative_to(ROOT)) for p in made)}",
        ]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
