"""audit(): the policy against the live tensors of an engine, on all ranks at once."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpbridge.backend.devices.collectives import from_all, world_size
from mpbridge.common.facts import BESIDE_ADAM
from mpbridge.numerics.observation import modules
from mpbridge.observe.audit.compute import compute_findings
from mpbridge.observe.audit.findings import AuditStage, Finding, Report, not_observed
from mpbridge.observe.audit.gradients import Followed, gradient_findings, scale_finding, share_of
from mpbridge.observe.audit.holdings import holdings
from mpbridge.observe.audit.judge import (
    FACTOR,
    MATRICES,
    flag_finding,
    rule_findings,
    tensor_findings,
    weight_findings,
    why_unseen,
)
from mpbridge.observe.audit.observe import Observed, look
from mpbridge.observe.audit.orthogonal import orthogonal_findings, trains
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.quantization import quantization_findings
from mpbridge.observe.audit.replay import declared, replay_findings
from mpbridge.observe.audit.replicas import fixed_finding, replica_findings
from mpbridge.observe.audit.snapshot import Before
from mpbridge.observe.audit.traffic import traffic_findings
from mpbridge.observe.audit.watch import Watch
from mpbridge.planning.memory.keeps import trained_by, wires
from mpbridge.precision.policy import PrecisionPolicy

if TYPE_CHECKING:
    from mpbridge.backend.engines.contract import Engine, StepResult

BUDGET = 4_000_000
"""Bytes that a rank may receive of data that differs between ranks: sampled gradients and amaxes. Equal data is sent once (devices.gather)."""
_WEIGHT = 1000
"""Bytes of one weight's samples, produced and read (audit.values.SAMPLES of each)."""


def bounded(seen: Observed, ranks: int) -> Observed:
    """`seen`, limited to as many followed weights as fit the budget: all of them up to some tens of ranks, one from 4,000 ranks on.

    Every rank chooses the same names among those it has: the ones with the smallest checksum.
    """
    most = max(1, BUDGET // (ranks * _WEIGHT))
    followed, quantized = seen.followed, seen.quantized
    if followed is not None and len(followed.produced) > most:
        names = chosen(followed.produced, most)
        thin = max(1, -(-ranks * _WEIGHT // BUDGET))
        # positions index the whole tensor, so every rank keeps the same ones, whichever shard it has
        kept = {name: sorted(followed.produced[name])[::thin] for name in names}
        produced, read = (
            {name: {at: of[name][at] for at in kept[name] if at in of[name]} for name in names if name in of}
            for of in (followed.produced, followed.read)
        )
        followed = dataclasses.replace(followed, produced=produced, read=read)
    if quantized is not None and len(quantized.amaxes) > 2 * most:
        names = chosen(quantized.amaxes, 2 * most)
        quantized = dataclasses.replace(quantized, amaxes={name: quantized.amaxes[name] for name in names})
    return dataclasses.replace(seen, followed=followed, quantized=quantized)


def chosen(names: Collection[str], most: int) -> list[str]:
    """At most `most` of the names; the same choice on every rank that has them."""
    return sorted(names, key=lambda name: (zlib.crc32(name.encode()), name))[:most]


def promises_of(policy: PrecisionPolicy, engine: Engine) -> Promises:
    """What `policy` promises on `engine`; facts it leaves open are filled from the run's optimizer section."""
    run = engine.run
    policy = policy.settled(run.inputs.get("optimizer"))
    emulated = bool(getattr(run, "emulate", False)) or getattr(run.facts, "realization", "native") == "emulated"
    return Promises(
        policy=policy,
        run=run.facts,
        layers=run.facts.shape.num_layers,
        emulated=emulated,
        foreign=bool(getattr(engine, "foreign", False)),
        matrices=_matrices(engine) if run.facts.optimizer.name in BESIDE_ADAM else None,
    )


def _matrices(engine: Engine) -> frozenset[str]:
    """What Muon, SOAP or Lion is to train: on an engine of ours by the plan, in somebody else's loop whatever it holds."""
    if getattr(engine, "foreign", False):
        return frozenset(held.name for held in holdings(engine) if trains(held.inner) != "adam")
    facts, named = engine.run.facts, engine.named_parameters()
    by = partial(trained_by, facts.optimizer.name, core=facts.versions.megatron_core)
    return frozenset(name for name, one in named if by(name, one.dim()) != "adam")


def audit(
    policy: PrecisionPolicy,
    engine: Engine,
    *,
    stage: AuditStage = "static",
    watch: Watch | None = None,
    before: Before | None = None,
    result: StepResult | None = None,
    microbatches: int = 1,
    step: int | None = None,
) -> Report:
    """Compares the live tensors of every rank with what `policy` promises. Read-only; every rank must call it.

    stage: 'static' checks parameters, buffers, modules, flags and replicas; 'live', after an applied update, also main weights and moments.
    watch: observed the last step; its compute dtypes, its collectives and the operands of quantized GEMMs are judged too. before: taken before the step's
    update, with its `result`: weights must have moved, and gradients must have reached the optimizer unchanged. microbatches: of the step.
    The report is the same on every rank; `Report.require` raises AuditFailed.
    """
    promises = promises_of(policy, engine)
    begun = time.process_time()
    seen = look(engine, promises, watch, before, result, microbatches)
    seconds = time.process_time() - begun
    ranks = everywhere(seen)
    stepped = result if before is not None else None
    findings = judge(
        engine,
        promises,
        ranks,
        live=stage == "live",
        watched=watch is not None,
        moved=before is not None,
        result=stepped,
    )
    facts = facts_of(engine, step) | {"fingerprint": policy.fingerprint()}
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, roles in ranks[0].layouts.items():
        groups.setdefault(tuple(sorted(roles.items())), []).append(name)
    layouts = tuple({"roles": dict(roles), "parameters": names} for roles, names in groups.items())
    return Report(stage=stage, findings=tuple(findings), layouts=layouts, seconds=seconds, facts=facts)


def facts_of(engine: Any, step: int | None) -> dict[str, Any]:
    """What a report says of its run."""
    known = {"engine": engine.name, "world_size": world_size(), "recipe": getattr(engine.run, "recipe", "")}
    return known if step is None else known | {"step": step}


def judge(
    engine: Any,
    promises: Promises,
    ranks: Sequence[Observed],
    *,
    live: bool,
    watched: bool,
    moved: bool,
    result: StepResult | None,
) -> list[Finding]:
    """What all ranks observed against what was promised. live: an update has created optimizer states; watched: a step was observed; moved: the state before
    its update is known; result: of that step, where gradients were followed too."""
    findings = tensor_findings(ranks, promises, live=live)
    findings += rule_findings(ranks, promises, ran=watched) + flag_finding(ranks)
    findings += weight_findings([rank.weights for rank in ranks], stepped=moved)
    findings += fixed_finding([rank.fixed for rank in ranks])
    findings += replica_findings([rank.copies for rank in ranks])
    if watched:
        findings += _step_findings(engine, promises, ranks)
    return findings + (_result_findings(engine, promises, ranks, result) if result is not None else [])


def _step_findings(engine: Any, promises: Promises, ranks: Sequence[Observed]) -> list[Finding]:
    paths = modules.module_paths(engine.model)
    present = {subject for subject, found in _PARTS.items() if any(map(found, paths))}
    # another pipeline stage may have what this one lacks, so only what every rank could have seen is required
    alone = engine.run.facts.parallel.pipeline == 1
    present |= {"compute", *(["loss"] if alone else [])}
    found = compute_findings(
        [rank.computed for rank in ranks if rank.computed is not None],
        promises,
        wanted=lambda subject: alone and subject in present,
        why=partial(why_unseen, engine),
    )
    found += traffic_findings([rank.traffic for rank in ranks if rank.traffic is not None], promises)
    whose = why_unseen(engine, "wire: which gradients")
    if whose:
        found.append(not_observed("wire: which gradients", "every parameter's", whose))
    quantized = [rank.quantized for rank in ranks if rank.quantized is not None]
    why = why_unseen(engine, "quantized GEMMs")
    return found + quantization_findings(quantized, promises, why=why)


_PARTS = {
    "attention": modules.is_attention,
    "softmax": modules.is_attention,
    "router": modules.is_router,
    "residual stream": modules.is_layer,
    "norms": modules.is_norm,
    "scan": modules.is_scan,
    "rotary angles": modules.is_rotary,
}
"""Kind of operation -> predicate of the modules that have it."""


def _result_findings(engine: Any, promises: Promises, ranks: Sequence[Observed], result: StepResult) -> list[Finding]:
    followed = [rank.followed for rank in ranks if rank.followed is not None]
    norm = result.grad_norm
    parallel, config = engine.run.facts.parallel, engine.configs
    clip = getattr(config.optimizer, "clip_grad", None)
    # a foreign loop may clip by a limit that is not known here
    known_clip = clip is not None and (norm is not None or not clip)
    summed = bool(getattr(config.model, "calculate_per_token_loss", False))
    share = share_of(followed) if summed else 1.0
    known = known_clip and share is not None and parallel.context == 1
    hidden = why_unseen(engine, FACTOR) if share is None or parallel.context > 1 else ""
    why = why_unseen(engine, "gradients")
    findings = []
    if why:
        findings.append(not_observed("gradients", "reduced once, unscaled once", why))
    else:
        findings += gradient_findings(
            followed,
            scale=result.loss_scale,
            norm=0.0 if norm is None else norm,
            clip=float(clip or 0.0),
            known=known,
            widths=widths_of(promises),
            most=getattr(engine, "of_the_mean", 1.0) / result.loss_scale if promises.foreign else None,
            share=share or 1.0,
            why=hidden,
            uncounted=share is None and not hidden,
        )
        if matrices := why_unseen(engine, MATRICES):
            findings.append(not_observed(MATRICES, "reduced once, unscaled once", matrices))
    if not math.isnan(result.loss):
        unscaled, scale = why_unseen(engine, "loss scale"), result.loss_scale
        meant = f"{scale:g}, applied" if scale != 1 else "none"
        if unscaled:
            findings.append(not_observed("loss scale", meant, unscaled))
        else:
            findings += scale_finding(followed, scale, meant, known=known)
    if norm is not None:
        good = math.isfinite(norm) and norm > 0.0
        findings.append(Finding(subject="gradient norm", promised="finite and above 0", found=f"{norm:.4g}", ok=good))
    replayed = [rank.replayed for rank in ranks if rank.replayed is not None]
    whole = parallel.tensor == parallel.pipeline == parallel.expert == 1
    findings += replay_findings(replayed, norm=norm, clip=declared(engine, "clip_grad"), whole=whole)
    muons = [rank.orthogonal for rank in ranks if rank.orthogonal is not None]
    return findings + (orthogonal_findings(muons) if muons else [])


def widths_of(promises: Promises) -> dict[str, str]:
    """The dtypes that a gradient takes between the GEMM and the optimizer."""
    kept = promises.kept(promises.rests("decoder.layers.0.mlp.linear_fc1.weight"))
    widths: dict[str, str | None] = {role: kept[role].dtype.short for role in ("grads", "main_grads") if role in kept}
    widths["wire"] = wires(promises.policy)["gradients"].short
    return {role: width for role, width in widths.items() if width}


def everywhere(seen: Observed) -> list[Observed]:
    """What every rank observed. A collective: every rank calls it."""
    return from_all(bounded(seen, world_size()), deeper={"followed": Followed})
