"""Between two audits: when the next is due, the weights that a forward pass reads, and conditions that must hold after every step and are cheap to check (dtypes of
all roles, derived flags, the loss scale, hooks still in place)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from mpbridge.numerics.observation.modules import linears, module_paths
from mpbridge.observe.audit.flags import flags_of
from mpbridge.observe.audit.holdings import holdings
from mpbridge.observe.audit.observe import Observed, roles_into, rule_of
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.weights import Weights, standing
from mpbridge.precision.wording import rule_words

SHARE = 0.002
"""Share of the run's time for repeated audits: 0.2 %, so that together with the invariants (0.15 to 0.25 %) they stay below 0.5 %."""
SOONEST = 25
"""Minimum number of steps between two audits when they are scheduled by time."""
LATEST = 250
"""Maximum: a fault is found within so many steps, whatever an audit costs. bench_audit.py: at most about one step in any recipe, 0.4 % of a run."""


class Cadence:
    """The steps that are audited. Steps are counted from 1.

    every: a number of steps, or None: by time. Timings differ between ranks, so the caller makes all ranks agree on `next_by_time`.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.reason = "first update"
        """Why the next audit is due."""
        self._pending, self._next = True, 0
        self._usual = self._begun = 0.0

    def ask(self, reason: str) -> None:
        """Requests an audit of the next step that applies an update, regardless of its number."""
        self._pending, self.reason = True, reason

    def due(self, step: int) -> bool:
        """Whether `step` is to be audited."""
        if self._pending:
            return True
        if self.every is not None:
            return self.every > 0 and step % self.every == 0
        return bool(self._next) and step >= self._next

    def begin(self) -> None:
        """Marks the beginning of a step."""
        self._begun = time.perf_counter()

    def end(self, *, watched: bool) -> float:
        """Marks the end of a step. Returns the extra seconds that it took over an ordinary step, if it was watched."""
        took = time.perf_counter() - self._begun
        if watched:
            return max(0.0, took - self._usual) if self._usual else took
        self._usual = took if not self._usual else min(self._usual * 1.05, 0.8 * self._usual + 0.2 * took)
        return 0.0

    def next_by_time(self, step: int, cost: float) -> int:
        """The next step at which another audit of that many seconds stays within its share."""
        if not self._usual:
            return step + SOONEST
        return step + min(LATEST, max(SOONEST, math.ceil(cost / (SHARE * self._usual))))

    def done(self, following: int) -> None:
        """Records an audit; when audits are scheduled by time, the next one is due at step `following`."""
        self._pending, self._next = False, following
        self.reason = f"every {self.every} steps" if self.every else "by time"


Shape = dict[str, tuple[int, str, tuple[str, ...]]]
"""Module -> (number of hooks, class, names of methods overridden on the instance)."""


def fingerprint(engine: Any) -> Shape:
    """How every module is wired; taken after the first step, when lazy set-up is done."""
    found: Shape = {}
    for module, path in module_paths(engine.model).items():
        hooks = sum(len(getattr(module, name)) for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks"))
        forward = ((name, value) for name, value in vars(module).items() if callable(value) and "forward" in name)
        own = tuple(f"{name}={id(value)}" for name, value in forward)
        key = path if path not in found else f"{path} ({type(module).__name__})"
        found[key] = (hooks, type(module).__name__, own)
    return found


def broken(engine: Any, promises: Promises, wiring: Shape | None) -> list[str]:
    """Every invariant that does not hold on this rank, in words."""
    seen = Observed()
    roles_into(seen, promises, list(resting(engine)))
    faults = [
        f"{role} of {name}: promised {promised}, found {found}"
        for (role, promised, found), tally in seen.tensors.items()
        for name in tally.offenders
    ]
    faults += flags_of(engine, promises)[1]
    for path, module in linears(engine.model).items() if promises.emulated else ():
        promised, found = rule_words(promises.gemms(path)), rule_of(module, True, ran=True)
        faults += [f"{path}: promised {promised}, found {found}"] if promised != found else []
    outside = (held.name for held in holdings(engine) if held.updated is not None and held.group is None)
    faults += [f"{name}: no longer in any group of the optimizer" for name in outside]
    if wiring is not None:
        now = fingerprint(engine)
        apart = ((path, before, now.get(path)) for path, before in wiring.items() if now.get(path) != before)
        faults += [f"{path or 'the model'}: {_changed(before, after)}" for path, before, after in apart]
    return faults


def resting(engine: Any) -> Any:
    """The engine's live tensors without a gather: parameters may be one update behind."""
    return getattr(engine, "tensors_at_rest", engine.tensors)()


def _changed(before: tuple[int, str, tuple[str, ...]], now: tuple[int, str, tuple[str, ...]] | None) -> str:
    if now is None:
        return "is gone"
    if before[1] != now[1]:
        return f"was {before[1]}, is {now[1]}"
    if before[0] != now[0]:
        return f"had {before[0]} hooks, has {now[0]}"
    return "its forward was replaced"


class AsRead:
    """Compares once, at the end of the first forward pass through every model chunk of this rank: a parameter gather that overlaps with it is complete by then.

    then: called with what was found. aside: a context in which operations are not recorded as part of the step.
    """

    def __init__(
        self,
        engine: Any,
        then: Callable[[Weights], None] = lambda seen: None,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.seen: Weights | None = None
        """None until the forward pass has run."""
        self._engine, self._then, self._aside = engine, then, aside
        self._handles = {
            number: chunk.register_forward_hook(partial(self._ran, number)) for number, chunk in enumerate(engine.model)
        }

    def _ran(self, number: int, module: Any, args: Any, output: Any) -> None:
        handle = self._handles.pop(number, None)
        if handle is None:  # two threads run one chunk
            return
        handle.remove()
        # under a transform of torch.func (vmap, grad) parameters have no values that could be read
        if not self._handles and torch._C._functorch.peek_interpreter_stack() is None:
            with self._aside(), torch.no_grad():
                self.seen = standing(self._engine)
            self._then(self.seen)

    def stop(self) -> None:
        """Removes the hooks that did not run."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
