"""Words while they are put together: splitting, quotes, and the marks of what is not known."""

from __future__ import annotations

import fnmatch
import re

PLAIN, QUOTED, END = "\ue000", "\ue002", "\ue001"
MARK = re.compile(f"[{PLAIN}{QUOTED}](\\d+){END}")


def bare(text: str) -> str:
    """`text` with what is not known left out."""
    return MARK.sub("", text)


def clean(text: str) -> str:
    """Foreign text without the signs that marks are made of."""
    return re.sub(f"[{PLAIN}{QUOTED}{END}]", "", text)


def unknown_word(text: str) -> bool:
    """Whether an unquoted word is nothing but marks: bash would have no word there."""
    return bool(text) and not bare(text) and QUOTED not in text


class WordBuilder:
    """Words while they are put together."""

    def __init__(self, *, splits: bool = True, pattern: bool = False) -> None:
        self.splits, self.pattern = splits, pattern
        self.made: list[str] = []
        self.open: str | None = None

    def add(self, text: str, *, quoted: bool, literal: bool = False) -> None:
        """A piece of the word; literal: written in the script, where spaces between words are none of the word's."""
        text = text.replace(PLAIN, QUOTED) if quoted else text.replace(QUOTED, PLAIN)
        if quoted and self.pattern:
            text = re.sub(r"([\[*?])", r"[\1]", text)
        if quoted or literal or not self.splits:
            self.open = (self.open or "") + text
            return
        parts = re.split(r"[ \t\n]+", text)
        for at, part in enumerate(parts):
            if at:
                self.close()
            if part:
                self.open = (self.open or "") + part

    def add_all(self, items: list[str], quoted: bool) -> None:
        """`"${A[@]}"`: each item a word of its own, the first and the last joined to what stands beside them."""
        for at, item in enumerate(items):
            if at:
                self.close()
            self.add(item, quoted=quoted and not unknown_word(item))

    def close(self) -> None:
        """Ends the word that is open."""
        if self.open is not None:
            self.made.append(self.open)
        self.open = None

    def whole(self) -> list[str]:
        """All words."""
        self.close()
        return self.made


def braces(raw: str) -> list[str]:
    """`a{1..3}` and `{a,b}`, where neither quotes nor variables stand in the word."""
    found = re.fullmatch(
        r"([^{}\"'`$\\]*)\{(?:(-?\d{1,4})\.\.(-?\d{1,4})|([^{}\"'`$\\]*,[^{}\"'`$\\]*))\}([^{}\"'`$\\]*)", raw
    )
    if found is None:
        return [raw]
    if found[4] is not None:
        inside = found[4].split(",")
    else:
        first, last = int(found[2]), int(found[3])
        step = 1 if last >= first else -1
        inside = [str(one) for one in range(first, last + step, step)]
    return [f"{found[1]}{one}{found[5]}" for one in inside]


def matches(text: str, pattern: str) -> bool:
    """Whether a text fits a pattern of the shell's."""
    return fnmatch.fnmatchcase(bare(text), bare(pattern))
