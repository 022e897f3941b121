"""Splits shell text into words and operators: quotes, nesting, comments, here-documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpbridge.errors import BadValue

DEEPEST = 60
"""Maximum nesting of constructs; real launch scripts have a handful."""
_CLOSERS: Mapping[str, str] = MappingProxyType({"${": "}", "$(": ")", '"': '"', "`": "`", "(": ")"})
_ARRAY = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]*\])?\+?=$")
_OPERATORS = ("<<<", "<<-", "&>>", "&&", "||", ";;&", ";;", ";&", "|&", "<<", ">>", ">&", "<&", "<>", "&>", ">|", "|", "&", ";", "<", ">", "(", ")")  # fmt: skip


@dataclass(slots=True)
class Here:
    """The text of a here-document or here-string."""

    text: str = ""
    literal: bool = False
    word: bool = False
    """A here-string: one word, expanded like any other."""
    """Whether its end word was quoted, so that nothing is expanded."""


@dataclass(frozen=True, slots=True)
class Token:
    """A word, an operator, the end of a line or of the text."""

    kind: str
    """'word', 'op', 'newline' or 'end'."""
    text: str
    start: int


def words_of(text: str) -> list[str]:
    """The words of an array literal: line ends count as spaces, comments are dropped."""
    lexer, found = Lexer(text, []), []
    while (token := lexer.take()).kind != "end":
        if token.kind == "word":
            found.append(token.text)
    return found


def end_of(text: str, at: int) -> int:
    """Position after the quote, `${...}`, `$(...)` or backtick that starts at `at`; -1 if it is never closed; at + 1 for a plain character."""
    sign = text[at]
    if sign == "'":
        return text.find("'", at + 1) + 1 or -1
    if sign == "`":
        return closing(text, at + 1, "`")
    if sign == '"':
        return closing(text, at + 1, '"')
    if sign == "$" and text[at + 1 : at + 2] in ("{", "("):
        return closing(text, at + 2, "}" if text[at + 1] == "{" else ")")
    if sign == "$" and text[at + 1 : at + 2] == "'":
        found = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL).match(text, at + 2)
        return found.end() if found else -1
    return at + (2 if sign == "\\" else 1)


def closing(text: str, at: int, closer: str) -> int:
    """Position after the `closer` of what opened before `at`, respecting quotes and nesting; -1 without one."""
    nested = [closer]
    while nested and 0 <= at < len(text):
        if text[at] == nested[-1]:
            nested.pop()
            at += 1
        else:
            behind = _skipped(text, at, nested[-1])
            at = _entered(text, at, nested) if behind is None else behind
    return -1 if nested else at


def _skipped(text: str, at: int, closer: str) -> int | None:
    """Position after the escape, single quotes or comment that starts at `at` inside what `closer` ends; -1 without an end, None for other characters."""
    sign, ansi = text[at], text.startswith("$'", at)
    if closer == '"' and (ansi or sign == "'"):  # plain characters between double quotes
        return at + 1
    if ansi or sign in ("\\", "'"):
        return end_of(text, at)
    if sign == "#" and closer == ")" and text[at - 1] in " \t\n":
        return text.find("\n", at)
    return None


def _entered(text: str, at: int, nested: list[str]) -> int:
    """Position after the character at `at`; if it opens a construct, its closer is added to `nested`. Raises BadValue past the bound."""
    sign = text[at : at + 2] if text[at : at + 2] in _CLOSERS else text[at]
    plain = (sign == "`" and "`" in nested) or (sign == "(" and nested[-1] != ")")
    if sign in _CLOSERS and not plain:
        nested.append(_CLOSERS[sign])
        if len(nested) > DEEPEST:
            raise BadValue(f"this script nests more than {DEEPEST} constructs")
    return at + len(sign)


class Lexer:
    """Words and operators, one at a time."""

    def __init__(self, text: str, notes: list[str]) -> None:
        self.text, self.notes, self.at = text, notes, 0
        self.waiting: list[tuple[str, bool, Here]] = []
        """Here-documents whose text begins after the next line end: end word, whether tabs are stripped, target."""

    def line(self, at: int) -> int:
        """The line number of a position, from 1."""
        return self.text.count("\n", 0, at) + 1

    def peek(self) -> Token:
        """The next token, without consuming it."""
        at, waiting = self.at, self.waiting
        self.waiting = []  # their text is read when the line end is consumed, not when it is peeked
        token = self.take()
        self.at, self.waiting = at, waiting
        return token

    def take(self) -> Token:
        """Consumes the next token."""
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t\r":
                self.at += 1
            elif text.startswith(("\\\n", "\\\r\n"), self.at):
                self.at = text.index("\n", self.at) + 1
            elif text[self.at] == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                break
        start = self.at
        if start >= len(text):
            return Token("end", "", start)
        if text[start] == "\n":
            self.at += 1
            self._here_documents()
            return Token("newline", "\n", start)
        if text[start] in "|&;<>()" and not (text[start] in "<>" and text[start + 1 : start + 2] == "("):
            operator = next(sign for sign in _OPERATORS if text.startswith(sign, start))
            self.at += len(operator)
            return Token("op", operator, start)
        return Token("word", self._word(), start)

    def _word(self) -> str:
        text, start = self.text, self.at
        while self.at < len(text):
            sign = text[self.at]
            if sign == "(" and (_ARRAY.fullmatch(text[start : self.at]) or text[self.at - 1] in "<>"):
                self._past(closing(text, self.at + 1, ")"), "a parenthesis")
            elif sign in " \t\r\n|&;()" or (sign in "<>" and text[self.at + 1 : self.at + 2] != "("):
                break
            else:
                self._past(end_of(text, self.at), "a quote" if sign in "\"'" else f"{text[self.at : self.at + 2]!r}")
        return text[start : self.at]

    def _past(self, end: int, what: str) -> None:
        """Advances to `end`; if nothing closes, to the end of the line for a quote, otherwise to the end of the text."""
        if end < 0:
            line_end = self.text.find("\n", self.at)
            to_line = what == "a quote" and line_end >= 0
            until = "that line" if to_line else "the text"
            self.notes.append(
                f"{what} opened in line {self.line(self.at)} is never closed: assumed to end with {until}"
            )
            end = line_end if to_line else len(self.text)
        self.at = min(end, len(self.text))

    def _here_documents(self) -> None:
        for end_word, tabs, here in self.waiting:
            lines: list[str] = []
            closed = False
            while self.at < len(self.text) and not closed:
                line_end = self.text.find("\n", self.at)
                line_end = len(self.text) if line_end < 0 else line_end
                line = self.text[self.at : line_end]
                self.at = min(line_end + 1, len(self.text))
                line = line.lstrip("\t") if tabs else line
                closed = line.rstrip("\r") == end_word
                lines += [] if closed else [line]
            if not closed:
                self.notes.append(f"the here-document that ends at {end_word} is never closed: read to the end")
            here.text = "".join(f"{line}\n" for line in lines)
        self.waiting = []

    def inside_test(self) -> list[str]:
        """The words of `[[ ... ]]` up to its end, operators as words."""
        found: list[str] = []
        text = self.text
        while self.at < len(text):
            sign = text[self.at]
            if sign in " \t\r\n" or text.startswith("\\\n", self.at):
                self.at += 2 if sign == "\\" else 1
                continue
            if found and found[-1] == "=~":
                end = re.compile(r"(?:\"[^\"]*\"|'[^']*'|\\.|\S)*").match(text, self.at)
                assert end is not None
                found.append(end[0])
                self.at = end.end()
                continue
            operator = next((one for one in ("&&", "||", "(", ")", "<", ">") if text.startswith(one, self.at)), None)
            if operator:
                self.at += len(operator)
                found.append(operator)
                continue
            before = self.at
            word = self._word()
            if word == "]]":
                return found
            if self.at == before:  # a stray operator: the test ends here
                break
            found.append(word)
        self.notes.append("a [[ test is never closed: assumed to end there")
        return found
