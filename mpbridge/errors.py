"""Every exception of mpbridge.

MpbridgeError                     exit_code 2: the call was wrong
|- UnknownName                    kind, given, near, known; also an AttributeError and a LookupError
|- BadValue                       a value of the wrong type or outside its legal set; also a ValueError
|- Contradiction                  faults: everything that does not fit together in one config; also a ValueError
|- DuplicateName                  a name is taken
|- RecipeError                    a recipe's factory or file failed
|- StalePlan                      a target changed between plan and apply
|- DataError                      a corpus, index or record that cannot be used
|- CheckpointError                a checkpoint that cannot be read or does not fit
`- Refused                        exit_code 1: the call was right and the answer is no
   |- Conflict                    the recipe overrides an author's value and on_conflict is "error"
   |- UpstreamRefused             megatron-core's own check said no
   `- AuditFailed                 live tensors are not what the policy promised
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MpbridgeError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user, without a traceback."""

    exit_code = 2


class UnknownName(MpbridgeError, AttributeError, LookupError):
    """No such recipe, field, engine, machine ...: the text says the nearest names first, all of them only when nothing is near."""

    def __init__(self, kind: str, given: str, known: Iterable[str]) -> None:
        self.kind, self.given, self.known = kind, given, tuple(sorted(set(known)))
        folded = {name.lower().replace("-", "_"): name for name in self.known}
        close = difflib.get_close_matches(given.lower().replace("-", "_"), folded, n=3, cutoff=0.6)
        self.near = tuple(folded[name] for name in close)
        hint = f"nearest: {', '.join(self.near)}" if self.near else f"known: {', '.join(self.known)}"
        super().__init__(f"no {kind} named {given!r} ({hint})")

    def __str__(self) -> str:
        # LookupError's str() would quote the message
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.given, self.known)


class BadValue(MpbridgeError, ValueError):
    """A value of the wrong type or outside of its legal set."""


class Contradiction(MpbridgeError, ValueError):
    """Everything that does not fit together, one entry a fault; raised once with all of them."""

    def __init__(self, faults: Iterable[str], subject: str = "the precision config contradicts itself") -> None:
        self.faults, self.subject = tuple(faults), subject
        super().__init__("\n".join([f"{subject}:", *(f"  - {fault}" for fault in self.faults)]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.faults, self.subject)


class DuplicateName(MpbridgeError, ValueError):
    """A recipe, alias or engine of that name exists already."""


class RecipeError(MpbridgeError):
    """A recipe's factory raised, returned the wrong type, or its file cannot be read."""


class StalePlan(MpbridgeError):
    """A target was changed after the plan was made: plan again."""


class DataError(MpbridgeError):
    """A corpus, an index or a record that cannot be used."""


class CheckpointError(MpbridgeError):
    """A checkpoint that is damaged, incomplete or belongs to another model."""


class Refused(MpbridgeError):
    """The question was right and the answer is no: this machine, these rules or this engine cannot run it."""

    exit_code = 1


class Conflict(Refused):
    """The recipe overrides values that the author had set, and on_conflict is "error"."""


class UpstreamRefused(Refused):
    """megatron-core's own validation refuses the final values."""


class AuditFailed(Refused):
    """The live tensors are not what the policy promised."""
