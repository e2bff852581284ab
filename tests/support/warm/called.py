"""One rank of a test without a cluster (`warm_start.on_ranks`): FILE FUNCTION ARGUMENTS, as JSON."""

from __future__ import annotations

import json
import runpy
import sys

if __name__ == "__main__":
    file, function, arguments = sys.argv[1:]
    runpy.run_path(file)[function](*json.loads(arguments))
