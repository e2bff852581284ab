"""Writes the tables of quality into docs/benchmarks.md, from what `make quality` measured
(tests/_artifacts/quality.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "tests" / "_artifacts" / "quality.json"
PAGE = DOCS / "benchmarks.md"
_START, _END = "<!-- quality start -->", "<!-- quality end -->"


def tables(found: dict[str, Any]) -> str:
    """The tables, one for each trained recipe."""
    return "\n\n".join(_table(title, found[title]) for title in sorted(found))


def _table(title: str, of_title: dict[str, Any]) -> str:
    seeds = sorted(of_title["seeds"], key=int)
    methods = list(dict.fromkeys(name for seed in seeds for name in of_title["seeds"][seed]))
    lines = [
        f"### {title}: {of_title['measure']}",
        "",
        f"{of_title['date']}, commit {of_title['commit']}, torch {of_title['torch']}, two CPU ranks.",
        "",
        f"| | {' | '.join(f'seed {seed}' for seed in seeds)} |",
        f"|---|{'---|' * len(seeds)}",
    ]
    for name in methods:
        values = [of_title["seeds"][seed].get(name) for seed in seeds]
        cells = ["" if value is None else f"{value:.4g}" for value in values]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(_START)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_START}\n{tables(json.loads(RESULTS.read_text()))}\n{_END}{after}")


if __name__ == "__main__":
    main()
