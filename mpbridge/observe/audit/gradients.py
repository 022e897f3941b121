"""Follows gradients by value: the output of weight-gradient GEMMs, summed over micro-batches and averaged over data-parallel ranks, must be what
the optimizer reads, apart from loss scale and clipping. Then it was reduced once, over the right ranks, unscaled once, and rounded nowhere."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpbridge.numerics.observation.tensors import sample
from mpbridge.observe.audit.findings import Finding, judged, not_observed
from mpbridge.observe.audit.holdings import answer, holdings
from mpbridge.observe.audit.watch import Watch

_EXACT = 3e-5
"""Tolerated error relative to the sampled gradient's norm when its whole path is FP32: a few sums in another order."""
_ROUNDED = {"bf16": 0.02, "fp16": 0.15, "fp32": _EXACT}
"""The same when it is rounded on the path: a few times to BF16; FP16 also loses values below its smallest number."""


@dataclass
class Followed:
    """One rank's samples."""

    produced: dict[str, dict[int, float]] = field(default_factory=dict)
    """Parameter -> position -> sum of the GEMM outputs over this rank's micro-batches."""
    read: dict[str, dict[int, float]] = field(default_factory=dict)
    """Parameter -> position -> what this rank's optimizer read."""
    owners: dict[str, int] = field(default_factory=dict)
    """Parameter of a foreign loop -> which of several optimizers reads it: each may clip by a norm of its own."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Parameter -> its elements."""
    group: tuple[int, ...] = ()
    """Ranks whose dense gradients are averaged with this one's."""
    experts: tuple[int, ...] = ()
    """Ranks that have this rank's experts, where expert parallelism spreads them over `group`: their gradients are summed, and divided by the size of `group`."""
    roots: float | None = None
    """Sum of the scaled losses at which backward started; None on pipeline stages without a loss."""
    loss: float = 0.0
    tokens: int | None = None
    """Number of tokens in this rank's summed loss; None if the loss is a mean."""


def followed(engine: Any, watch: Watch, loss: float) -> Followed:
    """Samples of every weight whose gradient came from this rank's GEMMs and, unless something else is added to them on the path, of all other parameters."""
    tokens = watch.tokens[0] if len(watch.tokens) == 1 else None
    roots = sum(watch.roots) if watch.roots else None
    apart = _with_my_experts(engine)
    seen = Followed(group=data_parallel(engine), experts=apart, roots=roots, loss=loss, tokens=tokens)
    # a matrix that several modules read gets gradients from all of them
    modules = (module for chunk in engine.model for module in chunk.modules())
    times = Counter(id(one) for module in modules for one in module._parameters.values() if one is not None)
    alone, marks = is_alone(engine), ("shared_embedding", "is_embedding_or_output_parameter")
    fused = bool(getattr(engine.configs.model, "gradient_accumulation_fusion", False))
    foreign = bool(getattr(engine, "foreign", False))
    optimizers: dict[int, int] = {}
    for held in holdings(engine):
        if held.rests:
            continue
        path, _, last = held.name.rpartition(".")
        lent = bool(engine.run.facts.shape.tied) or any(getattr(held.parameter, mark, False) for mark in marks)
        tied = times[id(held.parameter)] > 1 or (lent and path.endswith(("output_layer", "word_embeddings")))
        # an expert's factor is its own
        linear = last == "weight" and ".experts." not in held.name and not tied
        produced = watch.products.gradients.get(path) if linear else None
        if produced is None and alone and not (fused and held.parameter.dim() > 1):
            produced = watch.arrivals.gradients.get(held.name)
        if produced is None:
            continue
        seen.produced[held.name], seen.sizes[held.name] = produced, held.whole
        if foreign:
            seen.owners[held.name] = optimizers.setdefault(id(held.inner), len(optimizers))
        grad = held.gradient if held.updated is not None else None
        if held.samples is not None:
            seen.read |= {held.name: held.samples} if held.samples else {}
        elif grad is not None:
            seen.read[held.name] = sample(grad, held.begin, held.whole)
    return seen


def is_alone(engine: Any) -> bool:
    """Whether a parameter's gradient is exactly what autograd delivers on the ranks that average it: there is no sum over tensor-parallel ranks or stages, and it is
    known over which ranks experts are."""
    parallel = engine.run.facts.parallel
    spread = parallel.expert > 1 and not _with_my_experts(engine)
    return not spread and parallel.tensor == parallel.pipeline == 1


def _with_my_experts(engine: Any) -> tuple[int, ...]:
    """Global ranks that have the same experts as this one, under expert parallelism on an engine of ours whose experts are not split further."""
    parallel = engine.run.facts.parallel
    if parallel.expert == 1 or getattr(engine, "foreign", False):
        return ()
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    if state.get_expert_tensor_parallel_world_size() > 1:
        return ()
    return tuple(dist.get_process_group_ranks(state.get_expert_data_parallel_group()))


def data_parallel(engine: Any) -> tuple[int, ...]:
    """Global ranks that average gradients with this one; only this one without a process group."""
    own: Callable[[], tuple[int, ...]] = answer(engine, "audit_ranks") or core_ranks
    return own()


def core_ranks() -> tuple[int, ...]:
    """megatron-core's data-parallel group, including context-parallel ranks; all ranks where it has none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return (0,)
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return tuple(range(dist.get_world_size()))
    return tuple(dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True)))


def gradient_findings(
    ranks: Sequence[Followed],
    *,
    scale: float,
    norm: float,
    clip: float,
    known: bool,
    widths: Mapping[str, str],
    most: float | None = None,
    share: float = 1.0,
    why: str = "",
    uncounted: bool = False,
) -> list[Finding]:
    """Whether each sampled gradient equals the GEMMs' output times the one expected factor.

    known: False if the factor is unknown; then all gradients must share one. widths: the dtypes on a gradient's path. share: an additional factor on the mean
    over ranks, see `share_of`. why: the reason if the factor cannot be known; the row is then 'not observed', or a fault. uncounted: a schedule that should have counted tokens did not.
    most: upper bound of an unknown factor; clipping only makes it smaller.
    """
    factor = share * (min(1.0, clip / (norm + 1.0e-6)) if clip > 0 else 1.0) / scale
    tolerance = max(_ROUNDED.get(width, 0.15) for width in widths.values()) if widths else _EXACT
    limit = _limit(ranks) if most is not None and not known else None
    one, bound = (factor, None) if known else (None, most)
    aim = Aim(factor=one, most=bound, scale=scale, tolerance=tolerance, limit=limit)
    wrong, ratios, looked = _wrong(ranks, aim)
    if most is not None and ratios and aim.factor is None:
        wrong[0] += _vanished(ranks, sum(ratios) / len(ratios) / most)
    if uncounted:
        wrong[0].append("no count of tokens was seen")
    promised = f"reduced once, unscaled once, {'/'.join(sorted(set(widths.values()))) or 'fp32'}"
    cure = (
        "find what changes them between the backward pass and the optimizer, or leaves those of the last step in them"
    )
    made = judged("gradients", promised, wrong, count=looked, cure=cure)
    if made.ok and not looked:
        nowhere = "neither a GEMM nor autograd showed a gradient that the optimizer reads"
        return [not_observed("gradients", promised, nowhere)]
    if made.ok and why:
        made = dataclasses.replace(made, found="one factor, not observed", unseen=why)
    elif made.ok and ratios and aim.factor is None:
        made = dataclasses.replace(made, found=f"{promised}, times {sum(ratios) / len(ratios):.4g}")
    return [made]


def _wrong(ranks: Sequence[Followed], aim: Aim) -> tuple[list[list[str]], list[float], int]:
    """(what is wrong on each rank, the factors that were found, the number of elements that were compared)."""
    judgements = [[*_judged_gradients(rank, ranks, aim)] for rank in ranks]
    wrong: list[list[str]] = []
    by_owner: dict[int, list[float]] = {}
    looked = 0
    for own, rank in zip(judgements, ranks, strict=True):
        wrong.append([text for *_, text in own if text] + _lost(rank, ranks))
        looked += sum(len(rank.read[name]) for name, *_ in own)
        for name, ratio, _ in own:
            by_owner.setdefault(rank.owners.get(name, 0), []).append(ratio)
    for ratios in by_owner.values():
        if aim.factor is None and max(ratios) - min(ratios) > 2 * aim.tolerance * abs(min(ratios)):
            wrong[0].append("gradients of different parameters were scaled differently")
    return wrong, [ratio for ratios in by_owner.values() for ratio in ratios], looked


_CLIPPED, _LEAST = 2.0**-7.5, 1e-4
"""A factor below which clipping was strong, and a norm far below what anybody clips to: strong clipping leaves a norm of its limit."""


def _vanished(ranks: Sequence[Followed], factor: float) -> list[str]:
    """Gradients that were clipped while they were still multiplied by a loss scale: their norm, estimated from the samples, is that limit divided by the scale."""
    read = {name: (rank.sizes.get(name, 0), values) for rank in ranks for name, values in rank.read.items() if values}
    norm = math.sqrt(sum(size / len(values) * sum(v * v for v in values.values()) for size, values in read.values()))
    if not (0.0 < factor < _CLIPPED and 0.0 < norm < _LEAST):
        return []
    what = f"{factor:.2g} times their expected value and of a norm of about {norm:.2g}"
    return [f"{what}: clipped before they were unscaled"]


def share_of(ranks: Sequence[Followed]) -> float | None:
    """For a loss summed over tokens: the factor from the mean of the ranks' gradients to their mean over all tokens of the step; None if no rank counted."""
    first = next((rank for rank in ranks if rank.roots is not None), None)
    if first is None:
        return None
    tokens = [ranks[other].tokens for other in first.group]
    total = sum(count for count in tokens if count is not None)
    return len(tokens) / total if total > 0 and None not in tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The expected factor between the GEMMs' gradient and the optimizer's."""

    factor: float | None
    """None: all that is known is that all gradients share one."""
    most: float | None
    """Upper bound of an unknown factor; None: unbounded."""
    scale: float
    tolerance: float
    limit: float | None = None
    """The value to which a foreign loop may have clipped every element; None: not clipped."""


_NEAR = 2.0**-7
"""Relative distance at which an element counts as clipped: one limit, rounded to BF16."""


def _limit(ranks: Sequence[Followed]) -> float | None:
    """The magnitude that several sampled elements share and none exceeds, as after clipping by value."""
    sizes = [abs(value) for rank in ranks for values in rank.read.values() for value in values.values()]
    largest = max(sizes, default=0.0)
    return largest if math.isfinite(largest) and sum(size == largest for size in sizes) > 1 else None


def _clipped(
    found: Mapping[int, float], expected: Mapping[int, float], limit: float
) -> tuple[float | None, float] | None:
    """`_compare` of the elements that clipping by value left alone, with factor None if they are too few; None if a clipped one was not larger or changed sign."""
    free = {where: value for where, value in found.items() if abs(value) < limit * (1 - _NEAR)}
    cut = found.keys() - free.keys()
    ratio, rest = _compare(free, {where: expected[where] for where in free}) or (None, 0.0)
    least = 0.0 if ratio is None else limit * (1 - 2 * _NEAR) / ratio if ratio > 0 else math.inf
    fine = all(expected[where] * found[where] > 0 and abs(expected[where]) >= least for where in cut)
    return (ratio, rest) if cut and fine else None


def _judged_gradients(rank: Followed, ranks: Sequence[Followed], aim: Aim) -> Iterator[tuple[str, float, str]]:
    """(parameter, factor found, what is wrong with it) of every gradient that this rank's optimizer read."""
    over = len(rank.group)
    for name, values in rank.read.items():
        made = [ranks[other].produced.get(name, {}) for other in _sources(rank, name)]
        expected = {where: sum(one.get(where, 0.0) for one in made) / over for where in values}
        compared = _compare(values, expected)
        if compared is None:
            continue
        ratio, rest = compared
        clipped = _clipped(values, expected, aim.limit) if aim.limit and not rest <= aim.tolerance else None
        if clipped is not None:
            if clipped[0] is None:
                continue
            ratio, rest = clipped[0], clipped[1]
        text = ""
        if not rest <= aim.tolerance:  # also true for NaN
            text = "not finite" if math.isnan(rest) else "differs from what its backward pass produced"
        elif aim.factor is not None and abs(ratio / aim.factor - 1) > aim.tolerance:
            text = _words(ratio / aim.factor, aim.scale, over)
        elif aim.most is not None and ratio > aim.most * (1 + aim.tolerance):
            text = _words(ratio / aim.most, aim.scale, over)
        elif aim.most is not None and _is_a_scale(ratio / aim.most, min(aim.tolerance, 1e-3)):
            text = f"{ratio / aim.most:.6g} times its expected value: divided by a loss scale that the loss was not multiplied by"
        elif aim.factor is None and ratio < 0:
            text = "has the opposite sign"
        yield name, ratio, f"{name}: {text}" if text else ""


def _is_a_scale(ratio: float, tolerance: float) -> bool:
    """Whether a factor is a power of two that clipping hardly ever gives: 2**-8 or less, as loss scales are."""
    return 0.0 < ratio < _CLIPPED and abs(ratio / 2.0 ** round(math.log2(ratio)) - 1) <= tolerance


def _lost(rank: Followed, ranks: Sequence[Followed]) -> list[str]:
    """Gradients of which no rank of the group reports what its optimizer read; otherwise the gradient's shard is on another rank."""
    missing = (name for name in rank.produced if name not in rank.read)
    nowhere = (name for name in missing if not any(name in ranks[other].read for other in _sources(rank, name)))
    return [f"{name}: no gradient reached the optimizer" for name in nowhere]


def _sources(rank: Followed, name: str) -> tuple[int, ...]:
    """The ranks that produce this rank's gradient of a parameter."""
    return rank.experts if rank.experts and ".experts." in name else rank.group


def _compare(found: Mapping[int, float], expected: Mapping[int, float]) -> tuple[float, float] | None:
    """(best factor from expected to found, residual relative to found); None if both are zero throughout or there are too few."""
    size = math.sqrt(sum(v * v for v in expected.values()))
    length = math.sqrt(sum(v * v for v in found.values()))
    if len(found) < 4 or (size == 0.0 and length == 0.0):
        return None
    if size == 0.0 or length == 0.0:
        return 0.0, 1.0
    ratio = sum(found[k] * expected[k] for k in found) / (size * size)
    rest = math.sqrt(sum((found[k] - ratio * expected[k]) ** 2 for k in found)) / length
    return ratio, rest


def _words(ratio: float, scale: float, ranks: int) -> str:
    if scale != 1.0 and abs(ratio * scale - 1) < 0.2:
        return "unscaled twice"
    if scale != 1.0 and abs(ratio / scale - 1) < 0.2:
        return "never unscaled"
    if ranks > 1 and abs(ratio - ranks) < 0.2:
        return f"{ranks} times too large: summed, not averaged, or reduced twice"
    return f"{ratio:.6g} times its expected value"


def scale_finding(ranks: Sequence[Followed], scale: float, promised: str, *, known: bool) -> list[Finding]:
    """Whether backward started at the loss times the scale."""
    with_loss = [rank for rank in ranks if rank.roots is not None]
    if not with_loss or not known:
        return []
    loss = with_loss[0].loss
    mean = sum(rank.roots or 0.0 for rank in with_loss) / len(with_loss)
    found = mean / loss if loss else 0.0
    ok = abs(found / scale - 1) < 1e-3 if loss else True
    seen = f"{found:.6g} times the loss" if loss else "no loss"
    cure = "" if ok else "multiply the loss by the scale that its gradients are divided by"
    return [Finding(subject="loss scale", promised=promised, found=seen, ok=ok, count=len(with_loss), cure=cure)]
