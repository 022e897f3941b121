"""What cannot be observed, and why: a table of situations and facts. A fact that is not in it and was not seen is a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpbridge.numerics.observation.modules import is_library, is_norm
from mpbridge.observe.audit.gradients import data_parallel, is_alone
from mpbridge.observe.audit.promise import Promises


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """One fact that leaves no evidence in some runs."""

    subject: str
    when: Callable[[Any, Promises], bool]
    why: str


def _library(engine: Any, promises: Promises) -> bool:
    """Whether Transformer Engine's modules compute: their GEMMs, norms and attention are calls into its own library."""
    return any(
        type(module).__module__.startswith("transformer_engine") for chunk in engine.model for module in chunk.modules()
    )


def _apex(engine: Any, promises: Promises) -> bool:
    """Whether megatron-core's norms are Apex's kernels."""
    return any(is_norm(module) and is_library(module) for chunk in engine.model for module in chunk.modules())


def _fused_accumulation(engine: Any, promises: Promises) -> bool:
    return bool(getattr(engine.configs.model, "gradient_accumulation_fusion", False))


def _beside_kernels(engine: Any, promises: Promises) -> bool:
    """Whether neither a linear's GEMM nor autograd shows what the optimizer should read."""
    return (_library(engine, promises) or _fused_accumulation(engine, promises)) and not is_alone(engine)


def _fused_loss(engine: Any, promises: Promises) -> bool:
    """Whether the cross entropy may be a fused kernel: the config says so, or leaves it open in a model with Transformer Engine's modules."""
    model = getattr(getattr(engine, "configs", None), "model", None)
    fused = getattr(model, "cross_entropy_loss_fusion", None)
    graphs = getattr(model, "cuda_graph_impl", None) not in (None, "none")
    return bool(fused) or ((fused is None or graphs) and _library(engine, promises))


def _copied(engine: Any, promises: Promises) -> bool:
    """Whether gradients are copied into one buffer before they are sent, so that addresses do not identify them."""
    sharded = hasattr(engine.optimizer, "shards") or engine.run.facts.traits.layout != "buffers"
    return sharded and len(data_parallel(engine)) > 1


def _summed(engine: Any, promises: Promises) -> bool:
    return bool(getattr(engine.configs.model, "calculate_per_token_loss", False))


def _uncounted(engine: Any, promises: Promises) -> bool:
    """Whether a foreign loop sums losses over tokens, whose count may not be visible."""
    return promises.foreign and _summed(engine, promises)


def _context(engine: Any, promises: Promises) -> bool:
    return bool(engine.run.facts.parallel.context > 1)


FACTOR = "factor of gradients"
MATRICES = "gradients of matrices"
_TE = "Transformer Engine computes it in its own library, bypassing torch's dispatcher; the inputs, outputs and state of its modules are checked"

UNSEEN = (
    Unseen(subject="compute", when=_library, why=_TE),
    Unseen(subject="attention", when=_library, why=_TE),
    Unseen(subject="softmax", when=_library, why=_TE),
    Unseen(subject="norms", when=_library, why=_TE),
    Unseen(subject="norms", when=_apex, why="Apex's norm is one kernel"),
    Unseen(subject="quantized GEMMs", when=_library, why=_TE),
    Unseen(
        subject="gradients",
        when=_beside_kernels,
        why="kernels of linears bypass torch's dispatcher, and other ranks add to what autograd delivers",
    ),
    Unseen(subject="loss", when=_fused_loss, why="a fused cross entropy is one kernel"),
    Unseen(
        subject="wire: which gradients",
        when=_copied,
        why="they are copied into one buffer before they are sent: the number of elements is checked, and gradients of linear weights by value",
    ),
    Unseen(
        subject=FACTOR,
        when=_context,
        why="under context parallelism the schedule scales each chunk's loss: values are checked up to a common factor",
    ),
    Unseen(
        subject=FACTOR,
        when=_uncounted,
        why="calculate_per_token_loss is set and no token count was seen: values are checked up to a common factor",
    ),
    Unseen(
        subject="loss scale",
        when=_summed,
        why="calculate_per_token_loss is set: backward starts at sums over tokens, the report has means over micro-batches",
    ),
    Unseen(
        subject=MATRICES,
        when=_fused_accumulation,
        why="gradient_accumulation_fusion adds weight gradients to their buffer inside one kernel",
    ),
)


def why_unseen(engine: Any, promises: Promises, subject: str) -> str:
    """The reason; '' if the fact can be observed."""
    return next((row.why for row in UNSEEN if row.subject == subject and row.when(engine, promises)), "")
