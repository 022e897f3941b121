"""Who keeps what: predicted for every recipe, engine and optimizer, and live in engines that are really built and stepped."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.facts import OptimizerFacts
from mpbridge.common.formats import DType
from mpbridge.common.machines import machine
from mpbridge.common.traits import traits
from mpbridge.planning.memory.by_role import states
from mpbridge.planning.memory.keeps import STATES, fused, keeps, keeps_of
from mpbridge.planning.memory.roles import roles
from mpbridge.planning.rules.table import broken
from mpbridge.precision.registry import recipes
from mpbridge.precision.resolve import resolve
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.te_cpu.sides import on_host, with_copies
from tests.planning.memory.live_roles import batches

SEQ, VOCAB = 16, 128
MODEL = {
    "num_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab_size": VOCAB, "max_sequence_length": SEQ,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False, "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}  # fmt: skip
KEPT = ("params", "grads", "main_params", "main_grads", "exp_avg", "exp_avg_sq")
AWARE, BF16_GRADS = {"use_precision_aware_optimizer": True}, {"grad_reduce_in_fp32": False}
NORMS = {"keep_fp32": ["*norm*"]}
LOW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}
PLAIN_FP8 = {
    "fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False, "first_last_layers_bf16": False,
    "fp4_param_gather": False,
}  # fmt: skip
SMALL_SCALE = {"initial_loss_scale": 1024.0}

Case = tuple[str, dict[str, Any], str, bool | None]
"""engine, mixed_precision, optimizer.optimizer, ddp.use_distributed_optimizer."""

ONCE_WRONG: dict[str, Case] = {
    "full bf16 under Megatron-FSDP": ("megatron_fsdp", {"recipe": "full_bf16"}, "adam", None),
    "bf16 main weights and gradients": ("mcore", {"recipe": "bf16_mixed", "main_params_dtype": "bf16", **BF16_GRADS}, "adam", None),
    "full bf16 with fp32 norms": ("mcore", {"recipe": "full_bf16", **NORMS}, "adam", None),
    "mxfp8, precision-aware, bf16 main gradients": (
        "mcore", {"recipe": "bf16_with_mxfp8_mixed", **AWARE, **BF16_GRADS, "main_grads_dtype": "bf16"}, "adam", True,
    ),
    "fp32 with bf16 moments": ("mcore", {"recipe": "fp32", **AWARE, "exp_avg_dtype": "bf16"}, "adam", True),
    "fp32 storage with fp16 main weights": ("fsdp2", {"recipe": "fp32_params_bf16_compute", "main_params_dtype": "fp16"}, "adam", None),
    "bf16 gradients under FusedAdam": ("mcore", {"recipe": "bf16_params_fp32_states", **BF16_GRADS}, "adam", True),
    "sgd on torch FSDP2": ("fsdp2", {"recipe": "fp32"}, "sgd", None),
    "muon beside adam on torch FSDP2": ("fsdp2", {"recipe": "fp32_params_bf16_compute"}, "muon", None),
    "mxfp8 at rest with bf16 main weights": (
        "mcore", {"recipe": "bf16_with_mxfp8_mixed", **AWARE, "main_params_dtype": "bf16"}, "adam", True,
    ),
}  # fmt: skip
"""Where memory, rules and audit disagreed with each other or with the live tensors while each derived this for itself."""


def configured(case: Case, **settings: Any) -> Run:
    engine, mixed, optimizer, distributed = case
    sections = {
        "model": MODEL, "optimizer": {"lr": 1e-3, "optimizer": optimizer, **settings},
        "ddp": {} if distributed is None else {"use_distributed_optimizer": distributed},
        "train": {"micro_batch_size": 2, "global_batch_size": 2, "train_iters": 4},
    }  # fmt: skip
    container = ConfigContainer(mixed_precision=mixed, engine=engine, emulate=True, **sections)
    return container.resolved(machine=machine("cpu"))


def accepted(case: Case) -> Run | None:
    """The run, or None where it is refused before anything is built."""
    try:
        run = configured(case)
    except MpbridgeError:
        return None
    return None if any(v.severity == "error" for v in broken(run.policy, run.facts)) else run


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    made = start_process_group(False)
    yield
    if made:
        stop_process_group()


def disagreements(run: Run) -> list[str]:
    """What memory, the promises of the audit and the live tensors of the built engine say differently about a parameter."""
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.observe.audit.examine import audit

    with device_layer(False):
        engine = build_engine(run)
        try:
            reports = [audit(run.policy, engine, stage="static")]
            applied = any(engine.train_step(batches(SEQ), microbatches=1).applied for _ in range(2))
            reports.append(audit(run.policy, engine, stage="live"))
            own = {one.data_ptr() for _, one in engine.named_parameters() if not hasattr(one, "_local_tensor")}
            kept = [one for one in engine.tensors() if one.role in KEPT]
            # a main weight that is listed may be the parameter itself
            kept = [one for one in kept if one.role != "main_params" or one.tensor.data_ptr() not in own]
            live = {(one.role, one.parameter): one.tensor for one in kept}
        finally:
            engine.close()
    grads = {tensor.untyped_storage().data_ptr() for (role, _), tensor in live.items() if role == "grads"}
    found = {
        (role, name): (str(tensor.dtype).removeprefix("torch."), tensor.numel())
        for (role, name), tensor in live.items()
        if role != "main_grads" or tensor.untyped_storage().data_ptr() not in grads
    }
    named = [role for role in roles(run.policy, run.facts) if role.name in KEPT]
    expected = {(role.name, role.parameter): (role.dtype.value, role.elements) for role in named}
    both = [(key, found.get(key), expected.get(key)) for key in found.keys() | expected.keys()]
    bad = [one for report in reports for one in report.findings if not one.ok]
    wrong = [] if applied else ["no update was applied"]
    wrong += [f"{key}: live {here}, predicted {said}" for key, here, said in both if here != said]
    return wrong + [f"audit: {one.subject}: {one.promised}, found {one.found}" for one in bad]


@pytest.mark.parametrize("row", ONCE_WRONG)
def test_check_memory_audit_and_live_tensors_agree_where_they_once_did_not(world: None, row: str) -> None:
    run = accepted(ONCE_WRONG[row])
    refused = {"fp32 storage with fp16 main weights", "mxfp8 at rest with bf16 main weights"}
    assert (run is None) is (row in refused)
    assert run is None or not disagreements(run)


def every_case() -> Iterator[Case]:
    """All registered recipes and systematic variations of them on all engines and optimizers."""
    bases: list[dict[str, Any]] = []
    for name, entry in recipes.items():
        config = entry.make()
        low = PLAIN_FP8 if config.fp8 or config.fp4 else {}
        bases.append({"recipe": name, **low, **(SMALL_SCALE if config.fp16 else {})})
    for name, main, extra, grads in itertools.product(
        ("bf16_mixed", "fp32", "fp16_mixed", "fp32_params_bf16_compute", "full_bf16", "fp8_cs", "fp8_ds"),
        ({}, {"main_params_dtype": "fp16"}, {"main_params_dtype": "bf16"}),
        ({}, AWARE, AWARE | {"store_param_remainders": False}, AWARE | LOW, LOW, NORMS, AWARE | NORMS),
        ({}, BF16_GRADS),
    ):
        low = PLAIN_FP8 if name.startswith("fp8") else SMALL_SCALE if name == "fp16_mixed" else {}
        bases.append({"recipe": name, **low, **main, **extra, **grads})
    for engine, mixed in itertools.product(("mcore", "fsdp2", "megatron_fsdp"), bases):
        yield engine, mixed, "adam", None
        if len(mixed) <= 3:
            yield engine, mixed, "sgd", None
            yield engine, mixed, "torch_adamw", None
        if engine == "mcore":
            yield engine, mixed, "adam", True


@functools.cache
def kinds() -> list[Run]:
    """Of the runs that the rules accept, one of each distinct prediction."""
    found: dict[Any, Run] = {}
    for case in every_case():
        run = accepted(case)
        if run is not None:
            kept = keeps_of(run.policy, run.facts)
            key = (run.engine, tuple(kept.items()), run.policy.keep_fp32, fused(run.policy, run.facts.traits))
            found.setdefault(key, run)
    return list(found.values())


def _wrong(runs: list[Run]) -> dict[str, list[str]]:
    return {str(run.container.as_data()): found for run in runs if (found := disagreements(run))}


def test_every_fourth_kind_of_keeping_is_what_lives_in_a_real_engine(world: None) -> None:
    assert len(kinds()) > 100
    some = kinds()[::4]
    assert {run.engine for run in some} == {"mcore", "fsdp2", "megatron_fsdp"}
    assert not _wrong(some)


@pytest.mark.slow
def test_every_kind_of_keeping_is_what_lives_in_a_real_engine(world: None) -> None:
    assert not _wrong(kinds())


def _beside_its_source(original: Any) -> Any:
    def made(tensor: torch.Tensor, **more: Any) -> torch.Tensor:
        found = original(tensor, **more)
        return found.cpu() if on_host(tensor) else found

    return made


@pytest.fixture
def two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's HybridDeviceOptimizer without a GPU: what `.cpu()` returns is on the host, everything else counts as a GPU's."""
    monkeypatch.setattr("mpbridge.backend.engines.base.require_here", lambda policy, facts: None)  # needs-cuda
    for owner, name, new in with_copies(()):
        monkeypatch.setattr(owner, name, new)
    for owner, name in ((torch.Tensor, "clone"), (torch.Tensor, "float"), (torch, "zeros_like")):
        monkeypatch.setattr(owner, name, _beside_its_source(getattr(owner, name)))


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("mixed", [{}, BF16_GRADS, LOW, {"main_params_dtype": "fp16", "store_param_remainders": False}])
def test_an_offloaded_optimizer_keeps_fp32_states_whatever_it_is_told(
    world: None, two_sides: None, mixed: dict[str, Any], fraction: float
) -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.backend.megatron.inside_optimizer import parts
    from mpbridge.observe.audit.examine import audit

    asked = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    run = configured(("mcore", {"recipe": "bf16_mixed", **AWARE, **mixed}, "adam", True), **asked)
    live: list[tuple[str, torch.Tensor]] = []
    with device_layer(False):
        engine = build_engine(run)
        try:
            assert any(engine.train_step(batches(SEQ), microbatches=1).applied for _ in range(2))
            (part,) = parts(engine.optimizer)
            assert isinstance(part.optimizer, HybridDeviceOptimizer)
            assert [str(one) for one in audit(run.policy, engine, stage="live").findings if not one.ok] == []
            for parameter, state in part.optimizer.state.items():
                updated = part.optimizer.param_to_fp32_param[parameter]
                live += [("main_params", updated), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])]
                if updated.grad is not None and updated.grad.data_ptr() != parameter.decoupled_grad.data_ptr():
                    live.append(("main_grads", updated.grad))
        finally:
            engine.close()
    assert {tensor.dtype for _, tensor in live} == {torch.float32}
    assert {on_host(tensor) for _, tensor in live} == {fraction == 1.0}
    on_gpu: Counter[str] = Counter()
    for role, tensor in live:
        on_gpu[role] += 0 if on_host(tensor) else tensor.nbytes
    predicted = states(run.policy, run.facts, rank=0).roles
    assert +on_gpu == {role: predicted[role] for role in STATES if role in predicted}


def test_an_offloaded_optimizer_takes_no_fp32_parameters(world: None, two_sides: None) -> None:
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine

    run = configured(("mcore", {"recipe": "bf16_mixed", **AWARE, **NORMS}, "adam", True), optimizer_cpu_offload=True)
    assert "offload-with-fp32-parameters" in {violation.rule for violation in broken(run.policy, run.facts)}
    with device_layer(False), pytest.raises(ValueError, match="non-leaf"):
        build_engine(run)


@pytest.mark.parametrize("scaling", [None, "delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("offload", [False, True])
def test_who_holds_main_weights_follows_the_flag_that_megatron_core_derives(scaling: str | None, offload: bool) -> None:
    from megatron.core.optimizer import OptimizerConfig

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.optimizers import CpuFusedAdam

    low = {"fp8": "hybrid", "fp8_recipe": scaling} if scaling else {}
    for aware, main in itertools.product((False, True), (None, DType.FP16)):
        changes = {"use_precision_aware_optimizer": aware} | ({"main_params_dtype": main} if aware and main else {})
        policy = resolve(recipes["bf16_mixed"].make().derive(**low, **changes)).settled()
        with device_layer(False, fused_adam=CpuFusedAdam):
            config = OptimizerConfig(
                bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, use_precision_aware_optimizer=aware, fp8_recipe=scaling,
                main_params_dtype=policy.main_params.torch(), optimizer_cpu_offload=offload,
            )  # fmt: skip
        held = keeps(policy, traits("mcore"), OptimizerFacts(distributed=True, cpu_offload=offload))["main_params"]
        assert (held.owner == "optimizer") is config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
