"""Which of Debian's packages a machine lacks for a kind of test."""

from __future__ import annotations

import shutil
from collections.abc import Mapping


def why_missing(what: str, package_of: Mapping[str, str]) -> str:
    """Say how to install the programs that are not here; empty where all are.

    Args:
        what: is the case without them, as the beginning of a sentence.
        package_of: the package that has each program.
    """
    missing = sorted({package for program, package in package_of.items() if not shutil.which(program)})
    return f"{what}: apt-get install --no-install-recommends {' '.join(missing)}" if missing else ""
