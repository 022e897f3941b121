"""Narrow output: wraps prose, detects columns too narrow to read, and formats rows as lines instead. Plain text, no library."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

READABLE = 16
"""Width in characters below which a text column breaks words."""
_WELD = "\ue000"
"""Stands for a blank that must not become a line break: a private-use character, which no text contains."""
_GOES_ON = r"(?<![,;:)`])(?<![^\s.]\.) (?!\()"
"""A blank in a clause. A dot alone is a folder, and dots stand for what is left out."""
_ARGUMENT = (
    rf"(?:--[^\s=]*{_GOES_ON}(?!--)\S+|-\S+|\.\.\.|[A-Z][A-Z_]*(?=[\s,;:.)`]|$)|\S*[^\w\s,;:.)`'-]\S*|\S*[,:.)]\w\S*)"
)
"""An option, with its value if that is a word of its own, a placeholder in capitals, or a word with punctuation inside (a path, key=value)."""
_SETTING = r"'?[a-z_]+(?:\.\w+)+=\S+"
_COPIED = re.compile(
    # a command: the words that begin it, and arguments, at most one plain word before each
    rf"(?<!\S)(?:[(`'\"]*(?:mpbridge [^\s(]+|pip [^\s(]+ [^\s(]+|torchrun)(?:{_GOES_ON}(?:\w[\w'-]*{_GOES_ON})?{_ARGUMENT})*"
    rf"|{_SETTING}(?:{_GOES_ON}{_SETTING})+)"
)
"""A command, or several settings, in prose: what is pasted as a whole."""

_UNPRINTABLE = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for first, last in ((0, 8), (11, 31), (127, 159), (0x202A, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF))
    for code in range(first, last + 1)
}
"""Characters that command a terminal, reorder what it shows or cannot be encoded -> as escapes; a tab and a line's end are text."""


def printable(text: str) -> str:
    """A text that a terminal only shows: everything printed passes through here, since any of it may come from a file."""
    return text.translate(_UNPRINTABLE)


def crowded(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, whole: Sequence[bool]) -> bool:
    """Whether the columns, two blanks apart, would be too narrow to read; whole: columns that are never wrapped."""
    longest = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    least = sum(long if kept else min(long, READABLE) for long, kept in zip(longest, whole, strict=True))
    return least + 2 * len(columns) > width


def record(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """A row as lines of at most `width` characters: its first cell, then 'column: text; column: text', further in where it goes on; empty cells are omitted."""
    named = zip(columns[1:], row[1:], strict=True)
    rest = "; ".join(f"{column}: {cell}" if column else cell for column, cell in named if cell)
    first, *more = wrapped(f"{row[0]}  {rest}", width, indent="  ")
    return [first.strip(), *more]


def prose(text: str, width: int | None, *, indent: str = "") -> str:
    """Each line of `text`, indented, in lines of at most `width` characters with its own leading blanks; None: not wrapped."""
    out: list[str] = []
    for line in printable(text).split("\n"):
        whole = f"{indent}{line}"
        words = whole.lstrip(" ")
        fits = width is None or len(whole) <= width
        out += [whole] if fits else wrapped(words, width or 0, indent=" " * (len(whole) - len(words)))
    return "\n".join(out)


def hanging(rows: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    """Names and their texts side by side, a text's further lines below its first; None: texts are not wrapped."""
    column = max(len(name) for name, _ in rows) + 2
    out = []
    for name, text in rows:
        lines = [text] if width is None else wrapped(text, max(width - column, READABLE))
        out += [f"{name:{column}}{lines[0]}", *(" " * column + line for line in lines[1:])]
    return out


def wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    """`text` in lines of at most `width` characters; what is copied can be pasted: a path stays in one piece, and of a command or of settings that take more than a
    line each but the last ends in the backslash that a shell continues."""
    lines = textwrap.wrap(
        _COPIED.sub(lambda found: found[0].replace(" ", _WELD), text),
        max(width, len(indent) + READABLE),
        initial_indent=indent,
        subsequent_indent=indent and f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part for line in lines for part in _continued(line, width)] or [""]


def _continued(line: str, width: int) -> list[str]:
    """A line without welds; one that is too long continues below, further in."""
    whole = line.replace(_WELD, " ")
    if len(whole) <= width:
        return [whole]
    inner = " " * (len(line) - len(line.lstrip(" ")) + 2)
    out, rest = [""], line.split(_WELD)
    for i, word in enumerate(rest):
        grown = f"{out[-1]} {word}" if i else word
        # a backslash in single quotes continues nothing
        fits = len(grown) + 2 * (i + 1 < len(rest)) <= width or out[-1].count("'") % 2
        out[-1:] = [grown] if not i or fits else [f"{out[-1]} \\", f"{inner}{word}"]
    return out
