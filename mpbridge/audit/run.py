"""audit(): the policy against the live tensors of an engine, on all ranks at once."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpbridge.audit.findings import Report, Stage
from mpbridge.audit.judge import flag_finding, motion_findings, rule_findings, step_findings, tensor_findings
from mpbridge.audit.motion import Motion
from mpbridge.audit.observe import Observed, look
from mpbridge.audit.promise import Promises
from mpbridge.audit.watch import Watch
from mpbridge.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from mpbridge.engines.contract import Engine, StepResult


def promises_of(policy: PrecisionPolicy, engine: Engine) -> Promises:
    """What `policy` promises on `engine`, the facts it leaves open filled from the run's optimizer section."""
    run = engine.run
    emulated = bool(getattr(run, "emulate", False)) or getattr(run.facts, "realization", "native") == "emulated"
    return Promises(
        policy=policy.settled(run.inputs.get("optimizer")),
        run=run.facts,
        layers=run.facts.shape.num_layers,
        emulated=emulated,
    )


def audit(
    policy: PrecisionPolicy,
    engine: Engine,
    *,
    stage: Stage = "static",
    watch: Watch | None = None,
    motion: Motion | None = None,
    result: StepResult | None = None,
) -> Report:
    """What the live tensors of every rank are, beside what `policy` promises. Reads only; every rank must call it.

    stage: 'static' looks at parameters, buffers, modules and flags; 'live', after an update that was applied, also at main weights and moments.
    watch: observed the steps so far: compute dtype, autocast and the wire are judged as well. motion: taken before the update, with `result` of it:
    weights must have moved, the gradient norm must be finite and above zero.
    The report is the same on every rank; `Report.require` raises AuditFailed.
    """
    promises = promises_of(policy, engine)
    begun = time.process_time()
    seen = look(engine, promises, watch, motion, lr=0.0 if result is None else result.lr)
    seconds = time.process_time() - begun
    ranks = _everywhere(seen)
    ran = watch is not None
    findings = tensor_findings(ranks, promises, live=stage == "live") + rule_findings(ranks, promises, ran=ran)
    findings += (step_findings(ranks, promises) if ran else []) + flag_finding(ranks)
    if motion is not None:
        norm = None if result is None else result.grad_norm
        findings += motion_findings(ranks, norm, norm is None or math.isfinite(norm))
    facts = {
        "engine": engine.name,
        "world_size": len(ranks),
        "fingerprint": policy.fingerprint(),
        "recipe": getattr(engine.run, "recipe", ""),
    }
    return Report(stage=stage, findings=tuple(findings), layouts=_layouts(ranks[0]), seconds=seconds, facts=facts)


def _everywhere(seen: Observed) -> list[Observed]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [seen]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, seen)
    return ranks


def _layouts(seen: Observed) -> tuple[dict[str, Any], ...]:
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, roles in seen.layouts.items():
        groups.setdefault(tuple(sorted(roles.items())), []).append(name)
    return tuple({"roles": dict(roles), "parameters": names} for roles, names in groups.items())
