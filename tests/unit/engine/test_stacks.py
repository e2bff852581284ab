"""What a rank says of its main thread, whatever its frames are like."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nbgpu.engine.ipykernel import stacks


def test_a_frame_between_two_lines_has_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython gives such a frame no line number, as it did while a cell imported Lightning."""
    code = compile("pass", "/tmp/ipykernel_1/2.py", "exec")
    frame: Any = SimpleNamespace(f_code=code, f_lineno=None, f_lasti=0, f_globals={})
    monkeypatch.setattr(stacks, "is_library", lambda _: False)
    where = stacks._in_person_code("cell", [frame], threading.get_ident())
    assert (where.line, where.source) == (0, "")
