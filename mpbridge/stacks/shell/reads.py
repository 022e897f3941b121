"""`read` and `mapfile` with input from a here-document or here-string."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpbridge.stacks.shell.conditions import Truth
from mpbridge.stacks.shell.fields import bare
from mpbridge.stacks.shell.syntax import Command

if TYPE_CHECKING:
    from mpbridge.stacks.shell.commands import Follower

_VALUED = {"read": "adinNptu", "mapfile": "dnOsuCc"}
"""Options that take a value, by their letters."""


def read(follower: Follower, rest: list[str], command: Command) -> Truth:
    """Splits a line by IFS among its names; the last gets the rest, `-a` assigns everything to one array."""
    flags, names = _taken("read", rest)
    names = ([flags["a"]] if "a" in flags else names) or ["REPLY"]
    text = _fed(follower, command)
    if text is None:
        return _waits(follower, "read", names)
    line = text if "d" in flags and not flags["d"] else text.partition("\n")[0]
    variables, apart = follower.values.variables, follower.values.variables.get("IFS")
    signs = apart if isinstance(apart, str) else " \t\n"
    if "a" in flags:
        variables[names[0]] = list(_split(line, signs, 0))
        return True
    parts = list(_split(line, signs, len(names)))
    for name, part in zip(names, [*parts, *[""] * len(names)], strict=False):
        variables[name] = part
    return True


def mapfile(follower: Follower, rest: list[str], command: Command) -> Truth:
    """Its lines become an array."""
    flags, names = _taken("mapfile", rest)
    names = names or ["MAPFILE"]
    text = _fed(follower, command)
    if text is None:
        return _waits(follower, "mapfile", names)
    lines = text.removesuffix("\n").split("\n")
    follower.values.variables[names[0]] = lines if "t" in flags else [f"{line}\n" for line in lines]
    return True


def _taken(name: str, rest: list[str]) -> tuple[dict[str, str], list[str]]:
    """(option letter -> value, variables' names)."""
    flags: dict[str, str] = {}
    names: list[str] = []
    words = iter(map(bare, rest))
    for word in words:
        if not word.startswith("-") or word == "-":
            names += [word] if re.fullmatch(r"[A-Za-z_]\w*", word) else []
            continue
        for at, letter in enumerate(word[1:], 1):
            if letter in _VALUED[name]:
                flags[letter] = word[at + 1 :] or next(words, "")
                break
            flags[letter] = ""
    return flags, names


def _fed(follower: Follower, command: Command) -> str | None:
    """The input, if it is in the text."""
    if not command.inputs:
        return None
    here = command.inputs[-1]
    if here.word:
        return follower.values.text(here.text) + "\n"
    return here.text if here.literal else follower.values.here(here.text)


def _waits(follower: Follower, name: str, names: list[str]) -> Truth:
    for one in names:
        follower.values.variables[one] = follower.values.mark(
            f"`{name} {one}` waits for input: assumed empty (--env {one}=...)"
        )
    return None


def _split(line: str, signs: str, most: int) -> Iterator[str]:
    """The parts of a line between IFS characters, at most so many (0: all); runs of blanks count once, and not at the ends."""
    if not signs:
        yield line
        return
    blanks = "".join(sign for sign in signs if sign.isspace())
    pattern = (
        f"[{re.escape(signs)}]" if not blanks else f"[{re.escape(blanks)}]*[{re.escape(signs)}][{re.escape(blanks)}]*"
    )
    line = line.strip(blanks) if blanks else line
    if line:
        yield from re.split(pattern, line, maxsplit=max(most - 1, 0) if most else 0) if most != 1 else [line]
