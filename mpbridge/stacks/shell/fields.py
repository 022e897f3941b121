"""Builds words: splitting, quotes, and the marks of unknown values."""

from __future__ import annotations

import fnmatch
import re

PLAIN, QUOTED, END = "\ue000", "\ue002", "\ue001"
MARK = re.compile(f"[{PLAIN}{QUOTED}](\\d+){END}")


def bare(text: str) -> str:
    """`text` without unknown parts."""
    return MARK.sub("", text)


def clean(text: str) -> str:
    """External text without the characters used for marks."""
    return re.sub(f"[{PLAIN}{QUOTED}{END}]", "", text)


def unknown_word(text: str) -> bool:
    """Whether an unquoted word consists only of marks; bash would have no word there."""
    return bool(text) and not bare(text) and QUOTED not in text


class WordBuilder:
    """Words under construction."""

    def __init__(self, *, splits: bool = True, pattern: bool = False) -> None:
        self.splits, self.pattern = splits, pattern
        self.made: list[str] = []
        self.open: str | None = None

    def add(self, text: str, *, quoted: bool, literal: bool = False) -> None:
        """Adds a piece to the word; literal: written in the script, where spaces do not belong to words."""
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
        """`"${A[@]}"`: each item is a word of its own; the first and the last join adjacent text."""
        for at, item in enumerate(items):
            if at:
                self.close()
            self.add(item, quoted=quoted and not unknown_word(item))

    def close(self) -> None:
        """Ends the current word."""
        if self.open is not None:
            self.made.append(self.open)
        self.open = None

    def whole(self) -> list[str]:
        """All words."""
        self.close()
        return self.made


def braces(raw: str) -> list[str]:
    """`a{1..3}` and `{a,b}`, in words without quotes or variables."""
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
    """Whether a text matches a shell pattern."""
    return fnmatch.fnmatchcase(bare(text), bare(pattern))
