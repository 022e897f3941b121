"""Saving and loading a run: everything that its next step depends on, in megatron-core's distributed format, with the fingerprint inside."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mpbridge.audit.wire import unobserved
from mpbridge.checkpoint import inspect as safe_load
from mpbridge.checkpoint import state, store
from mpbridge.checkpoint.verdict import FILE, Fingerprint, Verdict, fingerprint, read_fingerprint, verdict
from mpbridge.checkpoint.writer import Background, PlainSave
from mpbridge.devices.together import agreed, on_first_rank
from mpbridge.errors import CheckpointError, MpbridgeError, Refused

if TYPE_CHECKING:
    from mpbridge.config.container import Run
    from mpbridge.train.hooks import Training

CONFIG = "config.yaml"
"""The resolved configuration's file inside a checkpoint."""


def of_run(run: Run, stored: Mapping[str, str] | None = None) -> Fingerprint:
    """The fingerprint of a resolved run."""
    return fingerprint(run.recipe, run.policy, run.facts, run.inputs["optimizer"], stored)


class Writing:
    """A checkpoint under way; `finish` seals it."""

    def __init__(self, folder: Path, partial: Path, step: int, background: Background | None) -> None:
        self.folder, self.partial, self.step, self.background = folder, partial, step, background

    def done(self) -> bool:
        """Whether every rank's files are written; every rank calls it."""
        return not agreed(0 if self.background is None or self.background.done() else 1)

    def finish(self, *, keep_last: int | None = None, keep_every: int | None = None) -> Path:
        """Waits, seals, removes old ones; returns the checkpoint's folder. Every rank calls it. Raises CheckpointError."""
        if self.background is not None:
            with _explained(self.folder, self.partial):
                self.background.finish()
            self.background = None

        def seal() -> Path:
            made = store.seal(self.partial, self.step)
            store.prune(self.folder, keep_last=keep_last, keep_every=keep_every)
            return made

        with _explained(self.folder, self.partial):
            return on_first_rank(seal)

    def abort(self) -> None:
        """Gives up a checkpoint that was not finished."""
        if self.background is not None:
            self.background.abort()
            self.background = None


def save(training: Training, folder: Path, *, background: bool = False) -> Writing:
    """Writes the run as it stands; `finish` what comes back. background: the files are written by a child while training goes on.

    Every rank calls it. Raises CheckpointError when it cannot be written; nothing of it then remains.
    """
    from megatron.core import dist_checkpointing

    step = training.counters.iteration
    with unobserved():
        partial = on_first_rank(lambda: store.begin(folder, step))
    with _explained(folder, partial):
        contents = gather(training)
        stored = state.stored_dtypes(contents)
        request = dist_checkpointing.save(
            contents, str(partial), sharded_strategy=PlainSave(), async_sharded_save=background
        )
        on_first_rank(lambda: _describe(partial, training.run, stored, step))
        return Writing(folder, partial, step, Background(request) if background else None)


def gather(training: Training) -> dict[str, Any]:
    """Everything that the next step depends on, as a sharded state dict."""
    state.prime(training.engine.optimizer)
    contents = training.engine.state()
    state.join_remainders(contents, training.engine.optimizer)
    counters = training.counters
    data = {"consumed": counters.consumed, "mark": training.feed.mark(counters.consumed)}
    contents["run"] = {
        "counters": dataclasses.asdict(counters),
        "scheduler": training.scheduler.state_dict(),
        "data": data,
    }
    return contents | {"rng": _random_entry(_random_states())}


def load(training: Training, path: Path, *, reset_optimizer: bool = False) -> Verdict:
    """Takes the run up where the checkpoint in `path` left it: engine, schedule, counters, random states; returns the verdict it went by.

    Every rank calls it. Checksums, the fingerprint and every file that a loader unpickles are looked at before anything is opened.
    Raises Refused when the verdict is no, CheckpointError for a checkpoint that is damaged or does not fit.
    """
    found, answer, plain = _opened(training, path, reset=reset_optimizer)
    with _explained(path, None):
        _resume_plain(training, plain, same_layout=found.parallel == of_run(training.run).parallel, path=path)
        return dataclasses.replace(answer, notes=(*answer.notes, *_other_data(training, plain.get("data") or {})))


def load_weights(training: Training, path: Path) -> None:
    """Takes the weights alone from the checkpoint in `path`; schedule, counters and random states stay a fresh run's. Raises as `load` does."""
    _opened(training, path, reset=True)


def _opened(training: Training, path: Path, *, reset: bool) -> tuple[Fingerprint, Verdict, dict[str, Any]]:
    with unobserved():
        found = on_first_rank(lambda: _look(path))
    shelf = state.Shelf.of(safe_load.read_metadata(path))
    answer = judge(found, training.run, path, reset=reset)
    with _explained(path, None):
        plain = _take_up(training, path, shelf, weights_only=answer.kind == "weights only")
    return found, answer, plain


def _other_data(training: Training, data: Mapping[str, Any]) -> list[str]:
    """A note where the samples behind this run are not those that the checkpoint's run read."""
    mark = data.get("mark")
    if not mark or training.feed.mark(int(data["consumed"])) in ("", mark):
        return []
    return [
        f"the training samples come in another order than in the run that was saved (another train.train_iters, seed, length or corpus): "
        f"of the {data['consumed']} that it read, some will be read again"
    ]


def judge(saved: Fingerprint, run: Run, path: Path, *, reset: bool) -> Verdict:
    """The verdict on going on from `saved` as `run`; raises Refused when it is no, or weights only without being asked for."""
    answer = verdict(saved, of_run(run))
    if answer.kind == "refused" or (answer.kind == "weights only" and not reset):
        raise Refused(f"{path} cannot be resumed in {run.recipe}: " + "\n".join(answer.lines()))
    return (
        answer.without_states("it was asked for (checkpoint.reset_optimizer)") if reset and answer.goes_on else answer
    )


def _look(path: Path) -> Fingerprint:
    manifest = store.check(path)
    unlisted = [name for name in (FILE, safe_load.METADATA) if name not in manifest["files"]]
    if unlisted:
        raise CheckpointError(
            f"{path / store.MANIFEST} does not list {', '.join(unlisted)}. {store.offer_before(path)}"
        )
    safe_load.inspect(path)
    return read_fingerprint(path)


def _take_up(training: Training, path: Path, shelf: state.Shelf, *, weights_only: bool) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    engine = training.engine
    state.prime(engine.optimizer)
    plain: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))
    if "run" not in plain:
        raise CheckpointError(f"{path / safe_load.COMMON} holds no counters: it was not written by mpbridge")
    wanted = engine.state(loading=not weights_only)
    pairs = [] if weights_only else state.ask_for_whole(wanted, engine.optimizer)
    fresh = wanted.pop("optimizer", {})
    shelf.point(wanted)
    # what comes beside the model (amax histories) starts anew where the checkpoint has none, or another kind
    have = {name: part for name, part in wanted.items() if name.startswith("model") or shelf.holds(part)}
    loaded = {name: part for name, part in dist_checkpointing.load(have, str(path)).items() if name in have}
    if not weights_only:
        shelf.point(fresh)
        got = dist_checkpointing.load({"wanted": fresh}, str(path)).get("wanted", {})
        loaded["optimizer"] = state.optimizer_state(got, fresh, plain.get("optimizer", {}))
        state.split_remainders(loaded, pairs)
    engine.load_state(loaded, optimizer=not weights_only)
    return dict(plain["run"])


def _resume_plain(training: Training, plain: Mapping[str, Any], *, same_layout: bool, path: Path) -> None:
    for name, value in plain["counters"].items():
        setattr(training.counters, name, int(value))
    schedule = dict(plain["scheduler"])
    if schedule.get("wd_incr_style") == training.scheduler.wd_incr_style == "constant":
        # how long a weight decay that stays the same would have grown is no difference: a run may be made longer
        schedule["wd_incr_steps"] = training.scheduler.wd_incr_steps
    try:
        training.scheduler.load_state_dict(schedule)
    except AssertionError as error:
        raise CheckpointError(
            f"{path} was trained on another learning-rate schedule ({error}): keep the schedule's settings, or say which one counts: "
            "scheduler.override_opt_param_scheduler=true (this run's) or scheduler.use_checkpoint_opt_param_scheduler=true"
        ) from error
    if same_layout:
        from megatron.core import dist_checkpointing

        _set_random_states(dist_checkpointing.load({"rng": _random_entry(_random_states())}, str(path))["rng"])


def _random_states() -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    numbers: Any = np.random.get_state()
    kind, words, *rest = numbers
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
        "python": random.getstate(),
        "numpy": (kind, words.tolist(), *rest),
    }
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_states(states: Mapping[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _random_entry(states: dict[str, Any]) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _describe(partial: Path, run: Run, stored: Mapping[str, str], step: int) -> None:
    data = of_run(run, stored).as_data() | {"step": step}
    (partial / FILE).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    try:
        text = run.container.to_yaml()
    except MpbridgeError as error:  # live config objects that no file can hold
        text = "".join(f"# {line}\n" for line in str(error).splitlines())
    (partial / CONFIG).write_text(text, encoding="utf-8")


@contextmanager
def _explained(folder: Path, partial: Path | None) -> Iterator[None]:
    """Turns what megatron-core and torch raise about files into CheckpointError; `partial` is removed then."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with unobserved():
            yield
    except MpbridgeError:
        _give_up(partial)
        raise
    except (Exception, CheckpointException) as error:  # torch's CheckpointException is no Exception
        _give_up(partial)
        raise CheckpointError(_reason(error, folder, saving=partial is not None)) from error


def _give_up(partial: Path | None) -> None:
    if partial is not None and dist.get_rank() == 0:
        store.discard(partial)


_NO_ROOM = ("No space left", "File too large", "quota exceeded", "unexpected pos", "PytorchStreamWriter")
"""How a write that fails reads in Python, and (the last two) in torch's own writer, which drops the reason."""


def _reason(error: BaseException, folder: Path, *, saving: bool) -> str:
    text = " ".join(str(error).split())
    tail = text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"
    if not saving:
        return f"{folder} does not fit this run: {type(error).__name__}: {tail}"
    free = shutil.disk_usage(folder).free / 2**20 if folder.exists() else 0.0
    if any(word in text for word in _NO_ROOM):
        tail = f"the file system took no more (disk full, a quota, or a limit on the size of files): {tail}"
    newest = store.saved(folder)
    before = f"the newest whole one is {newest[0].path}" if newest else "there is none yet"
    return f"a checkpoint could not be written to {folder} ({free:.0f} MiB free there): {tail}; {before}"
