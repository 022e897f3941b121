"""What the audit asks of an engine beyond its contract. A foreign loop answers through methods of these names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

Question = Literal["audit_holdings", "audit_copies", "audit_traffic", "audit_flags", "audit_ranks"]
"""Who updates what (holdings.Held of every parameter); replicas and shards (replicas.Copies); what was sent, given the watch and the number of micro-batches
(traffic.Traffic); (flags looked at, those that contradict the promises); the global ranks that average gradients with this one."""


def answer(engine: Any, question: Question) -> Callable[..., Any] | None:
    """The engine's own answer; None: the audit reads it from the structures of mpbridge's engines."""
    found: Callable[..., Any] | None = getattr(engine, question, None)
    return found
