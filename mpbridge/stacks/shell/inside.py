"""Inspects commands: every simple command inside, whether it matters, and a short name."""

from __future__ import annotations

from collections.abc import Iterator

from mpbridge.stacks.shell.syntax import (
    CaseCommand,
    Chain,
    Command,
    CommandList,
    For,
    FunctionDefinition,
    Group,
    If,
    Node,
    Pipe,
    While,
)
from mpbridge.stacks.shell.values import ASSIGNMENT


def tells(block: CommandList) -> bool:
    """Whether commands set a variable, have options, or start a program."""
    return any(
        "--" in word or word.endswith(".py") or ASSIGNMENT.fullmatch(word) or word in ("source", ".", "eval")
        for command in commands_in(block)
        for word in command.words
    )


def commands_in(block: CommandList) -> Iterator[Command]:
    """Every command in a block, including inner constructs."""
    for node in block:
        match node:
            case Command():
                yield node
            case Chain():
                yield from commands_in(tuple(inner for _, inner in node.items))
            case Pipe():
                yield from commands_in(node.parts)
            case If():
                for condition, body in node.branches:
                    yield from commands_in((*(condition or ()), *body))
            case CaseCommand():
                for _, body, _ in node.clauses:
                    yield from commands_in(body)
            case While():
                yield from commands_in((*node.condition, *node.body))
            case For() | FunctionDefinition() | Group():
                yield from commands_in(node.body)


def text_of(node: Node) -> str:
    """A node in a few words."""
    words = " ".join(" ".join(command.words) for command in commands_in((node,)))
    flat = " ".join(words.split())
    return flat if len(flat) < 70 else flat[:66] + " ..."


def first_word(node: Node) -> str:
    """The first word of a node's first command."""
    return next((command.words[0] for command in commands_in((node,)) if command.words), "")
