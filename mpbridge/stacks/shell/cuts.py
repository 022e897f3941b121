"""Applies `${A operation}` to one text: strips a pattern from its front or end, replaces a pattern, changes case, takes a part."""

from __future__ import annotations

import fnmatch
import re

from mpbridge.stacks.shell.fields import matches


def trimmed(value: str, wanted: str, *, front: bool, longest: bool) -> str:
    """`#` and `##` (front), `%` and `%%` (end): removes the shortest or longest match of a pattern."""
    fits = [at for at in range(len(value) + 1) if matches(value[:at] if front else value[at:], wanted)]
    if not fits:
        return value
    at = max(fits) if front == longest else min(fits)
    return value[at:] if front else value[:at]


def replaced(value: str, wanted: str, replacement: str, *, every: bool) -> str:
    """`/` and `//`: replaces the first match of a pattern, or all."""
    pattern = re.compile(fnmatch.translate(wanted).removesuffix(r"\Z").removesuffix(r"\z"))
    return pattern.sub(lambda _: replacement, value, count=0 if every else 1)


def in_other_case(value: str, operation: str) -> str | None:
    """`^`, `^^`, `,` and `,,`; None for another operation: those with a pattern are not followed."""
    upper = operation[0] == "^"
    if operation in ("^^", ",,"):
        return value.upper() if upper else value.lower()
    if operation in ("^", ","):
        return (value[:1].upper() if upper else value[:1].lower()) + value[1:]
    return None


def part(value: str, operation: str) -> str | None:
    """`:start` and `:start:length`, both plain numbers; None for another operation."""
    found = re.fullmatch(r":\s*(-?\d+)(?::(-?\d+))?", operation)
    if found is None:
        return None
    start = int(found[1])
    rest = value[start:] if start >= 0 or len(value) + start >= 0 else ""
    return rest if found[2] is None else rest[: int(found[2])]
