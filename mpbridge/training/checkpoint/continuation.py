"""What a resume would change, known before anything is built: the recipe, which needs consent, the learning-rate schedule, and everything but the weights of a
checkpoint that holds nothing else or that another program wrote. Loads no framework."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import CheckpointError, UnknownName
from mpbridge.common.formats import DType, dtype
from mpbridge.planning.memory.keeps import keeps_of
from mpbridge.precision.registry import describe
from mpbridge.settings.container import Run
from mpbridge.settings.training import scheduler_arguments
from mpbridge.training.checkpoint.format import STATE, Index, decoded, read_file
from mpbridge.training.checkpoint.verdict import Fingerprint, Verdict, fingerprint, learned, read_fingerprint
from mpbridge.training.checkpoint.verdict import verdict as verdict_of

SOURCE = "source.json"
"""File in a checkpoint of converted weights that describes the folder they came from."""
_HALVES = (DType.BF16, DType.FP16)
_SCHEDULE: Mapping[str, tuple[str, bool]] = {
    "max_lr": ("optimizer.lr", False), "min_lr": ("optimizer.min_lr", False), "lr_warmup_steps": ("scheduler.lr_warmup_iters", True),
    "lr_decay_steps": ("scheduler.lr_decay_iters", True), "lr_decay_style": ("scheduler.lr_decay_style", False),
    "start_wd": ("scheduler.start_weight_decay", False), "end_wd": ("scheduler.end_weight_decay", False),
    "wd_incr_style": ("scheduler.weight_decay_incr_style", False), "wd_incr_steps": ("train.train_iters", True),
    "init_lr": ("scheduler.lr_warmup_init", False), "wsd_decay_steps": ("scheduler.lr_wsd_decay_iters", True),
    "lr_wsd_decay_style": ("scheduler.lr_wsd_decay_style", False),
}  # fmt: skip
"""What a schedule computes with -> (the setting, whether it is counted in samples)."""
UNSAVED = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
"""Those that megatron-core neither saves nor compares."""


def read_state(folder: Path) -> Mapping[str, Any]:
    """The state of a checkpoint that is equal on all ranks. Raises CheckpointError naming the file."""
    return read_file(folder / STATE, _map)


def _map(data: Any) -> Mapping[str, Any]:
    found = decoded(data)
    if not isinstance(found, dict):
        raise CheckpointError("expected a map")
    return found


def of_run(run: Run, stored: Mapping[str, str] | None = None) -> Fingerprint:
    """The fingerprint of a resolved run."""
    section = {**run.inputs["optimizer"], "global_batch_size": run.train["global_batch_size"]}
    return fingerprint(run.recipe, run.policy, run.facts, section, stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The switch from one stage of a schedule to the next, as a resume would be judged."""

    stage: int
    """The number of the one that ends, from 1."""
    before: str
    after: str
    """Their recipes."""
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}: {self.verdict.short}"

    @property
    def fault(self) -> str:
        """Why the run cannot go on there; '' if it does."""
        if self.verdict.goes_on:
            return ""
        why = "; ".join(self.verdict.why)
        return f"from stage {self.stage} to {self.stage + 1} ({self.before} -> {self.after}): {why}"


def changes_of(runs: Sequence[Run]) -> list[Change]:
    """The switches between the stages of a run (`Run.by_stage`)."""
    return [
        Change(
            stage=number, before=before.recipe, after=after.recipe, verdict=verdict_of(of_run(before), of_run(after))
        )
        for number, (before, after) in enumerate(itertools.pairwise(runs), start=1)
    ]


def faults(run: Run, place: Path) -> list[str]:
    """Why the run does not go on from the checkpoint in `place` without a word of its author, each with that word; a checkpoint that cannot be read has
    none here, since loading it says so."""
    if run.checkpoint.get("reset_optimizer"):
        return []
    try:
        return [*filter(None, (consent(read_fingerprint(place), run), schedule(run, place)))]
    except CheckpointError:
        return []


def consent(saved: Fingerprint, run: Run) -> str:
    """What the run's author has to accept about its recipe; '' if nothing: the recipe computes the same, is one of the run's stages, or was accepted."""
    accepted = str(run.checkpoint.get("accept") or "")
    same = any(not learned(saved, of_run(stage)) for stage in run.by_stage())
    if same or saved.recipe in (accepted, _canonical(accepted)):
        return ""
    other = f", where checkpoint.accept={accepted} names another recipe" if accepted else ""
    return f"checkpoint: {differ(saved, of_run(run))}; to resume anyway: checkpoint.accept={saved.recipe}{other}"


def differ(saved: Fingerprint, wanted: Fingerprint) -> str:
    """What another recipe changes, in a sentence; '' if nothing."""
    changes = learned(saved, wanted)
    sentence = f"it was saved under {saved.recipe} and this run has {wanted.recipe}, which changes what is learned"
    return f"{sentence}: {'; '.join(changes)}" if changes else ""


def _plausible(value: object, own: object) -> bool:
    if isinstance(own, str):
        return isinstance(value, str)
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _canonical(name: str) -> str:
    try:
        return describe(name).name if name else ""
    except UnknownName:
        return ""


def saved_schedule(place: Path) -> Mapping[str, Any]:
    """The schedule in a checkpoint; empty where it has none. Raises CheckpointError naming the file."""
    run = read_state(place).get("run", {})
    found = run.get("scheduler", {}) if isinstance(run, Mapping) else None
    if not isinstance(found, Mapping) or not all(
        isinstance(one, (str, int, float, type(None))) for one in found.values()
    ):
        raise CheckpointError(
            f"{place / STATE}: run.scheduler is no table of names and numbers: it was damaged or changed"
        )
    return found


def schedule(run: Run, place: Path) -> str:
    """How the run's learning-rate schedule differs from the checkpoint's, with the line that keeps it; '' if it does not, or one was chosen."""
    section = run.scheduler
    if section.get("override_opt_param_scheduler") or section.get("use_checkpoint_opt_param_scheduler"):
        return ""
    saved = saved_schedule(place)
    own, batch = scheduler_arguments(run), int(run.train["global_batch_size"])
    idle = dict.fromkeys(UNSAVED, saved.get("lr_decay_style") != "WSD") | {"init_lr": not saved.get("lr_warmup_steps")}
    idle["wd_incr_steps"] = saved.get("wd_incr_style") == own["wd_incr_style"] == "constant"
    names = [name for name in _SCHEDULE if name in saved and not idle.get(name)]
    changed = [name for name in names if saved[name] != own[name]]
    if not changed or not all(_plausible(saved[name], own[name]) for name in names):
        return ""
    said, kept = [], []
    for name in changed:
        setting, counted = _SCHEDULE[name]
        whole = counted and isinstance(saved[name], int) and saved[name] % batch == 0
        had, gets = (one // batch if whole and one else one for one in (saved[name], own[name]))
        said.append(f"{setting} {had} -> {gets}{' samples' if counted and not whole else ''}")
        kept += [f"{setting}={had}"] if name != "wd_incr_steps" and (whole or not counted) else []
    keep = f"to keep the checkpoint's: {' '.join(kept)}; " if len(kept) == len(changed) else ""
    return (
        f"checkpoint: it was trained on another learning-rate schedule: {', '.join(said)}"
        f"{' (as long as train.train_iters)' if 'lr_decay_steps' in changed and not section.get('lr_decay_iters') else ''}; "
        f"{keep}to follow this run's: scheduler.override_opt_param_scheduler=true"
    )


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
