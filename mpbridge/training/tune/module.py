"""Tuning for any module and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, Refused
from mpbridge.numerics import Emulation, emulate_linears
from mpbridge.numerics.modules import refuse_without_linears
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import FOREIGN, get_mixed_precision_config
from mpbridge.training.tune.levels import Budget, Levels, Pricing, Where, aimed, budget_of, prepared
from mpbridge.training.tune.proof import ModuleSubject
from mpbridge.training.tune.report import evidence
from mpbridge.training.tune.tuning import ENOUGH, FEWEST, Tuned, TuningRequest, tuned

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def tune_module(
    module: torch.nn.Module,
    step: Loss,
    batches: Sequence[Any],
    recipe: str | Path | MixedPrecisionConfig,
    *,
    levels: Sequence[str] | None = None,
    budget: Budget | str | None = None,
    unseen: int = 4,
    where: Where | None = None,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[Tuned, dict[str, Any]]:
    """Which of `module`'s linears can run in low precision under `recipe`: the result, and the content of a recipe file whose `modules:` use the module's names.

    step: (module, batch) -> the batch's loss, a scalar tensor on which backward has not been called. batches: the last `unseen` are for the proof, the
    others (4 or more, 8 rank better) are scored. levels, budget, where: as for `mpbridge tune`. options: those of Emulation. The module is restored, without gradients. Raises what `mpbridge tune` raises, BadValue for a step that calls backward
    itself and for batches that are not a sequence, Refused for a module that is frozen or already emulated.
    """
    every = _listed(batches, unseen)
    limit = budget if isinstance(budget, Budget) else budget_of(budget)
    if limit.what == "memory":
        raise BadValue(
            "a memory budget needs a run whose bytes can be counted (--config): for a bare module only time and gradient error are known"
        )
    config, where = get_mixed_precision_config(recipe), where or Where()
    found, notes = _aimed(config, levels, where)
    policy = prepared(config)[1]
    refuse_without_linears(module)
    _refuse_frozen(module)
    asked = TuningRequest(
        config=config,
        levels=found,
        budget=limit,
        batches=len(every) - unseen,
        unseen=unseen,
        pricing=Pricing(machine=where.priced(policy), constants=where.constants),
        fused=False,
        notes=(*notes, *_unreached(module)),
    )
    with _emulated(module, policy, options) as emulation:
        result = tuned(ModuleSubject(module, step, every, emulation, unseen=unseen), asked, say)
    kind = type(module).__name__
    name = str(recipe) if not isinstance(recipe, MixedPrecisionConfig) else ""
    return result, evidence(result, recipe=name, facts={"model": kind, FOREIGN: kind})


@contextmanager
def _emulated(module: torch.nn.Module, policy: PrecisionPolicy, options: Mapping[str, Any]) -> Iterator[Emulation]:
    """`module` in training mode with its linears emulated; restored afterwards, without gradients."""
    emulation, training = emulate_linears(module, policy, **options), module.training
    try:
        module.train()
        yield emulation
    finally:
        emulation.detach()
        module.train(training)
        module.zero_grad(set_to_none=True)


def _aimed(config: MixedPrecisionConfig, levels: Sequence[str] | None, where: Where) -> tuple[Levels, list[str]]:
    """As `aimed`, for a module. Raises BadValue for a stack."""
    if where.stack is not None:
        raise BadValue(
            f"stack {where.stack}: a stack's settings name megatron-core's linears, not those of another module: leave it out"
        )
    return aimed(config, levels, where)


def _listed(batches: Sequence[Any], unseen: int) -> list[Any]:
    if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")) or isinstance(batches, (str, Mapping)):
        raise BadValue(
            f"batches is a {type(batches).__name__}, expected a sequence, since each batch is used more than once: "
            f"list(itertools.islice(batches, {ENOUGH + unseen}))"
        )
    if unseen < 2:
        raise BadValue(f"unseen={unseen}: a standard error needs 2 batches or more")
    count = len(batches)
    if count - unseen < FEWEST:
        raise BadValue(
            f"{count} batches, {unseen} of them unseen, leave {max(count - unseen, 0)} to score, and scores of fewer than {FEWEST} rank nothing: "
            f"give {FEWEST + unseen} batches or more ({ENOUGH + unseen} rank better)"
        )
    return [batches[number] for number in range(count)]


def _refuse_frozen(module: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise Refused(
            f"every parameter of {type(module).__name__} is frozen (requires_grad=False), so there is no gradient to measure: "
            "unfreeze those that will be trained"
        )


def _unreached(module: torch.nn.Module) -> list[str]:
    """Notes on weights that are multiplied outside of `torch.nn.Linear`, such as experts in one tensor: no rule reaches them."""
    held = [
        (f"{name}.{own}" if name else own, type(child).__name__, weight.numel())
        for name, child in module.named_modules()
        if not isinstance(child, (torch.nn.Linear, torch.nn.Embedding))
        for own, weight in child.named_parameters(recurse=False)
        if weight.dim() > 1
    ]
    if not held:
        return []
    share = sum(size for *_, size in held) / sum(weight.numel() for weight in module.parameters())
    name, kind, _ = max(held, key=lambda item: item[2])
    some = "1 weight" if len(held) == 1 else f"{len(held)} weights"
    return [
        f"{share:.0%} of the parameters are in {some} outside of torch.nn.Linear and stay in high precision whatever is chosen, such as {name} of {kind}"
    ]
