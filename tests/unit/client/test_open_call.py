"""Which call the cursor is in, while its text is being typed."""

from __future__ import annotations

import pytest

from nbgpu.client.notebook.settings_help import open_call


@pytest.mark.parametrize(
    ("text", "callee", "arguments", "typed"),
    [
        ("f(", "f", (), ""),
        ("f(1, 'a', b", "f", ("1", " 'a'"), " b"),
        ("x = a.b().c(d, e=[1, 2], f=(3,\n 4), g", "a.b().c", ("d", " e=[1, 2]", " f=(3,\n 4)"), " g"),
        ("g(f(1), 2, ", "g", ("f(1)", " 2"), " "),
        ("g(f(1, ", "f", ("1",), " "),
        ("f('it, (has', 'commas', \"it's\", ", "f", ("'it, (has'", " 'commas'", ' "it\'s"'), " "),
        ("f('''a,\n(b''', ", "f", ("'''a,\n(b'''",), " "),
        ("f(r'a\\'(, ', ", "f", ("r'a\\'(, '",), " "),
        ("# f(\ng(1,  # a, b\n ", "g", ("1",), "  # a, b\n "),
        ("f) g(h", "g", (), "h"),
    ],
)
def test_the_innermost_open_call_is_found(
    text: str, callee: str, arguments: tuple[str, ...], typed: str
) -> None:
    call = open_call(text)
    assert call is not None
    assert (call.callee, call.arguments, call.typed, call.in_string) == (callee, arguments, typed, False)


@pytest.mark.parametrize(
    "text", ["", "f", "f(1)", "f([1, ", "f({", "(", "(1, ", "f(1, # g(", "'f(", "x = 'f(' + "]
)
def test_where_no_call_is_open_there_is_none(text: str) -> None:
    assert open_call(text) is None


@pytest.mark.parametrize(
    ("text", "keyword", "begun"),
    [("f('au", "", "au"), ('f(1, amp="b', "amp", "b"), ("f(amp='", "amp", ""), ('f("a", b="""c', "b", "c")],
)
def test_a_string_that_is_being_typed_is_told_apart(text: str, keyword: str, begun: str) -> None:
    call = open_call(text)
    assert call is not None
    assert (call.in_string, call.keyword, call.begun_string) == (True, keyword, begun)


def test_what_stands_before_the_cursor_is_read() -> None:
    call = open_call('train("survival", lr=1e-3, amp == 3, steps=5, ')
    assert call is not None
    assert call.first_string == "survival"
    assert call.keywords == {"lr", "steps"}
    assert call.keyword == ""
