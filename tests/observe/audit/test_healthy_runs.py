"""Healthy, unusual runs: the audit lets them be. A hundred of them by combination, and those that once were stopped by name."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpbridge.common.errors import Contradiction, Refused
from mpbridge.observe.audit import AuditHook
from tests.observe.audit.catalogue import ENGINES, HYBRID, MOE, SHARDED
from tests.observe.audit.conftest import driven, faults_in
from tests.observe.audit.faults import after

SAME = (
    "ddp", "fp32", "fp16", "dist", "residual", "logits", "fsdp2", "fsdp2 a", "mfsdp", "tensorwise", "delayed", "mxfp8", "nvfp4", "tensorwise fsdp2",
)  # fmt: skip
"""Runs in which the catalogue plants its faults."""
RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: ENGINES[name] for name in SAME},
    "BF16 wire": ({"recipe": "bf16_mixed", "grad_reduce_in_fp32": False}, {}),
    "full BF16": ("full_bf16", {}),
    "overlapped": ("bf16_mixed", {"ddp": SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}}),
    "aware": ("bf16_mixed_bf16_moments", {"ddp": SHARDED}),
    "kept norms": ({"recipe": "bf16_mixed", "keep_fp32": ["*layernorm*"]}, {}),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"share_embeddings_and_output_weights": False},
    "gated RMS": {"normalization": "RMSNorm", "gated_linear_unit": True},
    "biases, learned positions": {"add_bias_linear": True, "position_embedding_type": "learned_absolute"},
    "grouped queries": {"num_query_groups": 2},
    "query norms": {"qk_layernorm": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "experts": MOE,
    "sum of tokens": {"calculate_per_token_loss": True},
    "one layer": {"num_layers": 1},
    "hybrid": HYBRID | {"num_layers": 4, "hybrid_override_pattern": "M-M*"},
    "hybrid with experts": HYBRID | MOE | {"num_layers": 4, "hybrid_override_pattern": "MEM*"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {},
    "no clipping": {"clip_grad": 0.0},
    "no decay, no memory": {"weight_decay": 0.0, "adam_beta1": 0.0},
    "tiny rate": {"lr": 1e-8},
    "large rate": {"lr": 3e-2, "clip_grad": 100.0},
    "sgd": {"optimizer": "sgd"},
}
BATCHES = ("whole", "first masked", "half masked", "one micro-batch", "four micro-batches", "one token")


def masked(batches: Iterator[dict[str, torch.Tensor]], kind: str, micro: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches in which some tokens, or all of the first step's, count for nothing."""
    for number, batch in enumerate(batches):
        mask = torch.ones_like(batch["loss_mask"])
        if kind == "first masked" and number < micro:
            mask.zero_()
        if kind == "half masked" and number % 2 == 0:
            mask.zero_()
        if kind == "one token":
            mask.zero_()
            mask[0, 3] = 1.0
        yield batch | {"loss_mask": mask}


def audited(build: Any, recipe: str, model: str, optimizer: str, batch: str, steps: int = 3) -> AuditHook:
    """The hook behind some steps, each audited."""
    from tests.backend.engines import tiny

    kind, sections = RECIPES[recipe]
    both = {"model": MODELS[model], "optimizer": OPTIMIZERS[optimizer]}
    sections = sections | {name: sections.get(name, {}) | more for name, more in both.items()}
    engine = build(kind, **sections)
    micro = {"one micro-batch": 1, "four micro-batches": 4}.get(batch, 2)
    hook = AuditHook(mode="warn", every=1, invariants=1)
    driven(engine, hook, steps=steps, micro=micro, batches=masked(tiny.batches(), batch, micro))
    return hook


@pytest.mark.parametrize("recipe", ["fp16", "fsdp2", "mfsdp"])
def test_a_first_batch_without_a_token_to_learn_from_only_defers_the_audit(build: Any, recipe: str) -> None:
    hook = audited(build, recipe, "plain", "adam", "first masked")
    assert faults_in(hook) == []
    assert [one["step"] for one in hook.history if "weights moved" in one["facts"]] == [2, 3]


@pytest.mark.parametrize(
    ("recipe", "model", "optimizer", "batch"),
    [
        ("nvfp4", "experts", "large rate", "four micro-batches"),
        ("fsdp2 a", "untied", "tiny rate", "half masked"),
        ("overlapped", "sum of tokens", "no decay, no memory", "four micro-batches"),
        ("residual", "recomputed", "sgd", "whole"),
        ("residual", "hybrid", "adam", "four micro-batches"),
        ("mxfp8", "hybrid with experts", "large rate", "half masked"),
        ("delayed", "hybrid", "no clipping", "whole"),
    ],
)
def test_an_unusual_run_is_healthy(build: Any, recipe: str, model: str, optimizer: str, batch: str) -> None:
    assert faults_in(audited(build, recipe, model, optimizer, batch, steps=2)) == []


@pytest.mark.parametrize("recipe", ["dist", "fsdp2"])  # Megatron-FSDP refuses a model with frozen parameters
def test_frozen_parts_are_no_fault(build: Any, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpbridge.backend.models import gpt

    real = gpt.gpt_model

    def frozen(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)
        for name, parameter in model.named_parameters():
            if "layers.0" in name or "embedding" in name:
                parameter.requires_grad_(False)
        return model

    monkeypatch.setattr(gpt, "gpt_model", frozen)
    assert faults_in(audited(build, recipe, "untied", "adam", "whole")) == []


def test_adapters_on_a_frozen_base_are_no_fault(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under MXFP8, and with as many tokens as features, so that shapes do not tell dgrad from wgrad."""
    from mpbridge.backend.models import gpt

    real = gpt.gpt_model

    def adapted(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs).requires_grad_(False)
        for name, linear in list(model.named_modules()):
            if name.endswith(("linear_qkv", "linear_fc2")):
                linear.low = torch.nn.Parameter(torch.randn(4, linear.weight.shape[1]) / 8.0)
                linear.high = torch.nn.Parameter(torch.zeros(linear.weight.shape[0], 4))
                linear.register_forward_hook(_adapter)
        return model

    monkeypatch.setattr(gpt, "gpt_model", adapted)
    assert faults_in(audited(build, "mxfp8", "untied", "adam", "whole")) == []


def _adapter(linear: Any, args: Any, output: Any) -> Any:
    low = args[0].to(linear.low.dtype) @ linear.low.t() @ linear.high.t()
    return (output[0] + low.to(output[0].dtype), *output[1:])


def test_a_weight_decay_that_a_schedule_changes_after_the_step_is_no_fault(build: Any) -> None:
    engine, hook = build("bf16", optimizer={"weight_decay": 0.3}), AuditHook(mode="warn", every=1, invariants=1)

    def halve() -> None:
        for group in engine.optimizer.param_groups:
            group["weight_decay"] *= 0.5

    after(engine, "train_step", halve)  # as the loop's scheduler does, before the audit looks
    driven(engine, hook, steps=3)
    assert [text for text in faults_in(hook) if "weights moved" in text] == []


def _hundred() -> list[tuple[str, str, str, str]]:
    """A hundred combinations, the same ones every time, each value of each axis among them."""
    rows = list(itertools.product(RECIPES, MODELS, OPTIMIZERS, BATCHES))
    rows.sort(key=lambda row: zlib.crc32("/".join(row).encode()))
    return rows[:130]


@pytest.mark.slow
@pytest.mark.timeout(2400)  # five minutes of an idle core
def test_a_hundred_healthy_runs_raise_no_alarm(build: Any) -> None:
    import gc

    from mpbridge.backend.engines import registry

    alarms, ran, refused = [], 0, 0
    for row in _hundred():
        made: list[Any] = []

        def once(kind: Any, made: list[Any] = made, **sections: Any) -> Any:
            from mpbridge.backend.devices import device_layer
            from tests.backend.engines import tiny

            with device_layer(False):
                made.append(registry.build_engine(tiny.run(kind, **sections)))
            return made[0]

        try:
            found = faults_in(audited(once, *row))
        except (Contradiction, Refused):
            if made:  # what stops a run that stands is no rule
                raise
            refused += 1
            continue
        finally:
            for engine in made:
                engine.close()
            gc.collect()
        ran += 1
        if found:
            alarms.append((row, found))
    print(f"{ran} healthy runs, {len(alarms)} alarms; {refused} combinations were refused by a rule")
    assert alarms == []
    assert ran >= 100, f"{ran} ran, {refused} were refused"
