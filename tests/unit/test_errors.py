"""The exception tree, and what IPython shows of a rank's failure."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from nbgpu import errors
from nbgpu.errors import NbgpuError, RankError
from nbgpu.protocol.records import RankFailure


def _exceptions() -> dict[str, type[Exception]]:
    return {
        name: member
        for name, member in inspect.getmembers(errors, inspect.isclass)
        if issubclass(member, Exception) and member.__module__ == errors.__name__
    }


def test_the_tree_drawn_in_the_module_is_the_tree_in_the_code() -> None:
    """Each drawn line: indentation gives the parent, '(also a ...)' the built-in that it also is."""
    path: list[str] = []
    drawn: dict[str, tuple[str | None, str | None]] = {}
    for line in str(errors.__doc__).splitlines():
        if match := re.match(r"^(?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+Error)\b(?P<rest>.*)$", line):
            depth = (len(match["indent"]) + 3) // 4
            path[depth:] = [match["name"]]
            also = re.search(r"also an? (\w+)", match["rest"])
            drawn[match["name"]] = (path[depth - 1] if depth else None, also and also[1])

    found = _exceptions()
    assert set(drawn) == set(found)
    for name, (parent, also) in drawn.items():
        bases = [base.__name__ for base in found[name].__bases__]
        assert bases == [base for base in (parent or "Exception", also) if base]


def test_all_that_is_raised_on_purpose_is_caught_by_the_root() -> None:
    for exception in _exceptions().values():
        assert issubclass(exception, NbgpuError)


def _failure(rank: int, traceback: str = "Traceback\nValueError: no") -> RankFailure:
    return RankFailure(rank, "ValueError", "no", traceback)


def test_a_rank_error_names_every_rank_in_its_message() -> None:
    error = RankError([_failure(0), _failure(3)])
    assert str(error) == "ranks 0, 3: ValueError: no"
    assert error.failures == (_failure(0), _failure(3))


def test_the_same_traceback_is_shown_once_for_all_its_ranks() -> None:
    shown = RankError([_failure(0), _failure(1, "other"), _failure(2)])._render_traceback_()
    assert shown == ["on ranks 0, 2:", "Traceback", "ValueError: no", "on rank 1:", "other"]


def test_a_rank_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(RankError([_failure(1)])))
    assert error.failures == (_failure(1),)


@pytest.mark.parametrize("exception", [e for e in _exceptions().values() if e is not RankError])
def test_an_error_keeps_its_message(exception: type[Exception]) -> None:
    assert str(exception("what and what next")) == "what and what next"
