"""Parses shell text into commands; nothing is looked up or run. An incomplete script is read as far as possible, with a note."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mpbridge.errors import BadValue
from mpbridge.stacks.shell.lexer import DEEPEST, Here, Lexer, Token, closing

_REDIRECTS = frozenset({"<<<", "<<-", "&>>", "<<", ">>", ">&", "<&", "<>", "&>", ">|", "<", ">"})
_CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})


@dataclass(frozen=True, slots=True)
class Command:
    """Words as written, including quotes."""

    words: tuple[str, ...]
    inputs: tuple[Here, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands joined by `&&` and `||`: each with its preceding operator ('' for the first)."""

    items: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class Pipe:
    """Commands joined by `|`; negated: by a leading `!`."""

    parts: tuple[Node, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class If:
    """Branches in order; an `else` is a last branch without a condition."""

    branches: tuple[tuple[CommandList | None, CommandList], ...]


@dataclass(frozen=True, slots=True)
class CaseCommand:
    """A word and its clauses: patterns, body, what ends it."""

    word: str
    clauses: tuple[tuple[tuple[str, ...], CommandList, str], ...]


@dataclass(frozen=True, slots=True)
class For:
    """words: None: the positional parameters."""

    name: str
    words: tuple[str, ...] | None
    body: CommandList


@dataclass(frozen=True, slots=True)
class While:
    """until: the condition is negated."""

    condition: CommandList
    body: CommandList
    until: bool


@dataclass(frozen=True, slots=True)
class FunctionDefinition:
    """Named commands."""

    name: str
    body: CommandList


@dataclass(frozen=True, slots=True)
class Group:
    """`{ ...; }`, or `( ... )` with its own variables."""

    body: CommandList
    subshell: bool


Node = Command | Chain | Pipe | If | CaseCommand | For | While | FunctionDefinition | Group
CommandList = tuple[Node, ...]


def parse(text: str, notes: list[str]) -> CommandList:
    """The commands of a script. notes: receives assumptions about unclosed quotes and constructs. Raises BadValue if they nest too deeply."""
    return _Parser(Lexer(text, notes)).whole()


@dataclass(slots=True)
class _Parser:
    lexer: Lexer
    open: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    """Open constructs: their name, and the words that may follow in them."""

    def whole(self) -> CommandList:
        found: list[Node] = []
        while True:
            found += self.block(frozenset())
            token = self.lexer.take()
            if token.kind == "end":
                return tuple(found)
            self.lexer.notes.append(f"`{token.text}` in line {self.lexer.line(token.start)} closes nothing: skipped")

    def block(self, ends: frozenset[str]) -> CommandList:
        """Commands up to one of `ends`, or to a word that closes an outer construct."""
        if len(self.open) > DEEPEST:
            raise BadValue(f"this script nests more than {DEEPEST} constructs")
        found: list[Node] = []
        outer = frozenset[str]().union(*(words for _, words in self.open))
        while True:
            token = self.lexer.peek()
            if token.kind == "end" or (token.text in ends and token.kind in ("word", "op")):
                return tuple(found)
            if token.kind == "newline" or token.text in (";", "&"):
                self.lexer.take()
            elif token.kind == "op" and token.text not in ("(", *_REDIRECTS):
                if token.text in outer or not self.open:
                    return tuple(found)
                self.lexer.take()
                self.lexer.notes.append(f"`{token.text}` in line {self.lexer.line(token.start)} is skipped")
            elif token.kind == "word" and token.text in _CLOSERS:
                if token.text in outer or not self.open:
                    return tuple(found)
                self.lexer.take()
                self.lexer.notes.append(
                    f"`{token.text}` in line {self.lexer.line(token.start)} closes nothing: skipped"
                )
            else:
                found.append(self.chain())

    def chain(self) -> Node:
        items = [("", self.pipe())]
        while self.lexer.peek().text in ("&&", "||") and self.lexer.peek().kind == "op":
            operator = self.lexer.take().text
            self.newlines()
            items.append((operator, self.pipe()))
        return items[0][1] if len(items) == 1 else Chain(tuple(items))

    def pipe(self) -> Node:
        negated = False
        while (token := self.lexer.peek()).kind == "word" and token.text == "!":
            self.lexer.take()
            negated = not negated
        parts = [self.command()]
        while self.lexer.peek().kind == "op" and self.lexer.peek().text in ("|", "|&"):
            self.lexer.take()
            self.newlines()
            parts.append(self.command())
        return parts[0] if len(parts) == 1 and not negated else Pipe(tuple(parts), negated)

    def newlines(self) -> None:
        while self.lexer.peek().kind == "newline":
            self.lexer.take()

    def command(self) -> Node:
        token = self.lexer.peek()
        made: Node | None = None
        if token.kind == "op" and token.text == "(":
            made = self.parenthesis()
        elif token.kind == "word":
            opener = {
                "if": self.if_, "for": self.for_, "select": self.for_, "while": self.while_, "until": self.while_, "case": self.case,
                "{": self.brace, "[[": self.test, "function": self.function,
            }.get(token.text)  # fmt: skip
            if opener is not None:
                self.lexer.take()
                made = opener(token)
        if made is None:
            return self.simple()
        while self.lexer.peek().kind == "op" and self.lexer.peek().text in _REDIRECTS:
            self.redirect([])
        return made

    def simple(self) -> Node:
        words: list[str] = []
        inputs: list[Here] = []
        while True:
            token = self.lexer.peek()
            if token.kind == "op" and token.text in _REDIRECTS:
                if words and words[-1].isdigit() and self.lexer.text[token.start - 1].isdigit():
                    words.pop()  # 2>file: the descriptor
                self.redirect(inputs)
            elif token.kind == "op" and token.text == "(" and len(words) == 1:
                self.lexer.take()
                if self.lexer.peek().text == ")":
                    self.lexer.take()
                return self.named(words[0], token)
            elif token.kind == "word":
                words.append(self.lexer.take().text)
            else:
                return Command(tuple(words), tuple(inputs))

    def redirect(self, inputs: list[Here]) -> None:
        operator = self.lexer.take().text
        if self.lexer.peek().kind != "word":
            return
        target = self.lexer.take().text
        if operator in ("<<", "<<-"):
            plain = re.sub(r"[\\\"']", "", target)
            here = Here(literal=plain != target)
            self.lexer.waiting.append((plain, operator == "<<-", here))
            inputs.append(here)
        elif operator == "<<<":
            inputs.append(Here(text=target, word=True))

    def parenthesis(self) -> Node:
        token = self.lexer.take()
        text = self.lexer.text
        if text.startswith("(", self.lexer.at):
            end = closing(text, self.lexer.at + 1, ")")
            if end > 0 and text.startswith(")", end):
                inside = text[self.lexer.at + 1 : end - 1]
                self.lexer.at = end + 1
                return Command(("((", inside))
        return Group(self.inside("(", token, frozenset({")"})), subshell=True)

    def inside(
        self, name: str, token: Token, ends: frozenset[str], *, first: frozenset[str] | None = None
    ) -> CommandList:
        """The body of a construct up to one of `ends`, which is consumed; adds a note if the text or an outer construct ends first."""
        self.open.append((name, ends))
        body = self.block(first or ends)
        self.open.pop()
        self.close(name, token, first or ends)
        return body

    def close(self, name: str, token: Token, ends: frozenset[str]) -> str:
        found = self.lexer.peek()
        if found.text in ends and found.kind in ("word", "op"):
            return self.lexer.take().text
        line = self.lexer.line(token.start)
        self.lexer.notes.append(f"the `{name}` in line {line} is never closed: assumed to end there")
        return ""

    def test(self, token: Token) -> Node:
        return Command(("[[", *self.lexer.inside_test()))

    def brace(self, token: Token) -> Node:
        return Group(self.inside("{", token, frozenset({"}"})), subshell=False)

    def if_(self, token: Token) -> Node:
        ends = frozenset({"then", "elif", "else", "fi"})
        branches: list[tuple[CommandList | None, CommandList]] = []
        self.open.append(("if", ends))
        condition: CommandList | None = self.block(frozenset({"then"}))
        self.close("if", token, frozenset({"then"}))
        while True:
            branches.append((condition, self.block(frozenset({"elif", "else", "fi"}))))
            found = self.close("if", token, frozenset({"elif", "else", "fi"}))
            if found == "elif":
                condition = self.block(frozenset({"then"}))
                self.close("elif", token, frozenset({"then"}))
            elif found == "else" and condition is not None:
                condition = None
            else:
                break
        self.open.pop()
        return If(tuple(branches))

    def while_(self, token: Token) -> Node:
        condition = self.inside(token.text, token, frozenset({"do", "done"}), first=frozenset({"do"}))
        return While(condition, self.inside(token.text, token, frozenset({"done"})), token.text == "until")

    def for_(self, token: Token) -> Node:
        if self.lexer.peek().text == "(":  # for ((i=0; ...)): read as one pass
            head = self.parenthesis()
            name = ""
            words: tuple[str, ...] | None = head.words[1:] if isinstance(head, Command) else ()
        else:
            name = self.lexer.take().text
            self.newlines()
            words = None if self.lexer.peek().text != "in" else ()
            while words is not None and self.lexer.peek().kind == "word":
                words = (*words, self.lexer.take().text)
            words = None if words is None else words[1:]
        while self.lexer.peek().kind == "newline" or self.lexer.peek().text == ";":
            self.lexer.take()
        self.close(token.text, token, frozenset({"do"}))
        return For(name, words, self.inside(token.text, token, frozenset({"done"})))

    def case(self, token: Token) -> Node:
        word = self.lexer.take().text if self.lexer.peek().kind == "word" else ""
        self.newlines()
        self.close("case", token, frozenset({"in"}))
        clauses: list[tuple[tuple[str, ...], CommandList, str]] = []
        self.open.append(("case", frozenset({";;", ";&", ";;&", "esac"})))
        while True:
            self.newlines()
            if self.lexer.peek().text == "(":
                self.lexer.take()
            if self.lexer.peek().kind != "word" or self.lexer.peek().text == "esac":
                break
            patterns = []
            while self.lexer.peek().kind == "word" or self.lexer.peek().text == "|":
                part = self.lexer.take()
                patterns += [part.text] if part.kind == "word" else []
            self.close("case", token, frozenset({")"}))
            body = self.block(frozenset({";;", ";&", ";;&", "esac"}))
            ending = self.lexer.take().text if self.lexer.peek().text in (";;", ";&", ";;&") else ""
            clauses.append((tuple(patterns), body, ending))
        self.open.pop()
        self.close("case", token, frozenset({"esac"}))
        return CaseCommand(word, tuple(clauses))

    def function(self, token: Token) -> Node:
        name = self.lexer.take().text
        if self.lexer.peek().text == "(":
            self.lexer.take()
            self.close("function", token, frozenset({")"}))
        return self.named(name, token)

    def named(self, name: str, token: Token) -> Node:
        self.newlines()
        body = self.command()
        return FunctionDefinition(name, body.body if isinstance(body, Group) else (body,))
