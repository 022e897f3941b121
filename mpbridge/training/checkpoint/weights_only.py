"""Checkpoints of which only weights can be loaded: why, and the dtype of the values that main weights then start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpbridge.common.formats import DType, dtype
from mpbridge.planning.memory.keeps import keeps_of
from mpbridge.training.checkpoint.index import Index
from mpbridge.training.checkpoint.verdict import Verdict

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

SOURCE = "source.json"
"""File in a checkpoint of converted weights that describes the folder they came from."""
_HALVES = (DType.BF16, DType.FP16)


def _holds_weights_alone(path: Path) -> bool:
    """Whether a checkpoint was converted from a folder of weights, so that it contains nothing else."""
    return (path / SOURCE).is_file()


def why_alone(path: Path) -> str:
    """Why only weights can be loaded from a checkpoint that no run of mpbridge saved, as the rest of a sentence."""
    if _holds_weights_alone(path):
        return "contains only weights"
    return "was not written by mpbridge, so the meaning of its optimizer states is unknown"


def taken_alone(run: Run, index: Index, path: Path) -> Verdict:
    """The verdict on loading only weights from such a checkpoint on request."""
    alone = _holds_weights_alone(path)
    why = "it contains nothing else" if alone else "mpbridge did not write the checkpoint"
    return Verdict(
        kind="weights only",
        why=(f"it was requested (checkpoint.reset_optimizer), and {why}",),
        lost=() if alone else ("optimizer states, schedule, counters and random states",),
        notes=init_dtype_notes(run, index),
    )


def init_dtype_notes(run: Run, index: Index) -> tuple[str, ...]:
    """A note if the main weights of `run` have more bits than their initial values."""
    stored = index.tensors.get("embedding.word_embeddings.weight")
    if stored is None:
        return ()
    kept, begins = keeps_of(run.policy, run.facts), dtype(stored.dtype)
    params = kept["params"].dtype
    main = kept["main_params"].dtype if "main_params" in kept else params
    if main not in (DType.FP32, DType.INT16):  # INT16: the lower halves of FP32
        return ()
    if begins in _HALVES:
        return (f"the FP32 main weights are initialized from {begins.short}: they start from exactly those values",)
    if params in _HALVES and begins is DType.FP32:
        return (
            f"the FP32 main weights are initialized from the {params.short} parameters, the checkpoint's FP32 weights rounded once",
        )
    return ()
