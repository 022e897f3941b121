"""The dtypes that the step computed in, by kind of operation, against the policy: GEMMs, attention, softmax, router, residual, norms, rotary angles, logits, loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.common.formats import DType
from mpbridge.numerics.codes import EIGHT_BITS
from mpbridge.numerics.observation.modules import is_attention, is_library, is_norm, is_rotary, is_router
from mpbridge.numerics.observation.tensors import is_narrow
from mpbridge.observe.audit.findings import Finding, joined, judged, not_observed, nothing
from mpbridge.observe.audit.promise import Promises
from mpbridge.observe.audit.watch import LOGITS, Watch

PlaceDtypes = tuple[str, tuple[str, ...], tuple[str, ...]]
"""(where, promised dtypes, dtypes seen)."""


def unread(promises: Promises) -> tuple[frozenset[torch.dtype], frozenset[torch.dtype]]:
    """Dtypes that nothing may read: in a module's forward pass, and in the rest of the step (backward, hooks, reduction, the optimizer's update)."""
    policy = promises.policy
    named = {one.torch() for one in vars(policy).values() if isinstance(one, DType)}
    # BF16 and FP32 runs have no use for FP16, which ends at 65,504
    found = set() if policy.compute is DType.FP16 else {torch.float16}
    if policy.compute is DType.FP32:
        found |= {torch.bfloat16} - named
    if policy.quantized:  # E5M2 codes are widened by way of FP16, whose upper half they are
        return frozenset(found), frozenset()
    # Newton-Schulz runs in BF16 in any recipe; moments of one byte are FP8
    optimizers = named | ({torch.bfloat16} if promises.matrices is not None else set())
    eight = frozenset() if torch.uint8 in named else EIGHT_BITS
    return frozenset(found) | EIGHT_BITS, frozenset(found - optimizers) | eight


@dataclass
class Computed:
    """One rank's observation."""

    kinds: dict[str, list[PlaceDtypes]] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    """Kind -> places whose dtype is as promised but whose values are not."""
    autocast: list[str] = field(default_factory=list)


KindDtypes = tuple[str, str, Iterable[str], Iterable[str]]
"""(kind, place, promised dtypes, dtypes seen)."""


def computed(engine: Any, promises: Promises, watch: Watch) -> Computed:
    """What `watch` saw in each place, together with what the policy promises there."""
    seen = Computed(autocast=sorted(watch.autocast))
    compute = promises.policy.compute.short
    on_cpu = next(engine.model[0].parameters()).device.type == "cpu"
    # CPUs have no usable FP16 GEMM: the device layer multiplies FP16 factors in FP32 and rounds once, as tensor cores do
    gemm = (compute, _WIDE) if compute == "fp16" and on_cpu else (compute,)
    linears, attention = _linears(promises, watch, gemm), _attention(promises, watch, gemm)
    rows = (*linears, *attention, *_between(promises, watch), *_adapters(engine, promises, watch))
    for kind, place, promised, dtypes in rows:
        seen.kinds.setdefault(kind, []).append((place, tuple(promised), tuple(dtypes)))
    _values(engine, promises, watch, seen)
    return seen


_WIDE = "fp32"
_NARROW = "values with 10 or fewer mantissa bits"
"""The result of rounding to TF32, FP16, BF16 or FP8."""


def _linears(promises: Promises, watch: Watch, gemm: tuple[str, ...]) -> Iterator[KindDtypes]:
    policy, compute = promises.policy, promises.policy.compute.short
    if policy.router is DType.FP32 and not promises.foreign:
        for path, dtypes in watch.routing.items():
            yield "router", path, (_WIDE,), dtypes
    routers = {path for module, path in watch._paths.items() if is_router(module)}
    for path, dtypes in watch.products.dtypes.items():
        kind, wanted = "GEMMs", gemm
        if path in routers:
            kind, wanted = "router", (policy.router.short,) if policy.router is not None else gemm
        elif path.endswith("output_layer") and policy.logits is not None:
            kind, wanted = "logits", (policy.logits.short,)
        elif promises.kept_fp32(f"{path}.weight"):
            wanted = (_WIDE,)
        elif promises.gemms(path).distinct and promises.seen:
            # values on a narrow grid, stored in a wider dtype; `quantization` judges them
            wanted = ("bf16", _WIDE)
        yield kind, path, wanted, dtypes
    for path, dtypes in watch.outputs.items():
        if path.endswith("output_layer") and policy.logits is not None:
            yield "logits", path, (policy.logits.short,), dtypes
        else:
            kept = promises.kept_fp32(f"{path}.weight")
            yield "outputs of linears", path, (compute, _WIDE) if kept else (compute,), dtypes


def _attention(promises: Promises, watch: Watch, gemm: tuple[str, ...]) -> Iterator[KindDtypes]:
    compute = promises.policy.compute.short
    for path, dtypes in watch.attention.items():
        yield "attention", path, (compute, _WIDE) if path in watch.widened else gemm, dtypes
    for path, dtypes in watch.passed.items():
        yield "attention", path, (compute,), dtypes
    stated = promises.policy.softmax_fp32
    either = (compute,) if stated is False else (compute, _WIDE)
    for path, dtypes in watch.softmax.items():
        # checked where a module's flag promises it; fused kernels and other models' attention may read any dtype
        wide = stated is True and path.endswith("scale_mask_softmax") and path not in watch.fused
        yield "softmax", path, (_WIDE,) if wide else either, dtypes


def _between(promises: Promises, watch: Watch) -> Iterator[KindDtypes]:
    """Everything between GEMMs: norms, scans of Mamba layers, the residual stream, rotary angles, the loss."""
    compute = promises.policy.compute.short
    either = (compute, _WIDE)
    for path, dtypes in watch.norms.items():
        # torch's own norm kernels read any dtype and accumulate in FP32; a norm written in Python must cast explicitly
        wide = promises.kept_fp32(f"{path}.weight") or (path in watch.spelled and not promises.foreign)
        yield "norms", path, (_WIDE,) if wide else either, dtypes
    for path, dtypes in watch.scans.items():
        yield "scan", path, (_WIDE,), dtypes
    # under autocast the stream's dtype follows from the model's own additions
    stream = (_WIDE,) if promises.policy.residual_fp32 else either if promises.foreign else (compute,)
    for path, dtypes in watch.stream.items():
        yield "residual stream", path, stream, dtypes
    # other models pass their angles on in the activations' dtype, and may pass logits of that dtype to the loss, whose kernel accumulates in FP32
    final = either if promises.foreign else (_WIDE,)
    for path, dtype in watch.angles.items():
        yield "rotary angles", path, final, (dtype,)
    if watch.loss:
        yield "loss", "cross entropy", final, watch.loss


def _adapters(engine: Any, promises: Promises, watch: Watch) -> Iterator[KindDtypes]:
    """The factor of every adapter's product: the declared alpha over rank, where what it returned is that, rounded."""
    rank = promises.run.shape.lora_rank
    alpha = (engine.run.inputs.get("model") or {}).get("lora_alpha") if rank else None
    declared = 1.0 if alpha is None or not rank else alpha / rank
    for path, seen in watch.adapters.items():
        wrong = sorted(factor for factor, room in seen if abs(factor - declared) > room * abs(declared))
        if seen:
            found = wrong[len(wrong) // 2] if wrong else declared
            yield "adapters", path, (f"times {declared:.6g}",), (f"times {found:.6g}",)


def _values(engine: Any, promises: Promises, watch: Watch, seen: Computed) -> None:
    """Values that have the promised dtype but were rounded to fewer bits earlier."""
    seen.wrong = _unproved(engine, promises, watch) | {"residual stream": []}
    odd = watch.odd.items()
    seen.wrong["GEMMs"] += [f"{path or 'the model'}: {kind} in {joined(names)}" for (path, kind), names in odd]
    seen.wrong["GEMMs"] += [f"{path} reads {what}" for path, what in watch.products.other.items()]
    parallel = promises.run.parallel
    if parallel.tensor == parallel.expert_width == 1 and not promises.foreign:
        seen.wrong["GEMMs"] += [f"{path} {what}" for path, what in watch.products.passing.wrong.items()]
    policy = promises.policy
    apart = {LOGITS, *watch.angles, *watch.routing}
    if policy.compute.short == "fp32":
        seen.wrong["GEMMs"] += [f"{path} receives gradients: {_NARROW}" for path in sorted(watch.products.narrow)]
        # the first layer may read BF16 values: embeddings that came from a 16-bit checkpoint
        places = (path for path in sorted(watch.rounded.keys() - apart) if ".0." not in path)
        seen.wrong["residual stream"] = [f"{path}: input or output has {_NARROW}" for path in places]
    elif policy.residual_fp32:
        layers = {path for path in watch.rounded if path in watch.stream}
        norms = {p for p in watch.rounded if p.endswith("norm") and ".layers.0." not in p}
        seen.wrong["residual stream"] = [f"{path}: {_NARROW} in FP32" for path in sorted(layers | norms)]
    seen.wrong["rotary angles"] = list(_frequencies(engine))
    if not promises.foreign:
        seen.wrong["GEMMs"] += [f"{path} reads activations of 3 or fewer mantissa bits" for path in watch.coarse]
        seen.wrong["residual stream"] += [f"output of {path}: {_NARROW}, unlike its weights" for path in watch.lost]
        # other models pass rotary angles and router logits on in the activations' dtype
        wide = {path for module, path in watch._paths.items() if _has_bits(getattr(module, "inv_freq", None))}
        angles = (path for path in watch.angles if path in watch.rounded.keys() & wide)
        seen.wrong["rotary angles"] += [f"output of {path}: {_NARROW}" for path in angles]
        rounded = (path for path in watch.routing if path in watch.rounded and policy.router is DType.FP32)
        seen.wrong["router"] += [f"logits or probabilities of {path}: {_NARROW}" for path in rounded]
    if LOGITS in watch.rounded and DType.FP32 in (policy.logits, policy.compute):
        seen.wrong["logits"] = [f"output of the output layer: {_NARROW}"]


def _unproved(engine: Any, promises: Promises, watch: Watch) -> dict[str, list[str]]:
    """Modules that returned something though none of their operations was seen; excludes modules that call another library, and foreign models."""
    seen: dict[str, list[str]] = {kind: [] for kind in ("GEMMs", "attention", "softmax", "router", "norms")}
    from mpbridge.backend.megatron.inside_model import multiplies_routers  # loads megatron-core

    by_library = any(map(is_library, watch._paths)) and multiplies_routers(engine.configs.model)
    for path, module in {} if promises.foreign else watch.ran.items():
        if is_library(module) or (by_library and is_router(module)):
            continue
        if is_norm(module):
            kind, shown, what = "norms", path in watch.norms, "reciprocal root"
        elif is_attention(module):
            kind, shown, what = "attention", path in watch.attention, "product"
            if not any(f"{one}.".startswith(f"{path}.") for one in watch.softmax):
                seen["softmax"].append(f"{path}: no softmax was seen")
        else:
            kind = "router" if is_router(module) else "GEMMs"
            shown, what = path in watch.products.dtypes, "product"
        if not shown:
            seen[kind].append(f"{path}: no {what} was seen")
    return seen


def _has_bits(table: Any) -> bool:
    """Whether FP32 frequencies have more bits than BF16: frequencies that are all powers of two give angles of few bits."""
    wide = isinstance(table, torch.Tensor) and table.dtype is torch.float32
    return wide and bool((table.view(torch.int32) & 0xFFFF).any())


def _frequencies(engine: Any) -> Iterable[str]:
    for chunk in engine.model:
        for path, module in chunk.named_modules():
            table = getattr(module, "inv_freq", None)
            if not is_rotary(module) or not isinstance(table, torch.Tensor):
                continue
            if table.dtype is not torch.float32:
                yield f"{path}.inv_freq is {str(table.dtype).removeprefix('torch.')}"
            elif is_narrow(table) or (table.numel() > 2 and not _has_bits(table)):
                yield f"{path}.inv_freq has {_NARROW}"


ORDER = (
    "GEMMs", "outputs of linears", "attention", "softmax", "router", "residual stream", "norms", "scan", "rotary angles", "logits", "loss", "adapters",
)  # fmt: skip
SUBJECTS = {"GEMMs": "compute", "outputs of linears": "compute"}
"""Kinds that share one row of the report."""


def compute_findings(
    ranks: Sequence[Computed], promises: Promises, wanted: Callable[[str], bool], why: Callable[[str], str]
) -> list[Finding]:
    """A finding for each kind. wanted: whether this model has such operations, so that seeing none is a fault; why: the reason for what cannot be
    observed, '' where it can."""
    findings = []
    for subject in dict.fromkeys(SUBJECTS.get(kind, kind) for kind in ORDER):
        kinds = [kind for kind in ORDER if SUBJECTS.get(kind, kind) == subject]
        rows = [[row for kind in kinds for row in rank.kinds.get(kind, ())] for rank in ranks]
        values = [[text for kind in kinds for text in rank.wrong.get(kind, ())] for rank in ranks]
        if not any(rows) and wanted(subject):
            meant, reason = "as the policy says", why(subject)
            cure = "a promise without evidence counts as broken"
            findings.append(not_observed(subject, meant, reason) if reason else nothing(subject, meant, cure))
        if any(rows) or any(values):
            findings.append(_row_finding(subject, rows, values))
    if not any(rank.autocast for rank in ranks):
        return findings
    promised = "off" if promises.policy.autocast is None else promises.policy.autocast.value
    states = joined(state for rank in ranks for state in rank.autocast)
    return [*findings, Finding(subject="autocast", promised=promised, found=states, ok=states == promised)]


def _row_finding(subject: str, rows: list[list[PlaceDtypes]], values: list[list[str]]) -> Finding:
    """What every rank saw of one subject. values: places whose values are wrong although their dtype is right."""
    wrong = [
        [place for place, promised, found in own if not set(found) <= set(promised)] + bad
        for own, bad in zip(rows, values, strict=True)
    ]
    promised = joined(" or ".join(promised) for own in rows for _, promised, _ in own)
    found = joined(dtype for own in rows for _, _, found in own for dtype in found)
    return judged(subject, promised, wrong, seen=found, count=sum(map(len, rows)))
