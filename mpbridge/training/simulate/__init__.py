"""One rank of a large world on one machine: the real megatron-core and our engine on fake process groups and meta tensors, compared with predictions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The results for one rank."""

    rank: int
    parameters: int
    live: int
    """Bytes of all storages that play a role."""
    predicted: int
    rows: int
    """(role, parameter, dtype) that exist or were predicted."""
    differences: tuple[str, ...]
    """Rows whose elements differ."""
    audit: tuple[str, ...]
    """Findings that are not as promised."""
    audited: int
    """All findings."""
    seconds: float
    """CPU time without imports."""
    peak: int
    """Peak resident bytes of the process."""
    products: int = 0
    """Matrix products recorded in one step."""
    wires: int = 0
    """Collectives recorded in one step."""
    step: tuple[str, ...] = ()
    """Where the recorded step and the list of operations differ."""

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.differences and not self.audit and not self.step and self.live == self.predicted
