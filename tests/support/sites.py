"""A notebook and hosts for a test module, which leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hosts
import leaks


@contextmanager
def new_site(folder: Path, patience_s: float, **settings: Any) -> Iterator[hosts.Site]:
    """A notebook on `desk`, and hosts n1 and n2 for a cluster that is not started yet; at the end nothing is
    left of them. They share this folder alone.

    Args:
        folder: a new folder.
        patience_s: as for hosts.Site.
        settings: as for hosts.Site.
    """
    private = [Path.home(), Path("/var/tmp")]
    with hosts.make_hosts(["desk", "n1", "n2"], folder / "hosts", shared=[folder], private=private) as made:
        site = hosts.Site(made, folder, patience_s, **settings)

        def is_of_the_site(leftover: leaks.Leftover) -> bool:
            if leftover.kind == "thread":
                return site.notebook.reader.name in leftover.text
            return made.have(leftover.pid) or leftover.pid in site.own_pids()

        try:
            with leaks.holding(is_of_the_site):
                yield site
        finally:
            site.end()
