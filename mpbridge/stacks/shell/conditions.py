"""Shell tests, `[ ... ]` and `[[ ... ]]`, on known words."""

from __future__ import annotations

import re

from mpbridge.stacks.shell.fields import bare, matches
from mpbridge.stacks.shell.values import Values

Truth = bool | None
"""None: known only at run time."""
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-lt": "<", "-ge": ">=", "-le": "<="}
_CHANGE = re.compile(r"([A-Za-z_]\w*)\s*(\+\+|--|[-+*/]?=(?!=))\s*([^,;]*)")
_FILES = frozenset(f"-{letter}" for letter in "abcdefghkprstuwxGLNOS")


def holds(words: list[str], values: Values, *, patterns: bool) -> tuple[Truth, list[str], list[str]]:
    """Whether a test is true, the words that it used, and the files that it tests, which are assumed not to exist.

    patterns: the right side of == is a pattern, as inside [[ ]].
    """
    test = _Test(words, values, patterns)
    truth = test.either() if words else False
    if test.at < len(words):  # too many words: bash fails with 'too many arguments'
        truth = False
    return truth, test.seen, test.files


def counts(text: str, values: Values) -> tuple[Truth, list[str]]:
    """Whether `(( text ))` is nonzero, and what it used; an assignment is executed and true."""
    change = _CHANGE.search(text)
    if change is None:
        found = values.arithmetic(text)
        return bare(found) not in ("", "0"), [found]
    name, operator, value = change.groups()
    made = value if operator == "=" else f"{name} {operator[0]} {'1' if operator in ('++', '--') else f'({value})'}"
    values.variables[name] = values.arithmetic(made)
    return True, []


class _Test:
    def __init__(self, words: list[str], values: Values, patterns: bool) -> None:
        self.words, self.values, self.patterns, self.at = words, values, patterns, 0
        self.seen: list[str] = []
        self.files: list[str] = []

    def next(self, ahead: int = 0) -> str | None:
        return self.words[self.at + ahead] if self.at + ahead < len(self.words) else None

    def either(self) -> Truth:
        truth = self.both()
        while self.next() in ("||", "-o"):
            self.at += 1
            other = self.both()
            truth = True if truth or other else None if None in (truth, other) else False
        return truth

    def both(self) -> Truth:
        truth = self.one()
        while self.next() in ("&&", "-a"):
            self.at += 1
            other = self.one()
            truth = False if truth is False or other is False else None if None in (truth, other) else True
        return truth

    def one(self) -> Truth:
        if self.next() == "!" and self.next(1) is not None:
            self.at += 1
            inner = self.one()
            return None if inner is None else not inner
        if self.next() == "(":
            self.at += 1
            truth = self.either()
            self.at += self.next() == ")"
            return truth
        first, operator = self.next(), self.next(1)
        if first is None:
            return False
        if operator in _BINARY and self.next(2) is not None:
            return self.pair(first, str(operator), str(self.next(2)))
        if first in ("-z", "-n") or first in _FILES or first in ("-v", "-t"):
            return self.single(first, operator)
        self.at += 1
        self.seen.append(first)
        return bare(first) != ""

    def single(self, operator: str, word: str | None) -> Truth:
        if word is None:  # without a value, `[ -z $A ]` tests whether the word -z is nonempty, as in bash
            self.at += 1
            return True
        self.at += 2
        self.seen.append(word)
        if operator in ("-z", "-n"):
            return (bare(word) == "") == (operator == "-z")
        if operator == "-v":
            return self.values.get(bare(word)) is not None
        if bare(word) and operator in _FILES:
            self.files.append(f"{operator} {bare(word)}")
        return False

    def pair(self, left: str, operator: str, right: str) -> Truth:
        self.at += 3
        self.seen += [left, right]
        a, b = bare(left), bare(right)
        if operator in ("=", "=="):
            return matches(a, b) if self.patterns else a == b
        if operator == "!=":
            return not matches(a, b) if self.patterns else a != b
        if operator == "=~":
            try:
                return re.search(b, a) is not None
            except re.error:
                return None
        if operator in ("<", ">"):
            return a < b if operator == "<" else a > b
        if operator in ("-nt", "-ot", "-ef"):
            return None
        if self.patterns:  # inside [[ ]] both sides are arithmetic
            a, b = bare(self.values.arithmetic(a)), bare(self.values.arithmetic(b))
        if not (re.fullmatch(r"\s*-?\d+\s*", a) and re.fullmatch(r"\s*-?\d+\s*", b)):
            return False
        x, y = int(a), int(b)
        return {"==": x == y, "!=": x != y, ">": x > y, "<": x < y, ">=": x >= y, "<=": x <= y}[_NUMBERS[operator]]


_BINARY = frozenset({"=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef", *_NUMBERS})
