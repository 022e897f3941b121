"""The settings that a training run needs: a number of steps, a batch that the ranks can divide, a learning rate, and what the data section says without any file; and megatron-core's
learning-rate and weight-decay schedule, which counts samples and never needs the amount of data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from mpbridge.common.errors import BadValue, Contradiction, brief
from mpbridge.common.facts import Parallel
from mpbridge.settings.huggingface.tokenizers import BYTE
from mpbridge.settings.schema import defaults

SPLITS = ("train", "valid", "test")
"""Parts of a corpus, in the order of data.split."""


def split_shares(given: str | Sequence[float]) -> tuple[tuple[float, float] | None, ...]:
    """Start and end of each part of `SPLITS` as fractions of the sequences; None: an empty part. Raises BadValue.

    The way megatron-core splits a corpus (datasets/blended_megatron_dataset_config.py): weights are normalised and laid end to end.
    """
    parts = given.split(",") if isinstance(given, str) else given
    try:
        weights = [float(part) for part in parts]
    except (TypeError, ValueError):
        weights = []
    sound = weights and all(math.isfinite(weight) and weight >= 0 for weight in weights)
    if not sound or len(weights) > len(SPLITS) or sum(weights) <= 0:
        raise BadValue(f"data.split={brief(given)}: expected up to three weights, as in '98,1,1'")
    shares, start = [], 0.0
    for weight in [*weights, 0.0, 0.0][: len(SPLITS)]:
        end = start + weight / sum(weights)
        shares.append((start, end) if weight else None)
        start = end
    return tuple(shares)


def entries_of(corpus: str | Sequence[str]) -> list[str]:
    """data.corpus or data.valid as a list."""
    return [corpus] if isinstance(corpus, str) else [str(entry) for entry in corpus]


def data_faults(data: Mapping[str, Any]) -> Iterator[str]:
    """Every fault in a data section with its defaults filled in that does not depend on the files."""
    try:
        if split_shares(data["split"])[0] is None:
            yield f"data.split={brief(data['split'])} leaves nothing to train on: give the first part a weight"
    except BadValue as error:
        yield str(error)
    if not data["corpus"]:
        yield f"data.corpus={brief(data['corpus'])}: expected 'stdlib', or at least one file, folder, glob, data set or prefix"
    count, weights = len(entries_of(data["corpus"] or "stdlib")), data["weights"]
    if weights is not None and (len(weights) != count or not all(math.isfinite(one) and one > 0 for one in weights)):
        yield f"data.weights={brief(weights)}: expected a number above 0 for each entry of data.corpus, which has {count}"
    if data["tokenizer"] == BYTE and data["end_of_text"] is not None:
        yield f"data.end_of_text={brief(data['end_of_text'])}: data.tokenizer=byte always ends a text with 256: drop it"


ANNOUNCED = "MPBRIDGE_NOTICE"
"""Environment variable that announces the scheduler's notice, as USR1. A launcher ignores the signal, its ranks inherit that, and handle it nevertheless."""


def train_iters(train: Mapping[str, Any]) -> int:
    """Number of training steps. Raises BadValue naming the field if it is missing or not a number of steps."""
    value = train.get("train_iters")
    if value is None:
        what = "it sets how long to train, regardless of the length of the data (train.train_iters=200)"
        raise BadValue(f"train.train_iters is missing: {what}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadValue(f"train.train_iters={value!r}: expected a number of steps, 0 or more")
    return value


def microbatches(train: Mapping[str, Any], ranks: int) -> int:
    """Micro-batches per step on one data-parallel rank. Raises BadValue if the batch cannot be divided evenly among the ranks."""
    micro, whole = train["micro_batch_size"] or 1, train["global_batch_size"]
    if whole % (micro * ranks):
        raise BadValue(
            f"train.global_batch_size={whole} cannot be divided into micro batches of {micro} on {ranks} data-parallel "
            f"rank{'s' if ranks > 1 else ''}: use a multiple of {micro * ranks}, or another train.micro_batch_size"
        )
    return int(whole) // int(micro * ranks)


def fitting_batch(train: Mapping[str, Any], parallel: Parallel) -> int:
    """The smallest batch that is at least the default one, and that the ranks can divide."""
    unit, micro = parallel.data, train["micro_batch_size"]
    if isinstance(micro, int) and micro > 0:
        unit *= micro
    return -(-int(train["global_batch_size"]) // unit) * unit


def rate_faults(optimizer: Mapping[str, Any]) -> list[str]:
    """Faults of the learning rate and its minimum."""
    peak, least = optimizer.get("lr") or 0.0, optimizer.get("min_lr") or 0.0
    if not peak:
        return ["optimizer.lr is missing (optimizer.lr=1e-3)"]
    if peak < 0:
        return [f"optimizer.lr={peak}: expected a positive number"]
    return [f"optimizer.min_lr={least} is above optimizer.lr={peak}"] if least > peak else []


def batch_faults(train: Mapping[str, Any], parallel: Parallel | None) -> list[str]:
    """A global batch that cannot be divided among the ranks; empty if the ranks are not known."""
    return [] if parallel is None else _fault(microbatches, train, parallel.data)


def _fault(read: Callable[..., object], *given: Any) -> list[str]:
    try:
        read(*given)
    except BadValue as error:
        return [str(error)]
    return []


def parse_nonfinite(setting: Any) -> tuple[Literal["skip", "stop", "rollback"], int]:
    """('skip', 0), ('stop', 0) or ('rollback', N) from train.nonfinite. Raises BadValue."""
    if setting in ("skip", "stop"):
        return setting, 0
    found = re.fullmatch(r"rollback (\d+)", str(setting))
    if found is None or not int(found[1]):
        expected = "'skip', 'stop' or 'rollback N' with N of at least 1 (how often a run may roll back)"
        raise BadValue(f"train.nonfinite={setting!r}: expected {expected}")
    return "rollback", int(found[1])


def nonfinite_faults(train: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> list[str]:
    """Faults of train.nonfinite, given where the run is saved."""
    setting, cure = train["nonfinite"] or "skip", "set checkpoint.save and checkpoint.save_interval"
    wrong = _fault(parse_nonfinite, setting)
    if wrong or parse_nonfinite(setting)[0] != "rollback" or checkpoint["save"]:
        return wrong
    return [f"train.nonfinite={setting!r} needs checkpoints to go back to: {cure}"]


def training_faults(sections: Mapping[str, Mapping[str, Any]], parallel: Parallel | None) -> list[str]:
    """Settings that a training run lacks or cannot divide."""
    train = sections["train"]
    return [*_fault(train_iters, train), *rate_faults(sections["optimizer"]), *batch_faults(train, parallel)]


_DEFAULTS = defaults("scheduler")
_WEIGHT_DECAY = defaults("optimizer")["weight_decay"]


def scheduler_arguments(run: Any) -> dict[str, Any]:
    """The arguments of megatron-core's OptimizerParamScheduler other than the optimizer, for a resolved run. Raises Contradiction with every fault."""
    return schedule(run.scheduler, run.inputs["optimizer"], run.train)


def schedule(section: Mapping[str, Any], optimizer: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """Like `scheduler_arguments`, from the sections."""
    plan, steps, batch = _DEFAULTS | _given(section), train_iters(train), int(train["global_batch_size"])
    iterations, fraction = plan.get("lr_warmup_iters") or 0, plan.get("lr_warmup_fraction")
    if fraction is not None and iterations:
        fault = f"scheduler.lr_warmup_iters={iterations} and lr_warmup_fraction={fraction} are both set; keep one"
        raise Contradiction([fault], subject="the schedule")
    warmup = round(float(fraction) * steps) if fraction is not None else int(iterations)
    # a run shorter than its warm-up never decays, so unless a decay was requested its end may be after the run's
    decay = int(plan["lr_decay_iters"] or max(steps, warmup + 1))
    usual = _given(optimizer).get("weight_decay", _WEIGHT_DECAY)
    ends = (plan["start_weight_decay"], plan["end_weight_decay"])
    first, last = (float(usual if end is None else end) for end in ends)
    faults = [*rate_faults(optimizer), *_faults(plan, optimizer.get("lr") or 0.0, warmup, decay, first, last)]
    if faults:
        raise Contradiction(faults, subject="the learning-rate schedule contradicts itself")
    switches = ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler")
    return {
        "init_lr": float(plan["lr_warmup_init"]), "max_lr": float(optimizer["lr"]), "min_lr": float(optimizer.get("min_lr") or 0.0),
        "lr_warmup_steps": warmup * batch, "lr_decay_steps": decay * batch, "lr_decay_style": plan["lr_decay_style"],
        "start_wd": first, "end_wd": last, "wd_incr_steps": max(1, steps) * batch, "wd_incr_style": plan["weight_decay_incr_style"],
        **{name: bool(plan[name]) for name in switches},
        "wsd_decay_steps": int(plan["lr_wsd_decay_iters"]) * batch if plan["lr_wsd_decay_iters"] else None,
        "lr_wsd_decay_style": plan["lr_wsd_decay_style"],
    }  # fmt: skip


def _given(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if value is not None}


def _faults(plan: Mapping[str, Any], peak: float, warmup: int, decay: int, first: float, last: float) -> list[str]:
    """The schedule's faults. first, last: weight decay at both ends."""
    start = plan["lr_warmup_init"]
    checks = (
        (start > peak, f"scheduler.lr_warmup_init={start} is above optimizer.lr={peak}"),
        (warmup >= decay, f"scheduler.lr_warmup_iters={warmup} does not end before scheduler.lr_decay_iters={decay}"),
        (plan["lr_decay_style"] == "WSD" and plan["lr_wsd_decay_iters"] is None, "scheduler.lr_decay_style='WSD' requires scheduler.lr_wsd_decay_iters"),
        (first > last, f"scheduler.start_weight_decay={first} is above end_weight_decay={last}"),
        (first < last and plan["weight_decay_incr_style"] == "constant",
         f"scheduler.start_weight_decay={first} and end_weight_decay={last} differ: set scheduler.weight_decay_incr_style=linear or cosine"),
    )  # fmt: skip
    return [text for broken, text in checks if broken]
