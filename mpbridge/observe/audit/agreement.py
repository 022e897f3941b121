"""Whether all ranks have the same policy: fingerprints compared before anything is built."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist

from mpbridge.backend.devices.gather import from_all
from mpbridge.common.errors import AuditFailed
from mpbridge.precision.policy import PrecisionPolicy


def agree(policy: PrecisionPolicy, *, group: Any = None) -> str:
    """The fingerprint shared by every rank of `group` (None: the world).

    Raises AuditFailed on all ranks, naming those whose policy differs from the majority's (rank 0's on a tie) and the fields that differ.
    """
    mine = policy.fingerprint()
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return mine
    prints = from_all(mine, group=group)
    if len(set(prints)) == 1:
        return mine
    # full policies are exchanged only when ranks differ
    data = from_all(policy.as_data(), group=group)
    votes = Counter(prints)
    most = max(votes.values())
    usual = next(one for one in prints if votes[one] == most)
    model = data[prints.index(usual)]
    lines = []
    for rank, one in enumerate(prints):
        if one != usual:
            fields = ", ".join(
                f"{name}: {data[rank][name]!r} instead of {model[name]!r}"
                for name in model
                if data[rank].get(name) != model[name]
            )
            lines.append(f"  - rank {rank} ({one[:12]}): {fields}")
    raise AuditFailed(
        "\n".join(
            [
                f"ranks disagree on the precision policy (the majority has {usual[:12]}):",
                *lines,
                "give every rank the same recipe and overrides",
            ]
        )
    )
