"""Splits a shell script's text into commands, and these into words as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mpbridge.common.errors import BadValue

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BLANK = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*")
_OPERATOR = re.compile(r"\n|;;&?|;&|&&|\|\||\|&|[;&|()]")
_REDIRECTION = re.compile(r"\d*(<<<|<<-?|&>>?|>>|[<>]&|>\||[<>](?!\())")
_INSIDE = re.compile(r"[^\\'\"`$(){}]+|\$(?:\d|[A-Za-z_]\w*|[@*#?$!-])")
_PLAIN = re.compile(r"[^\s\\'\"`$;&|()<>{}]+|\$(?:\d|[A-Za-z_]\w*|[@*#?$!-])")


@dataclass(slots=True)
class Command:
    """One simple command."""

    before: str
    """The operator in front of it."""
    line: int
    words: list[str] = field(default_factory=list)
    """As written: quoted parts with their quotes."""
    target: str = ""
    """The file that its output is written to."""
    after: str = ""
    document: str | None = None
    """A here-document, in a command of its own without words."""
    raw: bool = False
    """Whether its delimiter is quoted, so that nothing in it is expanded."""


def commands(text: str) -> Iterator[Command]:
    """The simple commands of a text, a here-document behind its command. Raises BadValue for a quote or bracket that is never closed."""
    command, at, line, delimiters = Command("", 1), 0, 1, list[str]()
    while at < len(text):
        if blank := _BLANK.match(text, at):
            end = blank.end()
        elif redirection := _REDIRECTION.match(text, at):
            start = redirection.end()
            start = blank.end() if (blank := _BLANK.match(text, start)) else start
            end, kind = _word(text, start, line), redirection[1]
            if kind in ("<<", "<<-"):
                delimiters.append(text[start:end])
            elif kind in (">", ">>", ">|"):
                command.target = text[start:end]
        elif operator := _OPERATOR.match(text, at):
            end, command.after = operator.end(), operator[0].strip("\n")
            if command.words or command.after in ("(", ")"):
                yield command
            bodies = []
            for delimiter in delimiters if operator[0] == "\n" else ():
                start, name = end, delimiter.strip("'\"\\")
                body = re.compile(rf"(.*?)(?:^[ \t]*{re.escape(name)}[ \t]*$\n?|\Z)", re.DOTALL | re.MULTILINE)
                found = body.match(text, start)
                end = found.end() if found else len(text)
                bodies.append(Command("", line, target=command.target, document=found[1] if found else "", raw=name != delimiter))  # fmt: skip
            yield from bodies
            delimiters = delimiters if operator[0] != "\n" else []
            goes_on = operator[0] == "\n" and not command.words
            command = Command(command.before if goes_on else operator[0], line + text.count("\n", at, end))
        else:
            end = _word(text, at, line)
            command.words.append(text[at:end].replace("\\\n", ""))
        line += text.count("\n", at, end)
        at = end
    if command.words:
        yield command


def _word(text: str, at: int, line: int) -> int:
    """Where the word that begins at `at` ends."""
    start = at
    while at < len(text) and (text[at] not in " \t\n;&|)<>" or text.startswith(("<(", ">("), at)):
        if text[at] == "(" and not ASSIGNMENT.fullmatch(text, start, at):
            break
        at = unit_end(text, at, line, ")" if text[at] == "(" else "")
    return at


_STARTS = {"<(": ")", ">(": ")", "$(": ")", "${": "}", "$'": "'", "`": "`", '"': '"', "'": "'", "(": ")"}
"""What begins a part of a word -> what ends it."""


def unit_end(text: str, at: int, line: int, inside: str = "") -> int:
    """Where the escape, the quoted part, the expansion or the run of plain characters at `at` ends. inside: what ends the part around it.

    Raises BadValue for what is never closed.
    """
    if plain := (_INSIDE if inside else _PLAIN).match(text, at):
        return plain.end()
    if text[at] == "\\":
        return min(at + 2, len(text))
    start = next((one for one in _STARTS if text.startswith(one, at)), "")
    if not start or (inside == '"' and start not in ("$(", "${", "`")) or (start == "(" and inside != ")"):
        return at + 1
    close, here = _STARTS[start], at + len(start)
    while here < len(text) and text[here] != close:
        here = here + 1 if close == "'" and start == "'" else unit_end(text, here, line, close)
    if here >= len(text):
        raise BadValue(f"{'a parenthesis' if close in ')}' else 'a quote'} opened in line {line} is never closed")
    return here + 1
