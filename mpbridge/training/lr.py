"""megatron-core's learning-rate and weight-decay schedule from a run's sections; it counts samples and never needs the amount of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpbridge.common.errors import Contradiction
from mpbridge.settings.schema import defaults
from mpbridge.settings.training import rate_faults, train_iters

if TYPE_CHECKING:
    from mpbridge.settings.container import Run

_DEFAULTS = defaults("scheduler")
_WEIGHT_DECAY = defaults("optimizer")["weight_decay"]


def scheduler_arguments(run: Run) -> dict[str, Any]:
    """The arguments of megatron-core's OptimizerParamScheduler other than the optimizer. Raises Contradiction with every fault."""
    return schedule(run.scheduler, run.inputs["optimizer"], run.train)


def schedule(section: Mapping[str, Any], optimizer: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    """Like `scheduler_arguments`, from the sections."""
    plan, steps = _DEFAULTS | _given(section), train_iters(train)
    batch, warmup = int(train["global_batch_size"]), _warmup(plan, steps)
    # a run shorter than its warm-up never decays, so unless a decay was requested its end may be after the run's
    decay = int(plan["lr_decay_iters"] or max(steps, warmup + 1))
    weight_decay = _given(optimizer).get("weight_decay", _WEIGHT_DECAY)
    first, last = (
        float(weight_decay if plan[name] is None else plan[name]) for name in ("start_weight_decay", "end_weight_decay")
    )
    faults = [*rate_faults(optimizer), *_faults(plan, optimizer, warmup, decay, first, last)]
    if faults:
        raise Contradiction(faults, subject="the learning-rate schedule contradicts itself")
    return {
        "init_lr": float(plan["lr_warmup_init"]),
        "max_lr": float(optimizer["lr"]),
        "min_lr": float(optimizer.get("min_lr") or 0.0),
        "lr_warmup_steps": warmup * batch,
        "lr_decay_steps": decay * batch,
        "lr_decay_style": plan["lr_decay_style"],
        "start_wd": first,
        "end_wd": last,
        "wd_incr_steps": max(1, steps) * batch,
        "wd_incr_style": plan["weight_decay_incr_style"],
        "use_checkpoint_opt_param_scheduler": bool(plan["use_checkpoint_opt_param_scheduler"]),
        "override_opt_param_scheduler": bool(plan["override_opt_param_scheduler"]),
        "wsd_decay_steps": int(plan["lr_wsd_decay_iters"]) * batch if plan["lr_wsd_decay_iters"] else None,
        "lr_wsd_decay_style": plan["lr_wsd_decay_style"],
    }


def _given(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if value is not None}


def _faults(
    plan: Mapping[str, Any], optimizer: Mapping[str, Any], warmup: int, decay: int, first: float, last: float
) -> list[str]:
    """The schedule's faults. first, last: weight decay at both ends."""
    start, peak = plan["lr_warmup_init"], optimizer.get("lr") or 0.0
    checks = (
        (start > peak, f"scheduler.lr_warmup_init={start} is above optimizer.lr={peak}"),
        (warmup >= decay, f"scheduler.lr_warmup_iters={warmup} does not end before scheduler.lr_decay_iters={decay}"),
        (
            plan["lr_decay_style"] == "WSD" and plan["lr_wsd_decay_iters"] is None,
            "scheduler.lr_decay_style='WSD' requires scheduler.lr_wsd_decay_iters",
        ),
        (first > last, f"scheduler.start_weight_decay={first} is above end_weight_decay={last}"),
        (
            first < last and plan["weight_decay_incr_style"] == "constant",
            f"scheduler.start_weight_decay={first} and end_weight_decay={last} differ: set scheduler.weight_decay_incr_style=linear or cosine",
        ),
    )
    return [text for broken, text in checks if broken]


def scheduler(run: Run, optimizer: Any) -> Any:
    """An OptimizerParamScheduler on `optimizer`; `step(global_batch_size)` follows every applied update."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    arguments = scheduler_arguments(run)
    for group in optimizer.param_groups:
        # OptimizerConfig's own defaults are None, with which the schedule would compute
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
