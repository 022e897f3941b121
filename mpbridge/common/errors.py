"""The exceptions of mpbridge. Exceptions used in a single package are defined there: training.process.LostRank, common.files.Locked, cli.main.Interrupted.

MpbridgeError                     exit_code 2: the call was wrong
|- UnknownName                    kind, given, near, known; also an AttributeError and a LookupError
|- BadValue                       a value of the wrong type or outside its legal set; also a ValueError
|- Contradiction                  faults: everything that does not fit together in one config; also a ValueError
|- DuplicateName                  a name is already taken
|- RecipeError                    a recipe's factory or file failed
|- StalePlan                      a target changed between plan and apply
|- DataError                      a corpus, index or record that cannot be used
|- CheckpointError                a checkpoint that cannot be read or does not fit
`- Refused                        exit_code 1: the call was valid and the answer is no
   |- Conflict                    the recipe overrides an author's value and on_conflict is "error"
   |- UpstreamRefused             megatron-core's own validation rejects the values
   `- AuditFailed                 live tensors are not what the policy promised"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MOST_SHOWN = 160
"""Characters of a value in a message."""

MOST_LISTED = 24
"""Known names in a message, if none is near."""

MOST_NAMED = 8
"""Unknown names in one place that are reported individually, with the nearest known one; the rest are only counted."""


def brief(value: object) -> str:
    """A value as shown in a message: strings in quotes, truncated as in `cut`."""
    return cut(repr(value))


def cut(text: object, most: int = MOST_SHOWN) -> str:
    """At most `most` characters of a text from outside mpbridge, followed by its length if it is truncated."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}... ({len(whole):,} characters)"


class MpbridgeError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user, without a traceback."""

    exit_code = 2

    @property
    def line(self) -> str:
        """The text on one line, as a table shows it."""
        return " ".join(str(self).split("\n"))


class UnknownName(MpbridgeError, AttributeError, LookupError):
    """No such recipe, field, engine, machine ...: the message lists the nearest names, or all known names if none is near."""

    def __init__(self, kind: str, given: str, known: Iterable[str]) -> None:
        self.kind, self.given, self.known = kind, given, tuple(sorted(set(known)))
        self.near = nearest(given, self.known)
        listed, more = ", ".join(self.known[:MOST_LISTED]), len(self.known) - MOST_LISTED
        known = f"known: {listed}{f' and {more} more' if more > 0 else ''}" if self.known else "there are none"
        hint = f"nearest: {', '.join(self.near)}" if self.near else known
        super().__init__(f"no {kind} named {brief(given)} ({hint})")

    def __str__(self) -> str:
        # LookupError's str() would quote the message
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.given, self.known)


def nearest(given: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.65) -> tuple[str, ...]:
    """The names that `given` was probably meant to be, best first: similar as a whole, or word by word ('bf16_mxpf8' is bf16_with_mxfp8_mixed)."""

    @functools.cache  # hundreds of names share their words
    def alike(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    wanted = given[:MOST_SHOWN].lower().replace("-", "_")
    words = wanted.split("_")

    def score(name: str) -> float:
        other = name.lower().replace("-", "_")
        # a mistyped word weighs as much as it is long; omitted words cost little
        parts = other.split("_")
        found = sum(len(word) * max(alike(word, part) for part in parts) for word in words)
        by_word = found / max(1, sum(map(len, words)))
        return max(alike(wanted, other), (0.95 if len(words) > 1 else 0.8) * by_word)

    scored = sorted(((score(name), name) for name in known), key=lambda pair: (-pair[0], len(pair[1]), pair[1]))
    return tuple(name for value, name in scored[:most] if value >= cutoff)


class BadValue(MpbridgeError, ValueError):
    """A value of the wrong type or outside its legal set."""


class Contradiction(MpbridgeError, ValueError):
    """Everything that does not fit together, one entry per fault; raised once with all faults."""

    def __init__(self, faults: Iterable[str], subject: str = "the precision config contradicts itself") -> None:
        self.faults, self.subject = tuple(faults), subject
        super().__init__("\n".join([f"{subject}:", *(f"  - {fault}" for fault in self.faults)]))

    @property
    def line(self) -> str:
        """The faults behind their subject, on one line."""
        return f"{self.subject}: {'; '.join(self.faults)}"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.faults, self.subject)


class DuplicateName(MpbridgeError, ValueError):
    """A recipe, alias or engine with that name already exists."""


class RecipeError(MpbridgeError):
    """A recipe's factory raised, returned the wrong type, or its file cannot be read."""


class StalePlan(MpbridgeError):
    """A target was changed after the plan was made: plan again."""


class DataError(MpbridgeError):
    """A corpus, an index or a record that cannot be used."""


class CheckpointError(MpbridgeError):
    """A checkpoint that is damaged, incomplete or belongs to another model."""


class Refused(MpbridgeError):
    """The call was valid and the answer is no: this machine, these rules or this engine cannot run it."""

    exit_code = 1


@contextmanager
def naming(what: str) -> Iterator[None]:
    """What is refused inside says of what; '': of the whole."""
    try:
        yield
    except (Refused, BadValue) as error:
        raise type(error)(f"{what}: {error}" if what else str(error)) from None


class Conflict(Refused):
    """The recipe overrides values that the author had set, and on_conflict is "error"."""


class UpstreamRefused(Refused):
    """megatron-core's own validation rejects the final values."""


class AuditFailed(Refused):
    """The live tensors are not what the policy promised."""
