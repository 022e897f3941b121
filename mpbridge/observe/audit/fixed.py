"""Frozen parameters: those that the recipe freezes, and only they, do not train; no bit of any changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.numerics.observation.tensors import digest, local
from mpbridge.observe.audit.findings import Finding, judged
from mpbridge.observe.audit.promise import Promises
from mpbridge.planning.memory.keeps import FROZEN


@dataclass
class Fixed:
    """One rank's observation."""

    promised: int = 0
    wrong: list[str] = field(default_factory=list)


def digests(engine: Any) -> dict[str, int]:
    """Parameter that needs no gradient -> digest of its bits as stored: of a quantized weight its codes and scales, and those by columns apart, since a library may make them later."""
    found = {}
    for name, parameter in engine.named_parameters():
        if not parameter.requires_grad:
            held = local(parameter.detach())
            found[name] = _digest(_stored(held, _ROWS) or [held])
            if columns := _stored(held, _COLUMNS):
                found[f"{name} by columns"] = _digest(columns)
    return found


_ROWS = ("_data", "_rowwise_data", "_scale_inv", "_rowwise_scale_inv", "_amax_rowwise")
_COLUMNS = ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise")
"""NVFP4's amaxes are the second factor of its scales."""


def _stored(held: Any, names: Sequence[str]) -> list[torch.Tensor]:
    return [one for name in names if isinstance(one := getattr(held, name, None), torch.Tensor)]


def _digest(parts: Sequence[torch.Tensor]) -> int:
    return hash(tuple(digest(one.reshape(-1)) for one in parts))


def fixed(engine: Any, promises: Promises, first: Mapping[str, int]) -> Fixed:
    """What this rank sees. first: `digests` when the run was first observed; empty: unknown.

    Of a recipe without `frozen`, a script may freeze what it likes; no bit of that may change either.
    """
    seen, declared = Fixed(), bool(promises.policy.frozen)
    for name, parameter in engine.named_parameters():
        wanted = promises.trained(name) == FROZEN
        seen.promised += wanted
        if wanted is parameter.requires_grad and declared:
            seen.wrong.append(f"{name} ({'trains' if wanted else 'frozen, though the recipe trains it'})")
        elif wanted and getattr(parameter, "main_grad", None) is not None:
            seen.wrong.append(f"{name} (has a gradient)")
    now = digests(engine) if first else {}
    seen.wrong += [f"{name} (changed)" for name in now.keys() & first.keys() if now[name] != first[name]]
    return seen


def fixed_finding(ranks: Sequence[Fixed]) -> list[Finding]:
    """A row if anything is, or should be, frozen."""
    count, wrong = sum(rank.promised for rank in ranks), [rank.wrong for rank in ranks]
    if not count and not any(wrong):
        return []
    cure = "find what sets requires_grad, or writes into the parameters"
    return [judged("frozen", "as the recipe says, unchanged", wrong, found="otherwise", cure=cure, count=count)]
