"""What hardly any rank uses is loaded when it is used, and works then."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
import nbgpu.engine
from jsonschema import FormatChecker

def is_loaded():
    return "lark" in sys.modules

formats = FormatChecker()
before = is_loaded()
print(before, formats.conforms("https://example.org/a", "iri"), formats.conforms("not one", "iri"), is_loaded())
import rfc3987_syntax
print(rfc3987_syntax.RFC3987_SYNTAX_PARSER_TYPE, rfc3987_syntax.__name__)
"""


@pytest.mark.slow
def test_a_grammar_is_built_when_an_address_is_checked() -> None:
    pytest.importorskip("rfc3987_syntax")
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=360
    )
    assert done.stdout.splitlines() == ["False True False True", "earley rfc3987_syntax"]
