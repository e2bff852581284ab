"""The text of several ranks as HTML that is safe, and says whose it is."""

from __future__ import annotations

from html.parser import HTMLParser

from nbgpu.client.cells.merging import Block
from nbgpu.client.cells.outputs import FILE, NOTE
from nbgpu.ui.cell.ansi import to_html
from nbgpu.ui.cell.text_html import bundle, page

EVIL = '<script>alert(1)</script> & "quoted" </pre></div>'


class Reader(HTMLParser):
    """What a page would make of the HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if (self.open and self.open[-1] in ("pre", "b", "span", "a")) or "nbgpu-note" in str(
            self.attributes[-1]
        ):
            self.said.append(data)


def test_all_is_escaped() -> None:
    blocks = [
        Block((0,), "stdout", [EVIL]),
        Block((1,), "stderr", [f"\x1b[31m{EVIL}\x1b[0m"]),
        Block((), NOTE, [EVIL]),
        Block((0,), FILE, [EVIL]),
    ]
    read = Reader(page([0, 1], blocks))
    assert "script" not in read.tags
    assert "".join(read.said).count(EVIL) == 4


def test_a_choice_is_there_only_where_the_ranks_differ() -> None:
    alike = [Block((0, 1), "stdout", ["a"]), Block((0, 1), "stderr", ["b"])]
    assert "hidden" in next(
        a for a in Reader(page([0, 1], alike)).attributes if a.get("role") == "radiogroup"
    )
    differ = [*alike, Block((1,), "stdout", ["c"])]
    read = Reader(page([0, 1], differ, chosen="1"))
    radios = [a for a in read.attributes if a.get("type") == "radio"]
    assert [a["aria-label"] for a in radios] == ["all ranks", "rank 0", "rank 1"]
    assert [a["value"] for a in radios if "checked" in a] == ["1"]


def test_two_outputs_never_share_a_choice() -> None:
    names = [
        a["name"] for _ in range(2) for a in Reader(page([0, 1], [])).attributes if a.get("type") == "radio"
    ]
    assert len(set(names)) == 2


def test_blocks_of_the_same_ranks_become_one_with_one_label() -> None:
    blocks = [Block((0, 1), "stdout", ["a"]), Block((0, 1), "stdout", ["b"]), Block((1,), "stdout", ["c"])]
    made = bundle([0, 1], blocks)
    assert made["text/html"].count("[0-1]") == 1
    assert made["text/plain"] == "[0-1] a\n[0-1] b\n[1] c"


def test_colours() -> None:
    assert to_html("a < b") == "a &lt; b"
    assert to_html("\x1b[31mred\x1b[0m plain") == '<span style="color:#e75c58">red</span> plain'
    assert to_html("\x1b[1;38;2;1;2;3mx\x1b[22my") == (
        '<span style="color:#010203;font-weight:bold">x</span><span style="color:#010203">y</span>'
    )
    assert to_html("\x1b[38;5;196mx\x1b[39m\x1b[48;5;232my") == (
        '<span style="color:#ff0000">x</span><span style="background:#080808">y</span>'
    )
    assert to_html("\x1b[91mx\x1b[m\x1b[2K\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\") == (
        '<span style="color:#b22b31">x</span>link'
    )
    assert to_html("\x1b[38;5mx\x1b[38;2;1my") == "xy"
