"""Splits a shell script's text into commands and words, and expands its words: variables with their defaults and arrays. Nothing is run.

What only running would tell (a substitution, a length, a pattern) becomes GAP, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpbridge.common.errors import BadValue, cut
from mpbridge.common.files import LIMITS

LIMIT = LIMITS["launch script"]
GAP = "\0"
"""Stands in a word for what only running the script would tell."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_UNQUOTED = re.compile(r"[^'\"$]*")
_BRACES = re.compile(r"\{[^{}]*\}")
_OPERATOR = re.compile(r"\n|;;&?|;&|&&|\|\||\|&|[;&|()]")
_REDIRECTION = re.compile(r"\d*(<<<|<<-?|&>>?|>>|[<>]&|>\||[<>])")


@dataclass(frozen=True, slots=True)
class Value:
    """What a variable holds."""

    words: tuple[str, ...] = ("",)
    array: bool = False
    notes: tuple[str, ...] = ()
    """What its content depends on that is not followed."""


@dataclass
class Command:
    """One simple command."""

    words: list[str] = field(default_factory=list)
    """As written: quoted parts with their quotes."""
    before: str = ""
    """The operator in front of it."""
    after: str = ""
    line: int = 1


class Expansions:
    """A script's variables, and the words that they make."""

    def __init__(self, env: Mapping[str, str], path: Path | None) -> None:
        self.env, self.asked = env, set[str]()
        self.values = {name: Value((value,)) for name, value in env.items()}
        self.values |= {"PWD": Value((".",)), "0": Value((str(path) if path else "script.sh",))}
        self.notes: list[str] = []
        self.documents: dict[str, str] = {}
        """File -> the here-document that is written to it."""
        self.left = LIMIT.steps
        self.moved = False
        """Whether the script changes its own arguments."""

    def spend(self, words: Iterable[str], notes: int = 0) -> None:
        """Pays for a text that is followed, or for words that are copied with so many notes. Raises BadValue once nothing is left.

        Without it a line of fifty characters that evaluates itself twice has no end, and copies of variables fill the memory.
        """
        self.left -= notes + sum(len(word) + 1 for word in words)
        if self.left < 0:
            raise BadValue(f"the script's values have more than {LIMIT.steps:,} characters once they are expanded")

    def commands(self, text: str) -> Iterator[Command]:
        """The simple commands of a text. Raises BadValue for a quote or bracket that is never closed."""
        command = Command()
        target = ""
        for kind, written, line in _tokens(text, self.notes):
            if kind == "word":
                command.words.append(written)
                target = ""
            elif kind == "target":
                target = written
            elif "document" in kind and target:
                self.spend([written])
                body = [written] if kind == "raw document" else self.one(written, quoted=True)[0]
                self.documents["".join(self.one(target)[0])] = " ".join(body)
            if kind != "operator":
                continue
            command.after = written.strip("\n")
            if command.words or command.after in ("(", ")"):
                yield command
            command = Command(before=written, line=line + (written == "\n"))

    def expanded(self, words: list[str]) -> tuple[list[str], list[str]]:
        """The words that a command gets, and what they depend on."""
        made, notes = list[str](), list[str]()
        for word in words:
            found, more = self.one(word, split=True)
            if _has_braces(word):
                found, more = [GAP], [f"{cut(word)} is not expanded: not decided"]
            made += found
            notes += more
        return made, list(dict.fromkeys(notes))

    def one(self, text: str, *, split: bool = False, quoted: bool = False) -> tuple[list[str], list[str]]:
        """The words of one written word. split: whether unquoted values are split at blanks. quoted: as inside double quotes."""
        done: list[str] = []
        notes: list[str] = []
        current: str | None = "" if quoted else None
        at = 0

        def add(values: list[str], apart: bool) -> None:
            nonlocal current
            for number, value in enumerate(values):
                if number and apart:
                    done.append(current or "")
                    current = value
                else:
                    current = (current or "") + (" " if number else "") + value

        while at < len(text):
            char = text[at]
            end = _piece(text, at, 0, quoted=quoted)
            piece = text[at:end]
            if char == "\\":
                current = (current or "") + (piece[1:] if not quoted or piece[1:] in '$`"\\' else piece)
            elif char == "'" and not quoted:
                current = (current or "") + piece[1:-1]
            elif char == '"' and not quoted:
                inside, more = self.one(piece[1:-1], quoted=True)
                notes += more
                add(inside, True)
                current = "" if current is None and inside else current
            elif char in "$`" and len(piece) > 1:
                values, more, array = self.value(piece)
                notes += more
                if quoted:
                    if array and not values and not done and text == piece:
                        return [], notes
                    add(values, array)
                elif split:
                    parts = [part for value in values for part in value.split()]
                    lead = bool(values) and values[0][:1].isspace()
                    if parts and current is not None and lead:
                        done.append(current)
                        current = None
                    add(parts, True)
                else:
                    current = (current or "") + " ".join(values)
            else:
                current = (current or "") + piece
            at = end
        return (done if current is None else [*done, current]), notes

    def value(self, piece: str) -> tuple[list[str], list[str], bool]:
        """(values, what they depend on, whether they are words of their own in quotes) of `$NAME`, `${...}`, `$(...)`."""
        if piece.startswith(("`", "$(", "$'")):
            return [GAP], [f"{cut(' '.join(piece.split()))} is not run: not decided"], False
        inside = piece[2:-1] if piece.startswith("${") else piece[1:]
        found = re.fullmatch(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=+])(.*))?", inside, re.DOTALL)
        if found is None or found[1] in "#?$!-" or (self.moved and not found[1].isidentifier()):
            return [GAP], [f"{cut(piece)} is not followed: not decided"], False
        name, operator = found[1], found[3] or ""
        held = self.values.get(name)
        self.asked.add(name)
        if name in "@*":
            numbered = [self.env[n] for n in sorted(filter(str.isdecimal, self.env), key=int) if int(n)]
            return numbered, [] if numbered else ['"$@" has no values: assumed empty (--env 1=...)'], True
        present = held is not None and (any(held.words) or ":" not in operator)
        if operator.endswith("+"):
            held, present = None, not present
        if operator and not present:
            if (operator.endswith("+") and found[1] in self.values) or not operator.endswith("+"):
                words, notes = self.one(found[4], quoted=True)
                made = [" ".join(words)]
                if operator.endswith("="):
                    self.values[name] = Value(tuple(made), notes=tuple(notes))
                return made, notes, False
            return [""], [], False
        if held is None:
            missing = not operator
            return [""], [f"${name} has no value: assumed empty (--env {name}=...)"] if missing else [], False
        words = list(held.words) if not held.array or found[2] else list(held.words[:1])
        self.spend(words, len(held.notes))
        return words, list(held.notes), bool(found[2]) and found[2] == "[@]"


def _tokens(text: str, notes: list[str]) -> Iterator[tuple[str, str, int]]:
    """(kind, as written, line): words and operators without comments, the last a line's end; the targets of output, and here-documents ('raw': in quotes)."""
    at, line, start = 0, 1, 0
    dropped, into, documents = False, False, list[str]()
    while at < len(text):
        if text.startswith("\\\n", at):
            at, line = at + 2, line + 1
            continue
        if at == start and (found := _REDIRECTION.match(text, at)):
            start = at = found.end()
            dropped, into = True, found[1] in (">", ">>", ">|")
            documents += [""] if found[1] in ("<<", "<<-") else []
            continue
        array = text[at] == "(" and ASSIGNMENT.fullmatch(text, start, at)
        operator = None if array else _OPERATOR.match(text, at)
        if not (operator or text[at] in " \t" or (text[at] in "<>" and not text[start:at].isdigit())):
            end = text.find("\n", at) if at == start and text[at] == "#" else _piece(text, at, line, array=bool(array))
            end = len(text) if end < 0 else end
            start = end if at == start and text[at] == "#" else start
            line += text.count("\n", at, end)
            at = end
            continue
        written = text[start:at].replace("\\\n", "")
        if written and documents and not documents[-1]:
            documents[-1], dropped = written, False
        elif written:
            if not dropped or into:
                yield "target" if dropped else "word", written, line
            dropped = False
        if operator:
            yield "operator", operator[0], line
        at += len(operator[0]) if operator else text[at] in " \t"
        if operator and operator[0] == "\n":
            line += 1
            for name in filter(None, documents):
                delimiter = name.strip("'\"\\")
                body = _document(text, at, delimiter)
                notes.append(f"line {line - 1}: a here-document is not read")
                yield "document" if delimiter == name else "raw document", "".join(body[:-1]), line
                at, line = at + sum(map(len, body)), line + len(body)
            documents = []
        start = at
    if text[start:] and not dropped:
        yield "word", text[start:].replace("\\\n", ""), line
    yield "operator", "\n", line


def _has_braces(text: str) -> bool:
    """Whether the shell expands braces in a word, {a,b} or {1..3}, before its first quote or variable."""
    unquoted = _UNQUOTED.match(text)
    return any("," in found or ".." in found for found in _BRACES.findall(unquoted[0] if unquoted else ""))


def _document(text: str, at: int, name: str) -> list[str]:
    """The lines of a here-document, the last of which is its name, or ends the text."""
    lines = list[str]()
    while at < len(text) and (not lines or lines[-1].strip() != name):
        end = text.find("\n", at)
        lines.append(text[at:] if end < 0 else text[at : end + 1])
        at += len(lines[-1])
    return lines


def _piece(text: str, at: int, line: int, *, quoted: bool = False, array: bool = False) -> int:
    """Where the quoted part, the expansion or the plain characters that begin at `at` end. Raises BadValue for what is never closed."""
    char, after = text[at], text[at + 1 : at + 2]
    if char == "\\":
        return min(at + 2, len(text))
    if array or char == "`" or (char in "'\"" and not quoted):
        return _closing(text, at, line)
    if char == "$" and after and (after in "({" or (after == "'" and not quoted)):
        return _closing(text, at + 1, line)
    if char == "$" and after:
        found = re.compile(r"\w+|[@*#?$!-]").match(text, at + 1)
        return at + 1 if found is None else at + 2 if found[0][0].isdigit() else found.end()
    found = re.compile(r"[^\s\\'\"`$;&|()<>]+" if not quoted else r"[^\\`$]+").match(text, at)
    return at + 1 if found is None else found.end()


def _closing(text: str, at: int, line: int) -> int:
    """Behind the quote or bracket that closes the one at `at`. Raises BadValue where there is none."""
    stack = [text[at]]
    here = at + 1
    closes = {"(": ")", "{": "}", "`": "`", '"': '"', "'": "'"}
    while here < len(text):
        char, top = text[here], stack[-1]
        if top == "'":
            stack = stack[:-1] if char == "'" else stack
        elif char == "\\":
            here += 1
        elif char == closes[top]:
            stack.pop()
        elif (
            char in '`"'
            or (char == "'" and top != '"')
            or (char in "({" and (top != '"' or text[here - 1] == "$") and (char == "(" or text[here - 1] == "$"))
        ):
            stack.append(char)
        here += 1
        if not stack:
            return here
    what = "a quote" if text[at] in "'\"`" else "a parenthesis"
    raise BadValue(f"{what} opened in line {line} is never closed")
