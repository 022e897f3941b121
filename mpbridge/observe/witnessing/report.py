"""A witness's report of one step: the description, the findings, the nearest recipe; as text, as data, or as an error.

And the checks that every sound training step passes regardless of precision, and what a loop does after the update.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mpbridge.backend.devices.collectives import from_all
from mpbridge.backend.engines.contract import StepResult
from mpbridge.common.errors import AuditFailed
from mpbridge.interop.stacks.meaning import LABELS
from mpbridge.numerics.observation.tensors import digest, is_narrow, local
from mpbridge.observe.audit.findings import Finding, Report, fault_lines, judged, not_observed
from mpbridge.observe.audit.gradients import gradient_findings
from mpbridge.observe.audit.holdings import ADAMS, MOMENTS, Held, holdings
from mpbridge.observe.audit.judge import weight_findings, why_unseen
from mpbridge.observe.audit.observe import Observed
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.replicas import replica_findings
from mpbridge.observe.audit.snapshot import Before, sampled
from mpbridge.observe.audit.traffic import Traffic, traffic_findings
from mpbridge.observe.audit.weights import Weights
from mpbridge.observe.witnessing.describe import UNSEEN, Description, Nearest, lines
from mpbridge.observe.witnessing.loops import Loop

_WIDTH = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """One observed step; identical on every rank."""

    step: int
    described: Description
    nearest: Nearest | None
    promised: str
    """Name of the policy that it was judged by; '' if it was only described."""
    report: Report
    """The findings: everything that the policy promises, or without a policy what every sound run satisfies."""
    evaluation: bool = False
    """It is an evaluation, after this step."""

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return self.report.ok

    @property
    def line(self) -> str:
        """The report in one line."""
        counts = self.report.counted("facts as promised" if self.promised else "checks passed", "FAILED")
        judged = f" against {self.promised}" if self.promised else ""
        what = "an evaluation after step" if self.evaluation else "step"
        return f"witness of {what} {self.step}, {self.described.loop}{judged}: {counts}"

    def __str__(self) -> str:
        rows = [*lines(self.described)]
        if self.nearest is not None:
            rows.append(("nearest recipe", str(self.nearest)))
        followed = (one.found for one in self.report.findings if one.subject == "gradients" and one.ok)
        rows += [("gradients, followed", found) for found in followed]
        width = max(len(name) for name, _ in rows) + 2
        text = [self.line]
        for name, found in rows:
            first, later = f"  {name:<{width}}", " " * (width + 2)
            text += textwrap.wrap(found, _WIDTH - width - 2, initial_indent=first, subsequent_indent=later)
        text += [f"  {line}" for line in fault_lines(self.report)]
        return "\n".join(text)

    def as_data(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "step": self.step,
            "evaluation": self.evaluation,
            "ok": self.ok,
            "promised": self.promised or None,
            "described": self.described.as_data(),
            "nearest": None if self.nearest is None else self.nearest.as_data(),
            "audit": self.report.as_data(),
        }

    def as_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.as_data(), indent=1)

    def require(self) -> Witnessed:
        """This report. Raises AuditFailed naming every fault if there are any."""
        if self.report.faults:
            found = "\n".join(f"  - {fault}" for fault in self.report.faults)
            what = f"deviates from {self.promised}" if self.promised else "is not a sound training step"
            raise AuditFailed(f"step {self.step} {what}:\n{found}")
        return self


STATES = ("storage", "main", "wire", "accumulator", "optimizer_reads", "exp_avg", "exp_avg_sq", "sharded")
"""Rows that stay as they are for as long as a run lasts, resumes included."""


def changes(now: Description, earlier: Mapping[str, Any]) -> list[Finding]:
    """A fault that names the states that are not what an earlier report (`Witnessed.as_data()`) of the same run found; empty if all are. Rows that one of
    the two could not observe are not compared."""
    before, rows = earlier["described"], now.rows()
    pairs = [(row, _most(before.get(row, UNSEEN)), _most(rows[row])) for row in STATES]
    moved = [f"{LABELS[row]}: {new}, were {old}" for row, old, new in pairs if old != new and UNSEEN not in (old, new)]
    cure = "a resume, a cast or a rebuilt optimizer changed them"
    same = f"as in step {earlier['step']}"
    return [judged("states", same, [moved], found="changed", cure=cure)] if moved else []


def _most(text: str) -> str:
    """A row without what only some of its tensors are."""
    return UNSEEN if text.startswith(UNSEEN) else text.partition(", but ")[0]


class Afterwards:
    """Digests of trained weights and moments right after an update, for comparison with those at the end of the step."""

    def __init__(self, loop: Loop) -> None:
        self._digests = {
            (held.name, what): digest(tensor) for held in holdings(loop) for what, tensor in _states(held).items()
        }
        self._samples = {held.name: sampled(held.trained) for held in holdings(loop) if held.trained is not None}

    def into(self, seen: Weights, loop: Loop, before: Before) -> None:
        """Adds to `seen` the tensors restored to their state before the update, and FP32 states rounded since. Other changes (a loop that
        normalizes its weights) are allowed."""
        for held in holdings(loop):
            states = _states(held)
            gone = [role for role in MOMENTS if (held.name, role) in self._digests and role not in states]
            seen.emptied += [f"{held.name} ({role})" for role in gone]
            for what, tensor in states.items():
                now = digest(tensor)
                if now == self._digests.get((held.name, what), now):
                    continue
                if what == "weights" and held.name in seen.moved and self._is_back(held.name, tensor, before):
                    seen.moved.remove(held.name)
                    seen.undone.append(held.name)
                elif what in MOMENTS and not bool(tensor.any()):
                    seen.emptied.append(f"{held.name} ({what})")
                elif is_narrow(tensor):
                    seen.coarse.append(f"{held.name} ({what}, rounded after the update)")

    def _is_back(self, name: str, now: torch.Tensor, before: Before) -> bool:
        """Whether the sampled elements, which the update changed, are what they were before it."""
        old = before.samples.get(name)
        return old is not None and not torch.equal(self._samples[name], old) and torch.equal(sampled(now), old)


def _states(held: Held) -> dict[str, torch.Tensor]:
    trained = held.trained
    found = {} if trained is None else {"weights": trained}
    stored = {role: held.state.get(role) for role in MOMENTS}
    return found | {role: local(one) for role, one in stored.items() if isinstance(one, torch.Tensor)}


def sound(loop: Loop, ranks: list[Observed], result: StepResult | None, under: Promises) -> list[Finding]:
    """The findings that apply to every sound run, regardless of precision."""
    findings = weight_findings([rank.weights for rank in ranks], stepped=result is not None)
    findings += replica_findings([rank.copies for rank in ranks])
    travelled = [rank.traffic for rank in ranks if rank.traffic is not None]
    for one in travelled:
        one.promised = {"gradients": set(one.reduced) or {"reduced once"}, "parameters": set(one.gathered)}
    findings += [found for found in traffic_findings(travelled, under) if found.subject != "wire: stages"]
    return findings + ([] if result is None else _followed(loop, ranks, result, under, travelled))


def _followed(
    loop: Loop, ranks: list[Observed], result: StepResult, under: Promises, travelled: list[Traffic]
) -> list[Finding]:
    followed = [rank.followed for rank in ranks if rank.followed is not None]
    if why := why_unseen(loop, "gradients"):
        return [not_observed("gradients", "reduced once", why)]
    # a loop that says that it never clips
    never = loop.foreign and getattr(loop.configs.optimizer, "clip_grad", None) == 0
    seen = {found for rank in ranks for (role, _, found) in rank.tensors if role in ("grads", "main_grads")}
    seen |= {dtype for one in travelled for dtype in one.reduced}
    most = loop.of_the_mean / result.loss_scale if loop.foreign else None
    how: dict[str, Any] = {"scale": result.loss_scale, "norm": 0.0, "clip": 0.0, "share": loop.of_the_mean}
    return gradient_findings(followed, known=never, widths={dtype: dtype for dtype in seen}, most=most, **how)


def unmeant(loop: Loop) -> list[Finding]:
    """What nobody means without saying so: a policy is how to say it. Collective."""
    adams = (held for held in holdings(loop) if type(held.inner).__name__ in ADAMS and held.main is None)
    short = [held.name for held in adams if _is_short(held.updated)]
    tables = (live for live in loop.tensors() if live.role == "buffers" and live.parameter.endswith("inv_freq"))
    rotary = [live.parameter for live in tables if _is_short(live.tensor)]
    rows = (
        ("main weights", "FP32 under Adam", "none, for weights of 16 bits", short,
         "updates below half a unit of the weight's format are lost: train FP32 parameters or keep main weights; if it is meant, pass policy='full_bf16'"),
        ("rotary frequencies", "FP32", "16 bits", rotary,
         "angles are wrong by whole radians at long positions: keep inv_freq in FP32 where the model is cast"),
    )  # fmt: skip
    found = [judged(what, wanted, from_all(names), found=seen, cure=cure) for what, wanted, seen, names, cure in rows]
    return [one for one in found if not one.ok]


def _is_short(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and local(tensor).element_size() == 2


def hidden(loop: Loop) -> list[Finding]:
    """What tensor parallelism under a sharding wrapper makes unobservable."""
    names = loop.cut_twice()
    if not names:
        return []
    why = f"{len(names)} are also split by tensor parallelism ({', '.join(names[:3])}): a rank computes only parts of their gradients"
    return [not_observed("gradients of cut linears", "reduced once", why)]
