"""What is tuned (a run's model on its engine, or any module with a loss; both provide gradients for numbered batches), and the proof: gradients under several policies on batches
not used for scores, compared batch by batch with high precision, and the verdict on the proposal."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from mpbridge.backend.devices.collectives import summed
from mpbridge.backend.engines.contract import Batch
from mpbridge.common.errors import BadValue, DataError, Refused
from mpbridge.numerics import Emulation
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.training.data.batches import Feed
from mpbridge.training.tune.choices import TUNED

BatchSource = str
"""'train': batches for scoring; 'valid': batches not used for scores."""


class Subject(Protocol):
    """A model whose linears are emulated."""

    emulation: Emulation

    def backward(self, split: BatchSource, number: int) -> float:
        """Forward and backward of a global batch, in the emulation's current state; returns the loss, which need not be finite."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of that batch, each element on one rank of the job only; valid until the next one."""


@contextlib.contextmanager
def same_draws(number: int) -> Iterator[None]:
    """Random draws in the block depend only on the batch's number, so that every policy has the same dropout masks; the outer generators are unaffected."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        yield


@contextlib.contextmanager
def same_parallel_draws() -> Iterator[None]:
    """The same for the generators that tensor-parallel ranks draw dropout from: every batch begins with the same state."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(before)


def require_gradients(engine: Any) -> None:
    """Raises Refused for another package's engine that lacks what gradients are measured with: it trains without."""
    if lacking := [name for name in ("backward", "counted_gradients") if not hasattr(engine, name)]:
        raise Refused(
            f"engine={engine.name} has no {' and no '.join(lacking)}, expected both methods of mpbridge.backend.engines.contract.Engine, by which gradients "
            "are compared: add them to the engine, or set another (engine=mcore)"
        )


class EngineSubject:
    """A run's model on its engine; a batch is a global batch of the run."""

    def __init__(self, engine: Any, feed: Feed, *, microbatches: int, rank: int, ranks: int) -> None:
        require_gradients(engine)
        self.engine, self.emulation, self.feed = engine, engine.emulation, feed
        self._micro, self._rank, self._ranks = microbatches, rank, ranks
        if (scale := engine.emulation.policy.loss_scale) is not None and scale.dynamic:
            self._settle()

    def _settle(self) -> None:
        """Lowers a dynamic loss scale as overflowing steps do, and a little further: at the value that it settles at, another batch may overflow."""
        optimizer, room = self.engine.optimizer, 3
        # a rank without parameters of its own scales the loss too
        held = [getattr(one, "grad_scaler", None) for one in (optimizer, *getattr(optimizer, "chained_optimizers", ()))]
        scalers = {id(one): one for one in held if one is not None}.values()
        for _ in range(64):  # from 2**32, with hysteresis
            if not room:
                break
            high_precision(self, "train", 0)
            room -= math.isfinite(summed([_norm2(self.gradients())])[0])
            for scaler in scalers:
                scaler.update(True)

    def backward(self, split: BatchSource, number: int) -> float:
        """See Subject."""
        size = int(self.feed.run.train["global_batch_size"])
        stream: Iterator[Batch] = islice(self.feed.batches(split, number * size, self._rank, self._ranks), self._micro)
        with same_draws(number), same_parallel_draws():
            return float(self.engine.backward(stream, microbatches=self._micro))

    def gradients(self) -> list[torch.Tensor]:
        """See Subject."""
        return [gradient for _, gradient in self.engine.counted_gradients()]


class ModuleSubject:
    """Any module: `loss(module, batch)` returns a scalar with a graph behind it; the last `unseen` batches are for the proof."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Callable[[torch.nn.Module, Any], torch.Tensor],
        batches: Sequence[Any],
        emulation: Emulation,
        *,
        unseen: int,
    ) -> None:
        self.module, self.loss, self.emulation = module, loss, emulation
        scored = len(batches) - unseen
        self.batches = {"train": list(batches[:scored]), "valid": list(batches[scored:])}
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def backward(self, split: BatchSource, number: int) -> float:
        """See Subject."""
        for parameter in self.parameters:
            parameter.grad = None
        with same_draws(number):
            loss = self.loss(self.module, self.batches[split][number])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise BadValue(
                f"the step returned {type(loss).__name__}{tuple(loss.shape) if isinstance(loss, torch.Tensor) else ''}, expected the "
                "batch's loss: a scalar tensor with its graph, on which backward has not been called"
            )
        if any(parameter.grad is not None for parameter in self.parameters):
            raise BadValue(
                "the step called backward itself: expected a step that returns the batch's loss without calling backward (or the optimizer), "
                "since gradients are computed several times in several formats"
            )
        with same_draws(number):
            # activation recomputation restores its own state
            torch.autograd.backward(loss)
        return float(loss.detach())

    def gradients(self) -> list[torch.Tensor]:
        """See Subject."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not found:
            raise BadValue("the step's loss has no gradient for any parameter, so nothing can be measured")
        return found


def high_precision(subject: Subject, split: BatchSource, number: int) -> float:
    """Forward and backward of a global batch in high precision; the loss. Raises DataError if it is not finite; every rank has the same loss."""
    with contextlib.ExitStack() as stack:
        if not subject.emulation.is_paused:
            stack.enter_context(subject.emulation.paused())
        loss = subject.backward(split, number)
    if not math.isfinite(loss):
        raise DataError(
            f"the loss of {'scoring' if split == 'train' else 'unseen'} batch {number + 1} is {loss}: a NaN or an overflow in the data or the "
            "weights, which no format fixes (check that batch, or start from another checkpoint)"
        )
    return loss


YARDSTICK = 1 / math.sqrt(3)
"""Noise over the gradient's norm above which training degrades: "FP4 All the Way" (arXiv 2505.19115), where the gradient's norm falls below sqrt(3) times the
quantization noise."""


FOLD = 1 << 23
"""Elements of a policy's folded sum: 32 MiB."""


@dataclass(slots=True, kw_only=True)
class GradientError:
    """One policy's gradients against high precision's, over some batches."""

    errors: list[float] = field(default_factory=list)
    """||g_q - g|| / ||g|| of each global batch."""
    gaps: list[float] = field(default_factory=list)
    """Loss minus high precision's of each batch, nats per token."""
    bias: float = 0.0
    """The part of the error's norm over the gradient's norm that is the same in every batch, so that no larger batch averages it out."""
    noise: float = 0.0
    """The rest of it, which averages out over batches."""

    @property
    def error(self) -> float:
        """Mean over batches."""
        return statistics.fmean(self.errors)

    @property
    def se(self) -> float:
        """Standard error of the mean."""
        return _se(self.errors)

    def better_than(self, other: GradientError) -> tuple[float, float]:
        """(other's error minus this one's, mean over the same batches; its standard error)."""
        if not math.isfinite(self.error) or not math.isfinite(other.error):
            return (math.inf if math.isfinite(self.error) else -math.inf), 0.0
        gaps = [theirs - mine for mine, theirs in zip(self.errors, other.errors, strict=True)]
        return statistics.fmean(gaps), _se(gaps)

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        figures = {"error": self.error, "se": self.se, "bias": self.bias, "noise": self.noise}
        return figures | {"loss_gap": statistics.fmean(self.gaps)}


def _se(values: Sequence[float]) -> float:
    if not all(math.isfinite(value) for value in values):
        return math.inf
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def prove(
    subject: Subject, arms: Mapping[str, PrecisionPolicy], batches: int, *, split: str = "valid"
) -> dict[str, GradientError]:
    """name -> its figures over that many unseen batches; infinite errors if a policy's gradient overflows. Every rank calls it; the emulation's policy is restored.

    Every policy sees the same batches and the same random bits. Keeps one FP32 gradient, and for each policy a folded sum of its errors (`Folded`).
    """
    found = {name: GradientError() for name in arms}
    sums = {name: Folded() for name in arms}
    squares: dict[str, list[float]] = {name: [] for name in arms}
    own = subject.emulation.policy
    norms: list[float] = []
    for number in range(batches):
        high = high_precision(subject, split, number)
        exact = [gradient.detach().float().clone() for gradient in subject.gradients()]
        norms.append(summed([_norm2(exact)])[0])
        if not math.isfinite(norms[-1]):
            cure = "a lower loss scale may" if own.loss_scale else "check that batch, or start from another checkpoint"
            raise DataError(
                f"the gradient of batch {number + 1} is not finite in high precision either, which no format fixes ({cure})"
            )
        if not norms[-1]:
            raise DataError(
                f"batch {number + 1} has no gradient at all, so no relative error can be computed (is every token masked?)"
            )
        for name, policy in arms.items():
            loss = under(subject, policy, split, number)
            pairs = zip(subject.gradients(), exact, strict=True)
            squared = summed([sums[name].add(mine.detach().float() - theirs for mine, theirs in pairs)])[0]
            squares[name].append(squared if math.isfinite(squared) else math.inf)
            found[name].errors.append(math.sqrt(squares[name][-1] / norms[-1]))
            found[name].gaps.append(loss - high)
    if subject.emulation.policy != own:
        subject.emulation.switch(own)
    scale = statistics.fmean(norms)
    for name, mine in found.items():
        whole = statistics.fmean(squares[name])
        if not math.isfinite(whole):
            mine.bias = mine.noise = math.inf
            continue
        # unbiased: the products of different batches' errors only
        shared = summed([sums[name].across()])[0] / (batches * (batches - 1)) if batches > 1 else whole
        mine.bias = math.sqrt(max(shared, 0.0) / scale)
        mine.noise = math.sqrt(max(whole - max(shared, 0.0), 0.0) / scale)
    return found


class Folded:
    """The sum of vectors, for the products of pairs of them, in FOLD elements regardless of their length.

    A longer vector is folded over itself in laps, each lap but the first with random signs (the same for every vector), which preserves the expected
    product of two vectors. The error is about |a| |b| / sqrt(FOLD), 0.04 % for vectors of any length, and exact for one that fits.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._own = 0.0

    def add(self, parts: Iterable[torch.Tensor]) -> float:
        """Adds a vector given in FP32 parts; returns its squared norm."""
        place, squared, fold = 0, 0.0, None
        for part in parts:
            flat, begin = part.reshape(-1), 0
            squared += _norm2([flat])
            if fold is None:  # a replica counts no gradients
                fold = torch.zeros(FOLD if self._sum is None else self._sum.numel(), device=flat.device)
            while begin < flat.numel():
                lap, at = divmod(place, FOLD)
                piece = flat[begin : begin + FOLD - at]
                span = slice(at, at + piece.numel())
                fold[span] += piece * _signs(lap, flat.device)[span] if lap else piece
                begin, place = begin + piece.numel(), place + piece.numel()
        if fold is not None:
            if place < fold.numel():  # the vectors are all this long: what is behind them stays zero
                fold = fold[:place].clone()
            self._own += _norm2([fold])
            self._sum = fold if self._sum is None else self._sum.add_(fold)
        return squared

    def across(self) -> float:
        """The sum of the products of all ordered pairs of different vectors."""
        return _norm2([self._sum]) - self._own if self._sum is not None else 0.0


@functools.lru_cache(maxsize=1)
def _signs(lap: int, device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(lap)
    return (torch.randint(0, 2, (FOLD,), generator=draw, dtype=torch.int8) * 2 - 1).to(device)


def under(subject: Subject, policy: PrecisionPolicy, split: str, number: int) -> float:
    """Forward and backward of a batch under `policy`; the loss."""
    emulation = subject.emulation
    if policy != emulation.policy:  # a switch resets everything, including the histories of delayed scaling
        emulation.switch(policy)
    emulation.step_at(number + 1)
    return subject.backward(split, number)


def _norm2(tensors: Sequence[torch.Tensor]) -> float:
    if not tensors:
        return 0.0
    return float(torch.stack([tensor.float().square().sum(dtype=torch.float64) for tensor in tensors]).sum())


ERRORS = 2.0
"""Standard errors of the paired difference that separate two choices."""
SAME_COST = 1.005


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningVerdict:
    """The verdict as text, and the arm to use."""

    take: str
    """The arm: 'tuned', or a rule's name."""
    lines: tuple[str, ...]


def judged(proof: Mapping[str, GradientError], spent: Mapping[str, float], same: Mapping[str, bool]) -> TuningVerdict:
    """proof and spent: by arm, the proposal's under TUNED; same: whether an arm's choice is the proposal itself."""
    mine = proof[TUNED]
    take, lines = _beside_rules(proof, spent, same)
    drawn = [name for name in proof if name.startswith("random")]
    if drawn:
        errors = [proof[name].error for name in drawn]
        each = f"{errors[0]:.3f}"
        if len(drawn) > 1:
            each = f"{sum(errors) / len(errors):.3f} on average, {min(errors):.3f} the best of them"
        below = f", below {take}'s {proof[take].error:.3f}" if min(errors) < proof[take].error else ""
        lines.append(
            f"{len(drawn)} random choice{'s' if len(drawn) > 1 else ''} at {_costs([spent[name] / spent[TUNED] for name in drawn])}: off by {each}{below}"
        )
    for name, one in proof.items():
        if name.startswith("all ") and spent[name] > spent[TUNED] * SAME_COST and one.error < mine.error:
            lines.append(f"{name} costs {spent[name] / spent[TUNED]:.2f} times as much and is off by {one.error:.3f}")
    final = proof[take]
    word, cure = "is below", ""
    if final.noise > YARDSTICK:
        times = math.ceil((final.noise / YARDSTICK) ** 2)
        word, cure = "is above", f": a global batch {times} times as large would bring it below"
    noise = f"noise per global batch {final.noise:.3f} of the gradient"
    lines.append(f"{noise} {word} the yardstick {YARDSTICK:.3f} (1/sqrt 3), bias {final.bias:.3f}{cure}")
    return TuningVerdict(take=take, lines=tuple(lines))


def _beside_rules(
    proof: Mapping[str, GradientError], spent: Mapping[str, float], same: Mapping[str, bool]
) -> tuple[str, list[str]]:
    """(the arm to take, why) from the proposal and the simple rules that cost no more."""
    mine = proof[TUNED]
    affordable = [name for name in proof if name != TUNED and spent[name] <= spent[TUNED] * SAME_COST]
    rules = {name: proof[name] for name in affordable if not name.startswith("random")}
    if not rules:
        return TUNED, []
    best = min(rules, key=lambda name: rules[name].error)
    if same[best]:
        text = f"the choice is {best} itself, the best simple rule at no higher cost: gradient error {mine.error:.3f}"
        return TUNED, [text]
    gap, se = mine.better_than(rules[best])
    figures = f"gradient error {mine.error:.3f} against {rules[best].error:.3f}, {gap:+.3f} +- {se:.3f} on {len(mine.errors)} unseen batches"
    if gap > ERRORS * se:
        return TUNED, [f"better than {best}, the best simple rule at no higher cost: {figures}"]
    return best, [f"no better than {best}: take that ({figures})"]


def _costs(ratios: Sequence[float]) -> str:
    """Costs relative to the proposal's, as text."""
    least, most = min(ratios), max(ratios)
    if least >= 1 / SAME_COST and most <= SAME_COST:
        return "the same cost"
    span = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
    return f"{span} times its cost"
