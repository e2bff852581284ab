"""docs/words.md explains each term once, and docs and messages use one word for one thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
SOURCES = sorted((REPOSITORY / "nbgpu").rglob("*.py"))

IN_PLACE_OF = {
    r"anew": "again",
    r"director(y|ies)": "folder",
    r"one's own": "your own",
    r"whole checkpoints?": "intact checkpoint",
    r"(several|the same) hosts?": "machine",
    r"mini-batch(es)?": "batch",
    r"rehears(al|e[sd]?)": "dry run",
    r"nursery": "fork server",
}
"""What is not written in docs and messages, and the word of docs/words.md that stands there."""

NOT_PROSE = re.compile(r"<!-- .*?-->|^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def _terms(text: str) -> list[str]:
    """The terms that lines such as '- **rank**: ...' explain."""
    return [
        term.lower()
        for line in re.findall(r"^- (\*\*.*?)(?::|\()", text, re.MULTILINE)
        for term in re.findall(r"\*\*(.+?)\*\*", line)
    ]


def test_each_term_is_explained_once() -> None:
    terms = _terms((DOCS / "words.md").read_text())
    assert len(terms) > 60
    assert sorted(terms) == sorted(set(terms))
    words = (DOCS / "design.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    of_the_source = set(re.findall(r"^\| ([a-z ]+) \|", words, re.MULTILINE)) - {"word"}
    assert of_the_source
    assert not of_the_source & set(terms), "these are explained on both pages"


@pytest.mark.parametrize("page", ["index.md", "start.md", "tour.md", "design.md"])
def test_the_words_are_a_link_away(page: str) -> None:
    assert "](words.md)" in (DOCS / page).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_has_one_word_for_one_thing(page: Path) -> None:
    assert list(_other_words(NOT_PROSE.sub("", page.read_text()))) == []


@pytest.mark.slow
def test_messages_and_descriptions_have_one_word_for_one_thing() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}: {other}"
        for path in SOURCES
        for line, text in _texts(path)
        for other in _other_words(text)
    ]
    assert found == []


def _other_words(text: str) -> Iterator[str]:
    for other, word in IN_PLACE_OF.items():
        for match in re.finditer(rf"\b{other}\b", text, re.IGNORECASE):
            yield f"'{match[0]}': write '{word}'"


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Each text of a module that is long enough for a sentence and no docstring, with its line."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if " " in node.value.strip():
            yield node.lineno, node.value
