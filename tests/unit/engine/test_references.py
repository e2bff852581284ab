"""One object takes the place of another wherever Python keeps it."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque, namedtuple
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from nbgpu.engine.variables import references

Pair = namedtuple("Pair", "group size")


class _Plain:
    group: Any = None


class _Slotted:
    __slots__ = ("group",)


class _OneSlot:
    __slots__ = "group"


class _PrivateSlot:
    __slots__ = ("__group",)

    def __init__(self, group: Any) -> None:
        self.__group = group

    def get(self) -> Any:
        return self.__group


class _Dict(dict[Any, Any]):
    group: Any = None


class _List(list[Any]):
    group: Any = None

    def __iter__(self) -> Any:
        raise RuntimeError("not now")


class _Set(set[Any]):
    group: Any = None

    def add(self, _: Any) -> None:
        raise RuntimeError("not now")


class _Deque(deque[Any]):
    group: Any = None


class _Partial(partial[Any]):
    pass


class _WithoutHash:
    """Has a hash until it is in a dict."""

    in_dict = False

    def __hash__(self) -> int:
        if self.in_dict:
            raise RuntimeError("it has no hash now")
        return 0


def _closure(group: Any) -> Any:
    return lambda: group


def _with_default(group: Any) -> Any:
    def default(kept: Any = group) -> Any:
        return kept

    return default


def _attribute(owner: Any, group: Any) -> Any:
    owner.group = group
    return lambda: owner.group


def _of_class(group: Any) -> Any:
    kind = type("Kind", (), {"group": group})
    assert kind.group is group  # type: ignore[attr-defined] # it is in the cache of attributes
    return lambda: kind.group  # type: ignore[attr-defined]


def _held(container: Any, get: Any) -> Any:
    return lambda: get(container)


KEEPERS = {
    "an attribute": lambda group: _attribute(_Plain(), group),
    "a slot": lambda group: _attribute(_Slotted(), group),
    "the only slot": lambda group: _attribute(_OneSlot(), group),
    "a private slot": lambda group: _PrivateSlot(group).get,
    "an attribute of a class": _of_class,
    "an attribute of a person's dict": lambda group: _attribute(_Dict(), group),
    "an attribute of a person's list": lambda group: _attribute(_List(), group),
    "an attribute of a person's set": lambda group: _attribute(_Set(), group),
    "an attribute of a person's deque": lambda group: _attribute(_Deque(), group),
    "a person's list": lambda group: _held(_List([group]), lambda values: values[0]),
    "a person's set": lambda group: _held(_Set({group}), lambda values: next(iter(values))),
    "an argument of a person's partial": lambda group: _held(
        _Partial(print, group), lambda call: call.args[0]
    ),
    "a dict": lambda group: _held({"a": group}, lambda d: d["a"]),
    "a key": lambda group: _held({group: 1}, lambda d: next(iter(d))),
    "a dict in a dict": lambda group: _held({"a": {"b": group}}, lambda d: d["a"]["b"]),
    "a list": lambda group: _held([group], lambda values: values[0]),
    "a deque": lambda group: _held(deque([group]), lambda values: values[0]),
    "a set": lambda group: _held({group}, lambda values: next(iter(values))),
    "a tuple in a list": lambda group: _held([(1, group)], lambda values: values[0][1]),
    "a tuple in a tuple": lambda group: _held([((group,), 1)], lambda values: values[0][0][0]),
    "a named tuple": lambda group: _held([Pair(group, 2)], lambda values: values[0].group),
    "a key of an ordered dict": lambda group: _held(OrderedDict({group: 1, "b": 2}), lambda d: next(iter(d))),
    "a frozenset in a list": lambda group: _held([frozenset([group])], lambda values: next(iter(values[0]))),
    "an argument of a partial": lambda group: _held(partial(print, 1, group), lambda call: call.args[1]),
    "a closure": _closure,
    "a default": _with_default,
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_an_object_is_replaced_in(keeper: str) -> None:
    # The garbage collector tracks no store, as it tracks no process group, and looks into no dict of such.
    before = dist.HashStore()
    get = KEEPERS[keeper](before)
    for _ in range(3):
        gc.collect()
        now = dist.HashStore()
        references.replace([(before, now)])
        assert get() is now
        before = now


def test_the_order_of_a_dict_stays() -> None:
    before, now = dist.HashStore(), dist.HashStore()
    held = _held([kind({1: "a", before: before, 2: "c"}) for kind in (dict, OrderedDict)], list)
    references.replace([(before, now)])
    assert [list(each.items()) for each in held()] == [[(1, "a"), (now, now), (2, "c")]] * 2


def test_an_object_that_raises_keeps_no_other_from_being_searched() -> None:
    before, now = dist.HashStore(), dist.HashStore()
    key = _WithoutHash()
    holders = [[before], {key: 1, before: 2}, [before]]
    key.in_dict = True
    with pytest.raises(RuntimeError, match="it has no hash now"):
        references.replace([(before, now)])
    key.in_dict = False
    first, raising, last = holders
    assert first == last == [now]
    # What could not be renamed is still there.
    assert raising == {key: 1, before: 2}
