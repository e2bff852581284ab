"""Replace all references to an object by references to another one: in variables, attributes, containers and
closures."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from types import CellType, FrameType, FunctionType, MemberDescriptorType
from typing import Any

from nbgpu.engine.variables.persons_objects import attributes, is_a

_DEPTH = 3
"""The depth of nested tuples up to which the references in them are replaced."""


def replace(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replace the first object of each pair by the second one in all Python objects that refer to it: in
    variables, attributes, containers and closures.

    Local variables of functions that still run, references held in C++ alone, and objects that were there
    before this process was forked are left alone.

    Raises:
        Exception: what a person's `__hash__` or `__eq__` raised in one object; all others were searched.
    """
    pending = [(old, new) for old, new in pairs if old is not None and old is not new]
    failures: list[Exception] = []
    for _ in range(_DEPTH):
        if not pending:
            break
        new_of = {id(old): new for old, new in pending}
        olds = [old for old, _ in pending]
        # The containers of this function hold the objects too.
        ours = {id(thing) for thing in (pairs, pending, new_of, olds, *pairs, *pending)}
        tuples = []
        for holder in list(_referrers(olds)):
            if id(holder) in ours or is_a(holder, FrameType):
                continue
            try:
                if type(holder) is frozenset:
                    tuples.append((holder, frozenset(new_of.get(id(item), item) for item in holder)))
                elif type(holder) is tuple or (is_a(holder, tuple) and hasattr(type(holder), "_fields")):
                    # By the methods of tuple itself: a namedtuple's own `__new__` takes one argument for each
                    # field.
                    items = (new_of.get(id(item), item) for item in tuple.__iter__(holder))
                    tuples.append((holder, tuple.__new__(type(holder), items)))
                else:
                    _replace_references(holder, new_of)
            except Exception as error:  # noqa: BLE001 - one object may not keep the others from being searched
                failures.append(error)
        # A tuple or a frozenset cannot be changed: a new one takes its place in the next turn.
        pending = tuples
    if failures:
        raise failures[0]


def _referrers(objects: Sequence[Any]) -> Iterator[Any]:
    """Yield the objects that refer to one of these objects, also those that the garbage collector does not
    track."""
    yield from gc.get_referrers(*objects)
    # The collector does not track dicts and tuples that cannot be part of a reference cycle. They are found
    # through the tracked objects that refer to them.
    wanted = set(map(id, objects))
    seen = set()
    for thing in gc.get_referents(*gc.get_objects()):
        if (
            (type(thing) is dict or type(thing) is tuple)
            and id(thing) not in seen
            and not gc.is_tracked(thing)
        ):
            seen.add(id(thing))
            items = chain(thing, thing.values()) if type(thing) is dict else thing
            if not wanted.isdisjoint(map(id, items)):
                yield thing


def _replace_references(holder: Any, new_of: dict[int, Any]) -> None:
    """Replace objects in an object that refers to them: in its items, its attributes and slots, a closure's
    cell, or the default arguments of a function.

    Args:
        holder: the object that refers to them.
        new_of: the new objects, by the ids of the old ones.
    """
    # By the methods of Python's own types, because a subclass of the person's may do other things.
    if is_a(holder, dict):
        _replace_in_dict(holder, new_of)
    elif is_a(holder, (list, deque)):
        sequence: Any = list if is_a(holder, list) else deque
        for index, item in enumerate(sequence.__iter__(holder)):
            if id(item) in new_of:
                sequence.__setitem__(holder, index, new_of[id(item)])
    elif is_a(holder, set):
        for item in [item for item in set.__iter__(holder) if id(item) in new_of]:
            set.discard(holder, item)
            set.add(holder, new_of[id(item)])
    elif is_a(holder, CellType):
        holder.cell_contents = new_of[id(holder.cell_contents)]
    elif is_a(holder, partial):
        if id(holder.args) in new_of or id(holder.func) in new_of:
            function, arguments = (new_of.get(id(part), part) for part in (holder.func, holder.args))
            state = (function, arguments, holder.keywords, vars(holder) or None)
            partial.__setstate__(holder, state)  # type: ignore[attr-defined]
    elif is_a(holder, FunctionType) and id(holder.__defaults__) in new_of:
        holder.__defaults__ = new_of[id(holder.__defaults__)]
    # Python keeps the attributes of most objects without a dict until somebody asks for it.
    _replace_in_dict(attributes(holder), new_of)
    for kind in type(holder).__mro__:
        # By the descriptors of the slots: `__slots__` may be one name, and private names are kept mangled.
        for slot in list(vars(kind).values()) if "__slots__" in vars(kind) else ():
            if type(slot) is MemberDescriptorType:
                with suppress(AttributeError):  # an empty slot
                    value = slot.__get__(holder)
                    if id(value) in new_of:
                        slot.__set__(holder, new_of[id(value)])


def _replace_in_dict(holder: dict[Any, Any], new_of: dict[int, Any]) -> None:
    """Replace objects among the keys and values of a dict, in its order.

    Args:
        holder: the dict, which may be the `__dict__` of a class.
        new_of: the new objects, by the ids of the old ones.
    """
    # None unless these are the attributes of a class, which must be set through the class.
    owner = _class_of_attributes(holder)
    # An OrderedDict has an order of its own, which only its own methods keep.
    kind = OrderedDict if is_a(holder, OrderedDict) else dict
    items = list(kind.items(holder))
    for key, value in items:
        if id(value) in new_of:
            if owner is None:
                kind.__setitem__(holder, key, new_of[id(value)])
            else:
                type.__setattr__(owner, key, new_of[id(value)])
    if any(id(key) in new_of for key, _ in items):
        # A dict, so that a key whose hash raises does so while the holder is still whole.
        renamed = {new_of.get(id(key), key): value for key, value in kind.items(holder)}
        kind.clear(holder)
        for key, value in renamed.items():
            kind.__setitem__(holder, key, value)


def _class_of_attributes(holder: dict[Any, Any]) -> type | None:
    """Return the class whose attributes this dict has; None for other dicts. Attributes of a class must be
    set by `setattr`, because Python keeps them in a cache that only `setattr` renews."""
    if "__module__" not in holder:
        return None
    return next((owner for owner in gc.get_referrers(holder) if is_a(owner, type)), None)
