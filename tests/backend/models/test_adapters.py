"""Frozen parameters and low-rank adapters: who trains, in which dtype, what the audit says of it, and checkpoints."""

from typing import Any

import pytest
import torch

from mpbridge.common.errors import Contradiction, Refused
from mpbridge.observe.audit.examine import audit
from mpbridge.observe.audit.snapshot import Before
from mpbridge.planning.memory.layers import parameters
from mpbridge.planning.memory.ranks import Coordinates
from tests.backend.contract.engine_contract import load, save
from tests.backend.engines import tiny

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0, "share_embeddings_and_output_weights": False}
HYBRID: dict[str, Any] = {
    "num_layers": 3, "hybrid_override_pattern": "M-*", "normalization": "RMSNorm", "position_embedding_type": "none", "mamba_num_heads": 16,
    "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 12, "lora_targets": ["mixer.in_proj", "mixer.out_proj", "mlp.*"],
}  # fmt: skip
WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BASE: dict[str, Any] = {"recipe": "bf16_mixed", "frozen": ["*"]}


@pytest.fixture
def build(engines: Any) -> Any:
    return lambda kind=BASE, model=(), **sections: engines(kind, model=LORA | dict(model), **sections)


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({}, {}),
    "fp32 adapters, sharded": ({"lora_dtype": "fp32"}, {"ddp": {"use_distributed_optimizer": True}}),
    "recomputed": ({}, {"model": WHOLE}),
    "hybrid": ({"lora_dtype": "fp32"}, {"model": HYBRID}),
    "fp32": ({"recipe": "fp32"}, {}),
    "fp8": ({"recipe": "bf16_with_fp8_delayed_scaling_mixed"}, {"emulate": True, "ddp": {"use_distributed_optimizer": True}}),
    "fp16": ({"recipe": "fp16_mixed", "loss_scale": 1024.0}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_adapters_train_beside_a_base_that_does_not_change(build: Any, name: str) -> None:
    kind, sections = RUNS[name]
    engine = build(BASE | kind, **sections)
    at = Coordinates(tensor=0, stage=0, expert=0, data=0, expert_data=0)
    planned = [(p.name, p.weight.shape) for chunk in parameters(engine.run.facts, at) for p in chunk]
    assert [(path, tuple(one.shape)) for path, one in engine.named_parameters()] == planned
    found = dict(engine.named_parameters())
    before = {path: one.detach().clone() for path, one in found.items()}
    dtypes = {path: one.dtype for path, one in found.items()}
    base = {"fp32": torch.float32, "fp16": torch.float16}.get(name, torch.bfloat16)
    wide = torch.float32 if "lora_dtype" in kind else base
    assert dtypes == {path: wide if ".adapter." in path else base for path in found}
    losses = tiny.losses(engine, 6)
    assert losses[-1] < losses[0]
    moved = {path for path, one in found.items() if not torch.equal(one, before[path])}
    assert moved == {path for path in found if ".adapter." in path}


def test_an_adapter_is_a_product_of_low_rank_added_to_its_linear(build: Any) -> None:
    """Against a model without adapters whose weights are W + alpha / rank x B A."""
    engine = build({"recipe": "fp32", "frozen": ["*"]})
    tiny.losses(engine, 3)
    weights = {name: one.detach().clone() for name, one in engine.named_parameters()}
    loss = engine.evaluate(tiny.batches(seed=3), microbatches=2)
    engine.close()
    plain = build("fp32", model={"lora_rank": None, "lora_alpha": None})
    for name, one in plain.named_parameters():
        own = name.removesuffix("weight") + "adapter.linear_{}.weight"
        low = weights[own.format("out")] @ weights[own.format("in")] if own.format("in") in weights else 0.0
        one.data.copy_(weights[name] + 8 / 4 * low)
    merged = plain.evaluate(tiny.batches(seed=3), microbatches=2)
    assert loss == pytest.approx(merged, rel=1e-5)
    for name, one in plain.named_parameters():
        one.data.copy_(weights[name])
    assert loss != pytest.approx(plain.evaluate(tiny.batches(seed=3), microbatches=2), rel=1e-3)


def judged(engine: Any) -> dict[str, Any]:
    """The findings of the second of two steps."""
    batches = tiny.batches()
    engine.train_step(batches, microbatches=2)
    before = Before(engine)
    result = engine.train_step(batches, microbatches=2)
    report = audit(engine.run.policy, engine, stage="live", before=before, result=result, microbatches=2)
    return {finding.subject: finding for finding in report.findings}


@pytest.mark.parametrize("kind", [{}, {"lora_dtype": "fp32"}], ids=["bf16", "fp32"])
def test_the_audit_of_a_healthy_run_is_silent_and_counts_what_is_frozen(build: Any, kind: dict[str, Any]) -> None:
    found = judged(build(BASE | kind))
    # nobody watched the step's operations
    assert [str(one) for one in found.values() if not one.ok and one.subject != "gradients"] == []
    # two layers with a norm and two linears each in attention and the MLP, the last norm, the embedding and the output layer
    assert found["frozen"].count == 2 * (4 + 4) + 2 + 2


SAVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "adapters": (BASE, {}),
    "fp32 adapters": (BASE | {"lora_dtype": "fp32"}, {}),
    "first layer": ({"recipe": "bf16_mixed", "frozen": ["decoder.layers.0.*"]}, {"gated_linear_unit": True, "lora_rank": None, "lora_alpha": None}),
    "kept norms": ({"recipe": "bf16_mixed", "keep_fp32": ["*layernorm*"]}, {"lora_rank": None, "lora_alpha": None}),
    "kept among others": ({"recipe": "bf16_mixed", "keep_fp32": ["*.linear_fc2.weight"]}, {"lora_rank": None, "lora_alpha": None}),
}  # fmt: skip


BOTH_WAYS = [
    pytest.param(name, sharded, marks=() if sharded is (place % 2 == 0) else pytest.mark.slow)
    for place, name in enumerate(SAVED)
    for sharded in (False, True)
]


@pytest.mark.parametrize(("name", "sharded"), BOTH_WAYS)
def test_a_checkpoint_holds_the_states_of_what_trains(build: Any, tmp_path: Any, name: str, sharded: bool) -> None:
    """Two steps, a checkpoint, two more: as four in one go. megatron-core alone fails for a frozen layer, and for FP32 parameters under plain DDP."""
    kind, model = SAVED[name]
    sections = {"model": model, "ddp": {"use_distributed_optimizer": sharded}, "optimizer": {"lr": 1e-2}}
    one = build(kind, **sections)
    tiny.losses(one, 2)
    save(one, tmp_path / "saved")
    going_on = [one.train_step(tiny.batches(seed=step), microbatches=2) for step in (1, 2)]
    one.close()
    other = build(kind, **sections)
    load(other, tmp_path / "saved")
    assert [other.train_step(tiny.batches(seed=step), microbatches=2) for step in (1, 2)] == going_on


def test_what_cannot_be_is_refused(build: Any) -> None:
    with pytest.raises(Refused, match="nothing-is-trained"):
        build({"recipe": "bf16_mixed", "frozen": ["*"]}, model={"lora_rank": None, "lora_alpha": None})
    with pytest.raises(Refused, match="frozen 'nosuch' match no parameter"):
        build({"recipe": "bf16_mixed", "frozen": ["nosuch"]})
    with pytest.raises(Contradiction, match=r"lora_alpha=2\.0: only read with a rank"):
        build(model={"lora_rank": None, "lora_alpha": 2.0})
    with pytest.raises(Contradiction, match="lora_dtype=bf16 with params_dtype=fp32"):
        build({"recipe": "fp32", "lora_dtype": "bf16"})
    with pytest.raises(Refused, match="match no linear"):
        build(model={"lora_targets": ["nosuch"]})
