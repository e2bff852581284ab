"""Convert text with terminal colours to HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

_CONTROL = re.compile(r"\x1b(?:\[([\d;:]*)m|\[[\d;?]*[A-Za-ln-z]|\][^\x07\x1b]*(?:\x07|\x1b\\))")

# These are JupyterLab's own colours, which are readable on a light and on a dark page.
_COLORS = (
    *("#3e424d", "#e75c58", "#00a250", "#ddb62b", "#208ffb", "#d160c4", "#60c6c8", "#c5c1b4"),
    *("#282c36", "#b22b31", "#007427", "#b27d12", "#0065ca", "#a03196", "#258f8f", "#a1a6b2"),
)
_CUBE = (0, 95, 135, 175, 215, 255)
"""The intensities of the 6 x 6 x 6 colour cube in the 256-colour palette."""


@dataclass(frozen=True)
class _Style:
    """The style of text: colours as CSS, empty for the default, and attributes."""

    color: str = ""
    background: str = ""
    bold: bool = False
    italic: bool = False
    underlined: bool = False
    inverse: bool = False

    @property
    def css(self) -> str:
        """The style as CSS. Inverse text exchanges its two colours; a default colour counts as that of the
        page."""
        color, background = self.color, self.background
        if self.inverse:
            color, background = background or "var(--nbgpu-page)", color or "var(--nbgpu-ink)"
        rules = {
            "color": color,
            "background": background,
            "font-weight": "bold" if self.bold else "",
            "font-style": "italic" if self.italic else "",
            "text-decoration": "underline" if self.underlined else "",
        }
        return ";".join(f"{name}:{value}" for name, value in rules.items() if value)


def to_html(text: str) -> str:
    """Escape the text, and turn its colours into spans. Other control sequences are left out."""
    if "\x1b" not in text:
        return html.escape(text, quote=False)
    return "".join(_spans(text))


def _spans(text: str) -> Iterator[str]:
    """Yield each piece of text between control sequences, in the style that the sequences before it have
    set."""
    style = _Style()
    begin = 0
    for control in _CONTROL.finditer(text):
        yield _span(text[begin : control.start()], style)
        begin = control.end()
        # A sequence that sets no style, such as one that moves the cursor, has no first group.
        if control[1] is not None:
            style = _changed(style, [int(code or 0) for code in re.split("[;:]", control[1])])
    yield _span(text[begin:], style)


def _span(text: str, style: _Style) -> str:
    escaped = html.escape(text, quote=False)
    return f'<span style="{style.css}">{escaped}</span>' if escaped and style.css else escaped


def _changed(style: _Style, codes: list[int]) -> _Style:
    """Return a style changed by the codes of one sequence (SGR in ECMA-48). Codes 38 and 48 remove the
    numbers of their colour from the front of the list. Other codes that are not listed change nothing."""
    while codes:
        code = codes.pop(0)
        match code:
            case 0:
                style = _Style()
            case 1 | 22:
                style = replace(style, bold=code == 1)
            case 3 | 23:
                style = replace(style, italic=code == 3)
            case 4 | 24:
                style = replace(style, underlined=code == 4)
            case 7 | 27:
                style = replace(style, inverse=code == 7)
            case 38:
                style = replace(style, color=_any_color(codes))
            case 48:
                style = replace(style, background=_any_color(codes))
            case _ if 30 <= code <= 37 or 90 <= code <= 97:
                # Codes from 90 on are the bright colours, the second row of `_COLORS`.
                style = replace(style, color=_COLORS[code - 30 if code < 90 else code - 82])
            case _ if 40 <= code <= 47 or 100 <= code <= 107:
                style = replace(style, background=_COLORS[code - 40 if code < 100 else code - 92])
            case 39:
                style = replace(style, color="")
            case 49:
                style = replace(style, background="")
    return style


def _any_color(codes: list[int]) -> str:
    """Remove '5;N' (a number of the 256-colour palette) or '2;R;G;B' from the front of the codes, and return
    the colour."""
    kind = codes.pop(0) if codes else 0
    if kind == 5 and codes:
        number = min(codes.pop(0), 255)
        if number < 16:
            return _COLORS[number]
        if number >= 232:
            return _rgb([8 + 10 * (number - 232)] * 3)
        return _rgb([_CUBE[(number - 16) // scale % 6] for scale in (36, 6, 1)])
    if kind == 2 and len(codes) >= 3:
        return _rgb([min(codes.pop(0), 255) for _ in range(3)])
    codes.clear()
    return ""


def _rgb(parts: list[int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in parts)
