"""Fill in the templates of the exported files, which are in the folder `templates`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources


def filled(file: str, values: Mapping[str, str]) -> str:
    """Return a template with `@{name}` replaced by values.

    A line that consists of a name whose value is empty is left out. A value of several lines is indented as
    it is given.
    """
    text = (resources.files("nbgpu.exports") / "templates" / file).read_text()
    lines = []
    for line in text.splitlines():
        whole = re.fullmatch(r"@\{(\w+)\}", line)
        if whole and not values[whole[1]]:
            continue
        lines.append(re.sub(r"@\{(\w+)\}", lambda found: values[found[1]], line))
    return "\n".join(lines) + "\n"
