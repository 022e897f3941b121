"""`tune_module`: the same for anybody's module and loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mpbridge.emulation import emulate_linears
from mpbridge.emulation.modules import refuse_without_linears
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.registry import FOREIGN, get_mixed_precision_config
from mpbridge.tune.budget import Budget, budget_of
from mpbridge.tune.costs import Pricing
from mpbridge.tune.evidence import evidence
from mpbridge.tune.run import Where, default_levels, natural
from mpbridge.tune.subject import ModuleSubject
from mpbridge.tune.tuning import Asked, Tuned, levels_of, prepared, refuse_bad, tuned

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
    facts: dict[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[Tuned, dict[str, Any]]:
    """Which of `module`'s linears may go low under `recipe`: the result, and the content of a recipe file whose `modules:` name them as the module does.

    step: (module, batch) -> the batch's loss, a scalar tensor on which backward has not been called. batches: the last `unseen` are for the proof, the
    others (8 or more) are scored. levels, budget, where: as for `mpbridge tune`. facts: what the evidence should say of model and data. options: those of
    Emulation. The module is left as it was, gradients gone. Raises what `mpbridge tune` raises.
    """
    refuse_bad(len(batches) - unseen, unseen)
    config = get_mixed_precision_config(recipe)
    _, policy = prepared(config)
    refuse_without_linears(module)
    where, words = where or Where(), default_levels(config) if levels is None else levels
    target = where.machine or natural(policy.quants)
    asked = Asked(
        config=config,
        levels=levels_of(words, config),
        budget=budget if isinstance(budget, Budget) else budget_of(budget),
        batches=len(batches) - unseen,
        unseen=unseen,
        pricing=Pricing(machine=target, constants=where.constants),
        fused=False,
    )
    emulation = emulate_linears(module, policy, **options)
    training = module.training
    try:
        module.train()
        result = tuned(ModuleSubject(module, step, batches, emulation, unseen=unseen), asked, say)
    finally:
        emulation.detach()
        module.train(training)
        module.zero_grad(set_to_none=True)
    kind = type(module).__name__
    said = {"model": kind, FOREIGN: kind, **(facts or {})}
    return result, evidence(
        result, recipe=str(recipe) if not isinstance(recipe, MixedPrecisionConfig) else "", facts=said
    )
