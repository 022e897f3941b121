"""Saves and loads a run: everything that its next step depends on, as data (format.py), with the fingerprint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpbridge.backend.devices.collectives import agreed, from_all, is_of_a_lost_rank, on_first_rank
from mpbridge.backend.engines.mcore import follow_main_weights
from mpbridge.backend.megatron import sharded
from mpbridge.common.errors import CheckpointError, MpbridgeError, Refused
from mpbridge.common.tables import size
from mpbridge.numerics.observation.operations import unobserved
from mpbridge.settings.container import Run
from mpbridge.training.checkpoint import extra_state, state, store
from mpbridge.training.checkpoint.continuation import UNSAVED, consent, of_run, taken_alone, why_alone
from mpbridge.training.checkpoint.format import INDEX, STATE, encoded
from mpbridge.training.checkpoint.reader import Contents, converted, different, digests, mean_second, needs_converting
from mpbridge.training.checkpoint.state import random_entry, random_states, set_random_states
from mpbridge.training.checkpoint.verdict import FILE, Fingerprint, Verdict, read_fingerprint, verdict
from mpbridge.training.checkpoint.writer import RankWrite, indexed, staged, write_common

if TYPE_CHECKING:
    from mpbridge.training.base import Counters, Training  # which imports this package


@dataclasses.dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint being written; `finish` seals it."""

    folder: Path
    partial: Path
    step: int
    training: Training
    written: RankWrite
    audit: store.AuditMark

    def done(self) -> bool:
        """Whether every rank's files are written. Every rank must call it."""
        return not agreed(0 if self.written.done() else 1)

    def finish(self, *, keep_last: int | None = None, keep_every: int | None = None) -> Path:
        """Waits, seals, removes old checkpoints; returns the checkpoint's folder. Every rank must call it. Raises CheckpointError."""
        failed = self.written.finish()

        doubted = self.training.doubted
        suspect = self.audit == "good" and doubted is not None and self.step > doubted

        def seal() -> Path:
            known = indexed(self.partial, dist.get_world_size())
            made = store.seal(self.partial, self.step, known=known, audit="suspect" if suspect else self.audit)
            store.prune(self.folder, keep_last=keep_last, keep_every=keep_every)
            return made

        with _explained(self.folder, self.partial):
            if agreed(1 if failed else 0):
                said = from_all(failed)
                rank, text = next((rank, text) for rank, text in enumerate(said) if text)
                raise OSError(text if len(said) == 1 else f"rank {rank}: {text}")
            return on_first_rank(seal)

    def abort(self) -> None:
        """Discards a checkpoint that was not finished."""
        self.written.abort()
        store.discard(self.partial)  # every rank: the process group may be gone


def save(training: Training, folder: Path, *, background: bool = False) -> Writing:
    """Starts writing the run's current state; call `finish` on the result. background: a child process writes the files while training continues.

    Every rank must call it. Raises CheckpointError if it cannot be written, and leaves nothing behind.
    """
    step, rank = training.counters.iteration, dist.get_rank()
    with unobserved():
        partial = on_first_rank(lambda: store.begin(folder, step))
    with _explained(folder, partial):
        contents = gather(training)
        stored = state.stored_dtypes(contents)
        on_first_rank(lambda: _describe(partial, training.run, stored, step, sharded.common(contents)))
        written = RankWrite(partial, rank, staged(contents), background=background)
        training.doubted = None
        return Writing(folder, partial, step, training, written, training.audit)


def gather(training: Training) -> dict[str, Any]:
    """Everything that the next step depends on, as a sharded state dict."""
    state.prime(training.engine.optimizer)
    contents = training.engine.state()
    state.join_remainders(contents, training.engine.optimizer)
    counters = training.counters
    data = {"consumed": counters.consumed, "mark": training.feed.mark(counters.consumed)}
    plan = training.scheduler.state_dict() | {name: getattr(training.scheduler, name) for name in UNSAVED}
    kept = {"counters": dataclasses.asdict(counters), "scheduler": plan, "data": data}
    contents["run"] = kept | {"second_moment": mean_second(training.engine)}
    return contents | {"rng": random_entry(random_states())}


def load(training: Training, path: Path, *, reset_optimizer: bool = False, weights_alone: bool = False) -> Verdict:
    """Resumes the run from the checkpoint in `path`: engine, schedule, counters, random states; returns the verdict.

    weights_alone: takes only the weights; schedule, counters and random states stay those of a new run. Every rank must call it. Checksums and the
    fingerprint are checked before anything else is opened, and nothing is executed.
    Raises Refused if the verdict forbids it, CheckpointError for a checkpoint that is damaged or does not fit.
    """
    reset = reset_optimizer or weights_alone
    with unobserved(), readable(training.run, path) as place:
        found = on_first_rank(lambda: _look(place))
        if found is None:
            return _strangers_weights(training, place, path, reset=reset)
        answer = judge(found, training.run, path, reset=reset)
        with _explained(path, None), Contents(place) as contents:
            plain = {} if weights_alone else _run_state(contents, training.counters)
            weights_only = answer.kind == "weights only"
            own = of_run(training.run)
            names = ("policy", "realization", "engine", "parallel", "distributed", "optimizer")
            others = [name for name in names if getattr(found, name) != getattr(own, name)]
            _take_up(training, contents, weights_only=weights_only, exactly=not (weights_only or others))
            if weights_alone:
                return answer
            # each rounds by another rule: remainders ties away from zero, a cast to the even neighbour
            if not weights_only and {"policy", "realization"} & {*others}:
                follow_main_weights(training.engine.model, training.engine.optimizer)
            with _together():
                _resume_plain(training, plain, contents, same_layout=found.parallel == own.parallel)
            moment = None if weights_only else plain.get("second_moment")
            moment = moment if isinstance(moment, float) else None
            notes = (*answer.notes, *_other_data(training, plain["data"]))
            return dataclasses.replace(answer, notes=notes, second_moment=moment)


def _strangers_weights(training: Training, place: Path, path: Path, *, reset: bool) -> Verdict:
    """The weights of a checkpoint that another program wrote. Raises Refused unless that was requested."""
    if not reset:
        raise Refused(
            f"{path} {why_alone(place)}: load only the weights (--reset-optimizer), or resume from a run's checkpoint"
        )
    with _explained(path, None), Contents(place) as contents:
        _take_up(training, contents, weights_only=True)
        return taken_alone(training.run, contents.index, place)


@contextmanager
def readable(run: Run, path: Path) -> Iterator[Path]:
    """A folder with the checkpoint in `path` as data: `path` itself, or a conversion that exists only inside the block. Every rank must call it.

    Raises CheckpointError naming the file that contains anything other than data.
    """
    made: Path | None = on_first_rank(lambda: store.room(run, "converted") if needs_converting(path) else None)
    if made is None:
        yield path
        return
    try:
        yield on_first_rank(lambda: converted(path, made))
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(made, ignore_errors=True)


def _other_data(training: Training, data: Mapping[str, Any]) -> list[str]:
    """A note if the samples that this run counts as read are not those that the checkpoint's run read."""
    mark = data.get("mark")
    if not mark or training.feed.mark(int(data["consumed"])) in ("", mark):
        return []
    return [
        f"the order of training samples differs from the saved run's (another train.train_iters, seed, length or corpus): "
        f"some of the {data['consumed']} samples that it read will be read again"
    ]


def judge(saved: Fingerprint, run: Run, path: Path, *, reset: bool) -> Verdict:
    """The verdict on resuming `saved` as `run`. Raises Refused if it forbids resuming, or allows only the weights and that was not requested."""
    answer = verdict(saved, of_run(run))
    if answer.goes_on and not reset and (asks := consent(saved, run)):
        raise Refused(f"{path}: {asks}")
    if answer.kind == "refused" or (answer.kind == "weights only" and not reset):
        raise Refused(f"{path} cannot be resumed in {run.recipe}: " + "\n".join(answer.lines()))
    if reset and answer.goes_on:
        return answer.without_states("it was requested (checkpoint.reset_optimizer)")
    return answer


def _look(path: Path) -> Fingerprint | None:
    """The fingerprint of a complete checkpoint; None if another program wrote it. Raises CheckpointError."""
    manifest = store.check(path)
    if manifest.get("foreign") is True:
        return None
    unlisted = [name for name in (FILE, INDEX, STATE) if name not in manifest["files"]]
    if unlisted:
        raise CheckpointError(
            f"{path / store.MANIFEST} does not list {', '.join(unlisted)}. {store.offer_before(path)}"
        )
    return read_fingerprint(path)


MOST_SAMPLES_A_STEP = 1 << 24
"""Upper bound of a global batch; a larger count is invalid."""


@contextmanager
def _together() -> Iterator[None]:
    """Runs a rank's own work: if one rank fails all raise, and none continues before all are done."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if agreed(0 if error is None else 1):
        raise error or CheckpointError("another rank failed to read its part of the checkpoint; see that rank's output")


def _run_state(contents: Contents, counted: Counters) -> Mapping[str, Any]:
    """A checkpoint's counters, schedule and data position, checked for plausibility. Raises CheckpointError naming the file."""
    file, found = contents.folder / STATE, contents.common().get("run")
    parts = ("counters", "scheduler", "data")
    if not isinstance(found, Mapping) or not all(isinstance(found.get(name), Mapping) for name in parts):
        raise CheckpointError(f"{file} has no counters: it was not written by mpbridge")
    counters, data = found["counters"], found["data"]
    names = {field.name for field in dataclasses.fields(counted)}
    if set(counters) != names:
        raise CheckpointError(f"{file} counts {sorted(map(str, counters))[:8]}, expected {sorted(names)}")
    numbers = counters | {
        "data.consumed": data.get("consumed"),
        "scheduler.num_steps": found["scheduler"].get("num_steps"),
    }
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number <= store.LAST_STEP * MOST_SAMPLES_A_STEP:
            raise CheckpointError(f"{file}: {name}={str(number)[:40]}, expected a count")
    steps, samples, tokens = (counters[name] for name in ("iteration", "consumed", "tokens"))
    if steps != contents.step or not steps <= samples <= max(steps, 1) * MOST_SAMPLES_A_STEP or samples > tokens:
        had = f"iteration={steps}, consumed={samples}, tokens={tokens} after step {contents.step}"
        raise CheckpointError(f"{file}: {had}, which no run can have")
    if not isinstance(data.get("mark"), str):
        raise CheckpointError(f"{file}: data.mark is not text")
    return found


def _take_up(training: Training, contents: Contents, *, weights_only: bool, exactly: bool = False) -> None:
    """exactly: the run stores everything as the saved one did, so that its state must be the checkpoint's, bit for bit."""
    engine, shelf = training.engine, state.Shelf(contents.index)
    state.prime(engine.optimizer)
    contents.delayed_format = extra_state.format_of(engine.run.policy)
    contents.adapters_begin = weights_only
    saved: Mapping[str, Any] = {}
    if not weights_only:
        with _together():
            saved = contents.common().get("optimizer", {})
            state.check_numbers(saved, str(contents.folder / STATE))
        if training.run.scheduler.get("use_checkpoint_opt_param_scheduler"):
            state.take_rates(engine.optimizer, saved)
    wanted = engine.state(loading=not weights_only)
    pairs = [] if weights_only else state.ask_for_whole(wanted, engine.optimizer)
    fresh = wanted.pop("optimizer", {})
    shelf.point(wanted)
    # states other than the model's (amax histories) start empty if the checkpoint has none, or another kind
    have = {name: part for name, part in wanted.items() if name.startswith("model") or shelf.holds(part)}
    with _together():
        loaded = contents.load(have)
        if not weights_only:
            shelf.point(fresh)
            loaded["optimizer"] = state.optimizer_state(contents.load(fresh), fresh, saved)
            state.split_remainders(loaded, pairs)
    given = digests(loaded) if exactly else {}
    with extra_state.pickled_here():
        engine.load_state(loaded, optimizer=not weights_only)
        changed = different(given, engine) if exactly else []
    with _together():
        if changed:
            raise CheckpointError(
                f"{contents.folder}: {len(changed)} of {len(given)} tensors are not in the run as they were loaded ({', '.join(changed[:3])}): "
                "something changes them between the checkpoint and the first step"
            )


def _resume_plain(training: Training, plain: Mapping[str, Any], contents: Contents, *, same_layout: bool) -> None:
    for name, value in plain["counters"].items():
        setattr(training.counters, name, value)
    schedule, file = dict(plain["scheduler"]), contents.folder / STATE
    state.check_numbers(schedule, str(file))
    own = training.scheduler.state_dict()
    kinds = {name: str if isinstance(value, str) else (int, float) for name, value in own.items()}
    if strange := [name for name, kind in kinds.items() if not isinstance(schedule.get(name), kind)]:
        raise CheckpointError(
            f"{file}: scheduler.{strange[0]}={schedule.get(strange[0])!r}, expected the type of {own[strange[0]]!r}"
        )
    if schedule.get("wd_incr_style") == training.scheduler.wd_incr_style == "constant":
        # the ramp length of a constant weight decay does not matter: a run may be extended
        schedule["wd_incr_steps"] = training.scheduler.wd_incr_steps
    try:
        # megatron-core adds the saved steps to those taken so far, so a rollback would advance the schedule too far
        training.scheduler.num_steps = 0
        if training.scheduler.use_checkpoint_opt_param_scheduler:
            for name in UNSAVED:  # `load_state_dict` computes a rate with them
                setattr(training.scheduler, name, schedule.get(name, getattr(training.scheduler, name)))
            if schedule["lr_decay_style"] == "WSD" and training.scheduler.wsd_decay_steps is None:
                raise CheckpointError(
                    f"{file} has a WSD schedule of an earlier mpbridge, which did not save the length of its decay: set scheduler.lr_wsd_decay_iters"
                )
        training.scheduler.load_state_dict(schedule)
        training.scheduler.step(0)  # it sets the weight decay before it reads its ends
    except AssertionError as error:  # only with checkpoint.reset_optimizer: else `continuation.faults` says it first
        raise CheckpointError(
            f"{contents.folder} was trained on another learning-rate schedule ({error}): keep the schedule's settings, or choose one: "
            "scheduler.override_opt_param_scheduler=true (this run's) or scheduler.use_checkpoint_opt_param_scheduler=true"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the schedule cannot be restored ({type(error).__name__}: {error})") from error
    if same_layout:
        try:
            set_random_states(contents.object(random_entry({})))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError) as error:
            raise CheckpointError(
                f"{contents.folder}: the random states cannot be restored ({type(error).__name__}: {str(error)[:200]})"
            ) from error


def _describe(partial: Path, run: Run, stored: Mapping[str, str], step: int, common: Mapping[str, Any]) -> None:
    (partial / STATE).write_text(json.dumps(encoded(common), separators=(",", ":")), encoding="utf-8")
    write_common(partial, common)
    data = of_run(run, stored).as_data() | {"step": step}
    (partial / FILE).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    try:
        text = run.container.to_yaml()
    except MpbridgeError as error:  # live config objects that cannot be written to a file
        text = "".join(f"# {line}\n" for line in str(error).splitlines())
    (partial / store.CONFIG).write_text(text, encoding="utf-8")


@contextmanager
def _explained(folder: Path, partial: Path | None) -> Iterator[None]:
    """Converts file errors of megatron-core and torch to CheckpointError and removes `partial`."""
    try:
        with unobserved():
            yield
    except Exception as error:
        if partial is not None and dist.get_rank() == 0:
            store.discard(partial)
        if isinstance(error, MpbridgeError) or is_of_a_lost_rank(error):  # the latter is not the checkpoint's fault
            raise
        raise CheckpointError(_reason(error, folder, saving=partial is not None)) from error


_NO_ROOM = ("No space left", "File too large", "quota exceeded", "unexpected pos", "PytorchStreamWriter")
"""Texts of failed writes in Python and (the last two) in torch's own writer, which drops the reason."""


def _reason(error: BaseException, folder: Path, *, saving: bool) -> str:
    text = " ".join(str(error).split())
    tail = text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"
    if not saving:
        return f"{folder} does not fit this run: {type(error).__name__}: {tail}"
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    if any(word in text for word in _NO_ROOM):
        tail = f"the file system is full (disk, quota, or a limit on file sizes): {tail}"
    newest = store.saved(folder)
    before = f"the latest complete one is {newest[0].path}" if newest else "there is none yet"
    return f"a checkpoint could not be written to {folder} ({size(free)} free there): {tail}; {before}"
