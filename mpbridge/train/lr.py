"""megatron-core's learning-rate and weight-decay schedule from a run's sections; it counts samples and never asks how much data there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpbridge.errors import BadValue, Contradiction

if TYPE_CHECKING:
    from mpbridge.config.container import Run


def train_iters(run: Run) -> int:
    """Steps of the run; raises BadValue that names the field when it is missing."""
    value = run.train.get("train_iters")
    if value is None:
        raise BadValue(
            "train.train_iters is missing: it says how long to train, whatever the length of the data (train.train_iters=200)"
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadValue(f"train.train_iters={value!r}: expected a number of steps, 0 or more")
    return value


def scheduler_arguments(run: Run) -> dict[str, Any]:
    """The arguments of megatron-core's OptimizerParamScheduler besides the optimizer; raises Contradiction with every fault."""
    plan, optimizer, steps = run.scheduler, run.inputs["optimizer"], train_iters(run)
    batch = int(run.train["global_batch_size"])
    warmup = _warmup(plan, steps)
    # a run shorter than its warm-up never decays, so where no decay was asked for its end may lie after the run's
    decay = int(plan.get("lr_decay_iters") or max(steps, warmup + 1))
    peak, least = float(optimizer.get("lr") or 0.0), float(optimizer.get("min_lr") or 0.0)
    start = float(plan.get("lr_warmup_init") or 0.0)
    weight_decay = float(optimizer["weight_decay"]) if optimizer.get("weight_decay") is not None else 0.01
    first, last = plan.get("start_weight_decay"), plan.get("end_weight_decay")
    first, last = (weight_decay if value is None else float(value) for value in (first, last))
    wsd = plan.get("lr_wsd_decay_iters")
    style, steady = (
        plan.get("lr_decay_style") or "linear",
        (plan.get("weight_decay_incr_style") or "constant") == "constant",
    )
    faults = [
        *([f"optimizer.lr={peak}: expected a positive number"] if peak <= 0 else []),
        *([f"optimizer.min_lr={least} is above optimizer.lr={peak}"] if least > peak else []),
        *([f"scheduler.lr_warmup_init={start} is above optimizer.lr={peak}"] if start > peak else []),
        *(
            [f"scheduler.lr_warmup_iters={warmup} does not end before scheduler.lr_decay_iters={decay}"]
            if warmup >= decay
            else []
        ),
        *(
            ["scheduler.lr_decay_style='WSD' needs scheduler.lr_wsd_decay_iters"]
            if style == "WSD" and wsd is None
            else []
        ),
        *([f"scheduler.start_weight_decay={first} is above end_weight_decay={last}"] if first > last else []),
        *(
            [
                f"scheduler.start_weight_decay={first} and end_weight_decay={last} differ: give scheduler.weight_decay_incr_style=linear or cosine"
            ]
            if steady and first < last
            else []
        ),
    ]
    if faults:
        raise Contradiction(faults, subject="the learning-rate schedule contradicts itself")
    return {
        "init_lr": start,
        "max_lr": peak,
        "min_lr": least,
        "lr_warmup_steps": warmup * batch,
        "lr_decay_steps": decay * batch,
        "lr_decay_style": style,
        "start_wd": first,
        "end_wd": last,
        "wd_incr_steps": max(1, steps) * batch,
        "wd_incr_style": plan.get("weight_decay_incr_style") or "constant",
        "use_checkpoint_opt_param_scheduler": bool(plan.get("use_checkpoint_opt_param_scheduler") or False),
        "override_opt_param_scheduler": bool(plan.get("override_opt_param_scheduler") or False),
        "wsd_decay_steps": None if wsd is None else int(wsd) * batch,
        "lr_wsd_decay_style": plan.get("lr_wsd_decay_style") or "exponential",
    }


def scheduler(run: Run, optimizer: Any) -> Any:
    """An OptimizerParamScheduler on `optimizer`; `step(global_batch_size)` follows every applied update."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    arguments = scheduler_arguments(run)
    for group in optimizer.param_groups:
        # OptimizerConfig's own defaults are None, which the schedule would calculate with
        for name in ("max_lr", "min_lr"):
            if name in group and group[name] is None:
                group[name] = arguments[name]
    return OptimizerParamScheduler(optimizer, **arguments)


def _warmup(plan: Mapping[str, Any], steps: int) -> int:
    iterations, fraction = plan.get("lr_warmup_iters") or 0, plan.get("lr_warmup_fraction")
    if fraction is not None and iterations:
        raise Contradiction(
            [f"scheduler.lr_warmup_iters={iterations} and lr_warmup_fraction={fraction} are both set; keep one"],
            subject="the schedule",
        )
    return round(float(fraction) * steps) if fraction is not None else int(iterations)
