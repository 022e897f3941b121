"""witness(): observes steps of any training loop, and describes them or judges them by a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch

from mpbridge.backend.devices.collectives import from_all, rank
from mpbridge.backend.engines.contract import StepResult
from mpbridge.common.errors import BadValue
from mpbridge.interop.stacks.base import Imported
from mpbridge.observe.audit.between import AsRead
from mpbridge.observe.audit.examine import everywhere, judge, promises_of
from mpbridge.observe.audit.findings import Finding, Report, not_observed
from mpbridge.observe.audit.observe import Observed, look
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.snapshot import Before
from mpbridge.observe.audit.watch import Watch
from mpbridge.observe.witnessing.describe import describe, nearest
from mpbridge.observe.witnessing.kinds import loop_of
from mpbridge.observe.witnessing.loops import Loop, Update
from mpbridge.observe.witnessing.report import Afterwards, Witnessed, changes, hidden, sound, unmeant
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.plan import plan

Policy = str | MixedPrecisionConfig | PrecisionPolicy | Imported
"""A recipe's name, a config, a policy, or a stack's imported configuration (mpbridge.interop.stacks.importers)."""
OnFault = Literal["raise", "show"]


def policy_of(policy: Policy, name: str = "") -> tuple[PrecisionPolicy, str]:
    """(policy, display name)."""
    if isinstance(policy, str):
        return resolve(get_mixed_precision_config(policy)), name or policy
    if isinstance(policy, Imported):
        if policy.cannot_express or not policy.fields:
            reasons = "; ".join(policy.cannot_express) or "it sets nothing that mpbridge has a setting for"
            raise BadValue(f"{policy.stack}'s configuration cannot be expressed as a policy: {reasons}")
        return resolve(MixedPrecisionConfig.from_data(policy.fields)), name or f"{policy.stack}'s configuration"
    if isinstance(policy, PrecisionPolicy):
        return policy, name or "the policy"
    if isinstance(policy, MixedPrecisionConfig):
        return resolve(policy), name or "the config"
    kinds = "a recipe's name, a MixedPrecisionConfig, a PrecisionPolicy, or a configuration imported by mpbridge.interop.stacks"
    raise BadValue(f"policy is a {type(policy).__name__}: expected {kinds}")


class Witness:
    """A witness of this model's and optimizer's training steps: `with witness(...):` around one step, or `with w.step():` around every step, of which only
    the due ones are observed. Every rank creates one and runs the same steps under it.

    A step is everything from the first micro-batch's forward pass to the optimizer's update. Outside of observed steps no hooks are installed.

    model: as the loop calls it: wrapped by DistributedDataParallel, fully_shard, FSDP, DeepSpeed, megatron-core (a list of chunks of an interleaved
    pipeline), or not at all. optimizer: as the loop steps it; a list if there are several. policy: None: the step is described, and judged only by
    what every sound run satisfies; otherwise by everything it promises. at: the steps, from 1, that `step()` observes. on_fault: 'raise': AuditFailed after the
    step, on every rank. show: called with each report as text, on rank 0; None: no output. scaler: torch's GradScaler, if the loop has one.
    clip: the norm that the loop clips gradients to (0: never), if known. group: the process group that averages gradients, if not all
    ranks. name: display name of the policy. since: a report of the same run before it was resumed, or its `as_data()`: the first report names states that
    changed, as each later one does against the one before it. Raises BadValue for objects that are not a model and an optimizer.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        policy: Policy | None = None,
        *,
        at: Collection[int] | Callable[[int], bool] = (1,),
        on_fault: OnFault = "show",
        show: Callable[[str], None] | None = None,
        scaler: Any = None,
        clip: float | None = None,
        group: Any = None,
        name: str = "",
        since: Witnessed | Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(at) and not (isinstance(at, Collection) and all(isinstance(step, int) for step in at)):
            raise BadValue(f"at={at!r}: expected numbers of steps, such as {{1}}, or a function of a step's number")
        if on_fault not in ("raise", "show"):
            raise BadValue(f"on_fault={on_fault!r}: expected 'raise' or 'show'")
        self.policy: PrecisionPolicy | None = None
        self.promised = ""
        if policy is not None:
            self.policy, self.promised = policy_of(policy, name)
        self.due = at if callable(at) else at.__contains__
        self.on_fault, self.show = on_fault, show
        self.taken = 0
        """Steps so far, observed or not."""
        self.reports: list[Witnessed] = []
        self._since = since.as_data() if isinstance(since, Witnessed) else since
        self._loop: Loop = loop_of(model, optimizer, scaler=scaler, group=group)
        if clip is not None and self._loop.configs.optimizer is None:
            self._loop.configs.optimizer = SimpleNamespace(clip_grad=clip)
        self._observing: Observation | None = None

    @property
    def report(self) -> Witnessed:
        """The latest report. Raises BadValue before there is one."""
        if not self.reports:
            raise BadValue("no step was observed yet: run one inside `with witness.step():`")
        return self.reports[-1]

    @property
    def observing(self) -> bool:
        """Whether a step is being observed."""
        return self._observing is not None

    # --- one step ------------------------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Starts observation; a step that is already being observed continues."""
        if self._observing is None:
            self._observing = Observation(self._loop, self._promises())

    def end(self, *, microbatches: int = 0, trains: bool = True) -> Witnessed:
        """Ends observation and judges the step; every rank must call it. microbatches: of the step; 0: the number of backward passes. trains: False for
        an evaluation, in which no optimizer steps.

        Raises AuditFailed under on_fault='raise'.
        """
        watching, self._observing = self._observing, None
        if watching is None:
            raise BadValue("end() without begin()")
        found = watching.concluded(self.taken, self.promised, microbatches, self._since, trains)
        if trains:
            self._since = found.as_data()
        self.reports.append(found)
        if self.show is not None and rank() == 0:
            self.show(str(found))
        return found.require() if self.on_fault == "raise" else found

    def let_go(self) -> None:
        """Removes every hook and drops what was seen of the step."""
        watching, self._observing = self._observing, None
        if watching is not None:
            watching.stop()

    def __enter__(self) -> Self:
        self.taken += 1
        self.begin()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.let_go()
        else:
            self.end()

    @contextmanager
    def step(self) -> Iterator[Witness]:
        """One step of the loop, observed if it is due."""
        if not self.due(self.taken + 1):
            self.taken += 1
            yield self
            return
        with self:
            yield self

    @contextmanager
    def evaluation(self) -> Iterator[Witness]:
        """An evaluation, or its first batch: what its forward passes read and compute in, compared with the last step's report. No optimizer may step."""
        self.begin()
        with self._dropped_on_error():
            yield self
        self.end(trains=False)

    @contextmanager
    def microbatch(self, last: Callable[[], bool]) -> Iterator[Witness]:
        """One micro-batch of a loop over micro-batches (accelerate's `accumulate`): a step ends after the one for which `last()` is true."""
        if self._observing is None and self.due(self.taken + 1):
            self.begin()
        with self._dropped_on_error():
            yield self
        if last():
            self.taken += 1
            if self._observing is not None:
                self.end()

    @contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.let_go()
            raise

    def _promises(self) -> Promises | None:
        if self.policy is None:
            return None
        loop = self._loop
        run = loop.run
        targets = {key: config for key, config in vars(loop.configs).items() if config is not None}
        kind: Literal["emulated", "native"] = "emulated" if run.emulate else "native"
        made = plan(self.policy, realization=kind, **targets) if targets and not loop.foreign else None
        loop.run = replace(run, policy=self.policy, recipe=self.promised, plan=made)
        return promises_of(self.policy, loop)  # type: ignore[arg-type]


witness = Witness
"""`mpbridge.witness`."""


class Observation:
    """One step being observed."""

    def __init__(self, loop: Loop, promises: Promises | None) -> None:
        self.loop, self.promises = loop, promises
        self.under = promises or promises_of(loop.run.policy, loop)  # type: ignore[arg-type]
        """The promises that tensors are grouped by; without a policy nothing is judged by them."""
        self.before = Before(loop)
        self.scale = loop.loss_scale
        self.updates: list[Update] = []
        self.seen: Observed | None = None
        self.result: StepResult | None = None
        quantized = promises.gemms if promises is not None and promises.seen else lambda path: None
        self.watch = Watch(quantized)
        self.after: Afterwards | None = None
        self.asked = 0
        """The maximum number of backward passes that the optimizer ran itself in one update."""
        self._begun: int | None = None
        self.steps: set[int] = set()
        """Backward passes that had begun when an optimizer stepped."""
        self._undo = (loop.on_update(self._updated), loop.on_step(self._begins))
        self.watch.start(loop.model)
        self._reading = AsRead(loop, self.before.read, self.watch.aside)

    def stop(self) -> None:
        """Removes every hook."""
        self.watch.stop()
        self._reading.stop()
        for undo in self._undo:
            undo()

    def _begins(self) -> None:
        """Called right before an update."""
        self._begun = len(self.watch.roots)
        self.steps.add(self._begun)

    def _updated(self, update: Update) -> None:
        """Called right after an update: records what is freed later."""
        self.updates.append(update)
        if self._begun is not None:
            self.asked = max(self.asked, len(self.watch.roots) - self._begun)
        if not update.applied:
            return
        with self.watch.aside(), torch.no_grad():
            if self.seen is None:
                loss, rate = math.nan, self.loop.largest("lr")  # the loop's loss is not checked
                self.result = StepResult(loss=loss, applied=True, grad_norm=update.norm, loss_scale=self.scale, lr=rate)
                self.seen = self._look(self.result)
            self.after = Afterwards(self.loop)

    def _look(self, result: StepResult | None, microbatches: int = 1) -> Observed:
        return look(self.loop, self.under, self.watch, self.before if result else None, result, microbatches)

    def concluded(
        self, step: int, promised: str, microbatches: int, since: Mapping[str, Any] | None, trains: bool = True
    ) -> Witnessed:
        """The report, the same on every rank."""
        late = self.loop.pending()
        if late is not None:
            self._updated(late)
        self.stop()
        if self.seen is None:
            with torch.no_grad():
                self.seen = self._look(None, microbatches)
        if self.after is not None:
            with torch.no_grad():
                self.after.into(self.seen.weights, self.loop, self.before)
        applied = any(one.applied for one in self.updates)
        ranks = everywhere(self.seen)
        if self.promises is None:
            findings = sound(self.loop, ranks, self.result, self.under)
        else:
            stepped = self.result is not None
            findings = judge(
                self.loop, self.promises, ranks, live=stepped, watched=True, moved=stepped, result=self.result
            )
        finite = all(from_all(bool(self.updates) or _is_finite(self.loop)))
        findings = noted(findings, self, trains=trains, finite=finite)
        findings += hidden(self.loop) + (unmeant(self.loop) if self.promises is None else [])
        facts = {"engine": self.loop.words, "step": step, "world_size": len(ranks)}
        scaled = self.scale != 1.0
        described = describe(self.loop, ranks, stepped=applied, scaled=scaled, scale=self.scale)
        findings += [] if since is None else changes(described, since)
        report = Report(stage="live", findings=tuple(findings), facts=facts)
        near = nearest(described, layers=self.loop.run.facts.shape.num_layers)
        made = Witnessed(step=step, described=described, nearest=near, promised=promised, report=report)
        return made if trains else replace(made, evaluation=True)


def _is_finite(loop: Loop) -> bool:
    """Whether this rank's gradients are finite."""
    grads = (live.tensor for live in loop.tensors() if live.role in ("grads", "main_grads"))
    return all(bool(torch.isfinite(grad.coalesce().values() if grad.is_sparse else grad).all()) for grad in grads)


def noted(findings: list[Finding], step: Observation, *, trains: bool, finite: bool) -> list[Finding]:
    """The findings; those that need exactly one update at a rate above 0 become 'not observed' if there was none or more than one. If losses are not
    scaled, gradients are finite and no optimizer was called, the step is a fault: only a step that was called can be skipped.

    trains: False: an evaluation. finite: the gradients of a step without an update are finite.
    """
    applied = sum(one.applied for one in step.updates)
    if not applied:
        why = "the optimizer did not step while it was observed" if trains else "it is an evaluation"
        if trains and step.scale != 1.0:
            why += f" (gradients that overflow at a loss scale of {step.scale:g}?)"
        if not finite:
            why = "the gradients are not finite, and the loop skipped the update"
        found = _unfollowed(findings, ("weights moved", "gradients"), why)
        if step.updates or not trains or step.scale != 1.0 or not finite:
            return found
        cure = "nothing is trained, or observation ends before the update: a step must include all of its micro-batches and optimizer.step()"
        return [*found, Finding(subject="optimizer stepped", promised="once", found="never", ok=False, cure=cure)]
    reasons = (
        (applied > 1, f"{applied} updates were observed as one step; gradients are followed through a single update"),
        (step.asked > 1, f"the optimizer ran its closure {step.asked} times in one step"),
        (step.watch.transformed, "modules ran under a transform of torch.func (vmap, grad), whose tensors cannot be read"),
        (len(step.steps) > 1, "backward passes ran between the steps of several optimizers (a GAN's)"),
    )  # fmt: skip
    why = next((why for holds, why in reasons if holds), "")
    if why:
        findings = _unfollowed(findings, ("gradients",), why)
    if step.result is not None and step.result.lr == 0.0:
        why = "the learning rate was 0 in this step (warm-up from zero?), so weights need not move"
        findings = _unfollowed(findings, ("weights moved",), why)
    return findings


def _unfollowed(findings: list[Finding], subjects: tuple[str, ...], why: str) -> list[Finding]:
    kept = [one for one in findings if one.subject not in subjects]
    return kept + [not_observed(subject, "of one step", why) for subject in subjects]
