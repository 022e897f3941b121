"""Checks what a run needs before anything is built, and prints what its recipe decides: its environment (used by `check`, `launch` and `train`), capability, rules, the plan.
Loads no framework."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpbridge.common.errors import BadValue, CheckpointError, Contradiction, MpbridgeError
from mpbridge.common.facts import BESIDE_ADAM
from mpbridge.common.files import kind_of, write
from mpbridge.common.probe import installed
from mpbridge.common.report.console import tell
from mpbridge.common.report.trackers import absent, names_of
from mpbridge.common.tables import processes
from mpbridge.common.traits import traits
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.table import require_here
from mpbridge.precision.megatron_spec import versions
from mpbridge.precision.policy import LossScale
from mpbridge.settings.training import schedule, training_faults
from mpbridge.training.data.look import corpus_faults, tokenizer_faults

if TYPE_CHECKING:
    from rich.console import Console

    from mpbridge.settings.container import Run

Sections = Mapping[str, Mapping[str, Any]]


class Admission:
    """Called as `admission(sections)` with a run's sections, including defaults: returns every fault, and collects `notes` and what
    `trackers` cannot do.

    here: the run is for this machine; otherwise what this one lacks becomes `notes`. training: False makes `notes` of what only training
    needs. own_data: the caller provides the training samples. Changes nothing.
    """

    def __init__(self, *, here: bool = True, training: bool = True, own_data: bool = False) -> None:
        self.here, self.training, self.own_data = here, training, own_data
        self.notes: list[str] = []
        self.trackers: list[str] = []

    def __call__(self, sections: Sections) -> list[str]:
        """Every fault: those on any machine, and what is missing on this one."""
        train, data = sections["train"], sections["data"]
        needs = training_faults(sections, None)
        wrong, lacking = ([], []) if self.own_data else tokenizer_faults(data, sections["model"]["vocab_size"] or 1)
        if self.training:
            wrong += needs
        else:
            self.notes += [f"to train: {fault}" for fault in (*needs, *_packages(sections))]
        wrong += [] if needs else _schedule_faults(sections)
        evaluates = bool(train["eval_interval"] and train["eval_iters"])
        if evaluates or not self.own_data:
            lacking += corpus_faults(data, evaluates=evaluates)
        lacking += [*_places(sections), *_beginning(sections["checkpoint"])]
        self.notes += _idle(sections)
        trackers = names_of(sections["logger"])
        if trackers and not sections["logger"]["log_dir"]:
            self.notes.append(f"logger.trackers={', '.join(trackers)}: nothing is written without logger.log_dir")
        if self.here:
            missing = ((name, why) for name in trackers if (why := absent(name)))
            self.trackers = [f"tracker {name}: {why}; the run continues without it" for name, why in missing]
            return wrong + lacking
        self.notes += [f"on this machine: {fault}" for fault in lacking]
        return wrong


def _idle(sections: Sections) -> Iterator[str]:
    """Settings without effect."""
    section, nonfinite = sections["checkpoint"], str(sections["train"]["nonfinite"])
    if not section["save"]:
        names = [name for name in ("save_interval", "keep_last", "keep_every", "async_save") if section[name]]
        yield from (f"checkpoint.{name}: nothing is saved without checkpoint.save" for name in names)
    elif nonfinite.startswith("rollback") and not section["save_interval"]:
        yield f"train.nonfinite={nonfinite}: nothing is saved to go back to without checkpoint.save_interval"
    if section["accept"] and not section["load"]:
        yield f"checkpoint.accept={section['accept']}: nothing is resumed without checkpoint.load"


def _packages(sections: Sections) -> list[str]:
    """What the run's optimizer is made of and is not installed: to train, its engine says so."""
    name, engine = sections["optimizer"].get("optimizer"), traits(sections["engine"]["name"])
    needs = name in BESIDE_ADAM and engine.main_weights == "megatron_core"
    lacks = needs and importlib.util.find_spec("emerging_optimizers") is None
    return [versions.emerging(str(name), versions.current())] if lacks else []


def require_admission(run: Run, *, own_data: bool = False) -> list[str]:
    """Notes on `run`. Raises Contradiction with everything that is missing here."""
    sections = {name: getattr(run, name) for name in ("train", "data", "scheduler", "checkpoint", "logger")}
    admission = Admission(own_data=own_data)
    faults = admission({**sections, **run.inputs}) or resume_faults(run)
    if faults:
        raise Contradiction(faults, subject="the run cannot start")
    return admission.notes


def resume_faults(run: Run) -> list[str]:
    """What a resume of `run` would change without its author's word (`continuation.faults`); empty for a run that starts."""
    place = resume_point(run.checkpoint)
    if place is None:
        return []
    from mpbridge.training.checkpoint import continuation  # slow, and few runs resume

    return continuation.faults(run, place)


def resume_point(section: Mapping[str, Any]) -> Path | None:
    """The checkpoint that a checkpoint section resumes from; None: none.

    checkpoint.load may name the folder that the run saves to before there is anything in it, so one command starts a run and resumes it.
    Raises CheckpointError if it names a missing checkpoint, or a folder whose newest is a link.
    """
    load, save = section.get("load"), section.get("save")
    if not load:
        return None
    from mpbridge.training.checkpoint import store

    if save and _same(load, save) and not store.offered(Path(save)):
        return None
    return store.locate(Path(load))


def beginning(section: Mapping[str, Any]) -> tuple[Path | None, Path | None]:
    """(the checkpoint to resume from, or else the one that provides only initial weights).

    Raises CheckpointError if a named one is not a checkpoint, or if checkpoint.save already has another run.
    """
    place, save, weights = resume_point(section), section.get("save"), section.get("pretrained_checkpoint")
    if not save and not weights:
        return place, None
    from mpbridge.training.checkpoint import store

    if save and (place is None or not _same(place.parent, save)) and (there := store.offered(Path(save))):
        raise CheckpointError(
            f"{save} already has a run (its newest checkpoint is {there[0].path.name}): resume it (checkpoint.load={save}), "
            "or choose another checkpoint.save"
        )
    return place, store.locate(Path(weights)) if weights and place is None else None


def _same(path: Any, other: Any) -> bool:
    return bool(path and other) and Path(path).resolve() == Path(other).resolve()


def _beginning(section: Mapping[str, Any]) -> list[str]:
    try:
        for place in filter(None, beginning(section)):
            from mpbridge.training.checkpoint import store
            from mpbridge.training.checkpoint.format import METADATA

            if not (place / METADATA).exists():  # megatron-core's own has no manifest
                store.read_manifest(place)
    except CheckpointError as error:
        return [f"checkpoint: {error}"]
    except OSError as error:
        return [f"checkpoint: {error.filename}: {error.strerror}"]
    return []


def _schedule_faults(sections: Sections) -> list[str]:
    try:
        schedule(sections["scheduler"], sections["optimizer"], sections["train"])
    except Contradiction as error:
        return list(error.faults)
    return []


def _places(sections: Sections) -> list[str]:
    wanted = (("logger", "log_dir"), ("checkpoint", "save"), ("data", "cache_dir"))
    found = [(f"{section}.{name}", sections[section][name]) for section, name in wanted]
    return [fault for setting, given in found if given and (fault := place_fault(setting, given))]


def place_fault(setting: str, given: str | Path) -> str:
    """Why `given` cannot be a folder to write to; '' if it can."""
    path = Path(given).expanduser().absolute()
    for place in (path, *path.parents):
        try:
            mode = os.stat(place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            if not place.is_symlink():
                continue
            return f"{setting}={given}: {place} is a broken link, expected a folder, or a path where one can be created"
        except (OSError, ValueError) as error:
            return f"{setting}={given}: {getattr(error, 'strerror', None) or error} (expected a folder, or a path where one can be created)"
        if not stat.S_ISDIR(mode):
            what = "a file" if stat.S_ISREG(mode) else kind_of(mode)
            return f"{setting}={given}: {place} is {what}, expected a folder, or a path where one can be created"
        return "" if os.access(place, os.W_OK | os.X_OK) else f"{setting}={given}: {place} cannot be written to"
    return ""


def preflight(run: Run, out: Console) -> tuple[Violation, ...]:
    """Prints what the recipe decides, and the warnings; returns the warnings. Raises Refused, like `require_here`."""
    facts = run.facts
    machine, warnings = require_here(run.policy, facts)
    how = "natively" if facts.realization == "native" else "emulated"
    if run.played is not None:
        how = on_cpu(run)
    where = f"{processes(facts.parallel.world_size)} on {machine.name}{' (played)' if run.played is not None else ''}"
    tell(out, f"recipe {run.recipe}, {how}, engine {facts.engine}, {where}")
    out.print(run.plan.table())
    for setting in run.brought:
        tell(out, f"the recipe also sets {setting}")
    for note in run.replaced:
        tell(out, note)
    if warmup := scale_warmup(run.policy.loss_scale, run.train["train_iters"]):
        tell(out, warmup)
    for warning in warnings:
        tell(out, str(warning), style="yellow")
    return warnings


def on_cpu(run: Run) -> str:
    """By whom a run is computed that plays a GPU."""
    return f"by Transformer Engine {run.facts.versions.transformer_engine}'s own Python on the CPU"


def write_precision(run: Run, folder: Path | None) -> None:
    """Writes `folder`/precision.json: what was requested, decided and overridden, as JSON; does nothing if folder is None."""
    if folder is None:
        return
    facts = run.facts
    data = {
        "recipe": run.recipe, "engine": facts.engine, **run.plan.as_data(),
        "parallel": dataclasses.asdict(facts.parallel), "micro_batch_size": facts.micro_batch_size,
        "versions": dataclasses.asdict(installed()), "config": settings_of(run),
    }  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadValue(
            f"logger.log_dir={folder}: {error.strerror or error} (expected a folder, or a path where one can be created)"
        ) from None
    write(folder / "precision.json", json.dumps(data, indent=2, default=str) + "\n")


def settings_of(run: Run) -> dict[str, Any]:
    """The run's settings as data; empty for runs made from Python objects, which cannot be written to a file."""
    try:
        return run.container.as_data()
    except MpbridgeError:
        return {}


MODEST = 2.0**16
"""torch's own GradScaler starts there."""


def scale_warmup(scale: LossScale | None, steps: int | None = None) -> str:
    """What the first loss scale may cost a run of that many steps (None: not known), in a sentence; '' where it costs nothing."""
    most = scale.skips() if scale is not None else 0
    if scale is None or not most:
        return ""
    above = scale.minimum < MODEST < scale.initial
    until = f"{scale.skips(MODEST)} until 2**16, where torch's own starts, " if above else ""
    short = f"; this run has {steps} steps" if steps is not None and steps <= most else ""
    cure = "; mixed_precision.initial_loss_scale=65536 starts lower" if until else ""
    return (
        f"the loss scale starts at {power(scale.initial)}, and steps that overflow are skipped: {until}at most {most} until its minimum of "
        f"{power(scale.minimum)}{short}{cure}"
    )


def power(scale: float) -> str:
    """A loss scale, from 1024 on as a power of two where it is one."""
    exponent = math.log2(scale)
    return f"2**{exponent:g}" if exponent.is_integer() and scale >= 1024 else f"{scale:g}"
