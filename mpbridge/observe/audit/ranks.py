"""Merges names of offenders over ranks: a fact holds if every rank that owns it agrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def offenders(by_rank: Sequence[Iterable[str]]) -> tuple[str, ...]:
    """What any rank reports, in order: 'name' if every rank does, 'name (rank 1)' if some do."""
    lists = [list(dict.fromkeys(one)) for one in by_rank]
    everyone = set(lists[0]).intersection(*map(set, lists[1:])) if lists else set()
    found: dict[str, None] = {}
    for rank, names in enumerate(lists):
        for name in names:
            found[name if name in everyone else f"{name} (rank {rank})"] = None
    return tuple(found)


def joined(found: Iterable[str]) -> str:
    """Distinct words, sorted, as 'bf16/fp32'."""
    return "/".join(sorted(set(found))) or "nothing"
