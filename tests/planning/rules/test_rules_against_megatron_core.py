"""Thousands of random policies and runs: what passes our rules builds real megatron-core configs; what megatron-core rejects, a rule or `resolve` rejects first."""

from __future__ import annotations

import random
import re
import sys
import types
from collections import Counter

import pytest

from mpbridge.common.errors import Contradiction, MpbridgeError
from mpbridge.common.facts import Versions
from mpbridge.common.machines import machine
from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.settings.container import ConfigContainer

NOW = Versions(torch="2.11.0", megatron_core="0.16.1", transformer_engine="2.11.0", cuda="13.0")
SAMPLES = 3000

# words of megatron-core's message -> what of ours must have said it: a rule's id, or "resolve"; always enough: a write of the plan on the named field
NAMED = {
    "Only one of self.fp16": {"resolve"},
    "Delayed scaling does not support first / last": {"edge-layers-with-delayed-scaling"},
    "between 0 and number of layers per pipeline stage": {"edge-layers-beyond-a-stage", "edge-layers-leave-nothing", "resolve"},
    "fp8_quantizer_factory must be provided": {"resolve"},
    "fp4_quantizer_factory must be provided": {"resolve"},
    "fp8_param must be used together": {"resolve"},
    "fp4_param must be used together": {"resolve"},
    "cannot be used simultaneously": {"resolve"},
    "Delayed scaling does not support moe_act and layernorm": {"delayed-scaling-with-selective-recompute"},
    "supported only for SwiGLU": {"activation-store-needs-swiglu"},
    "fp8/fp4 must be specified when moe_router_padding": {"router-padding-without-quantization", "plan:moe_router_padding_for_fp8"},
    "does not support moe_router_padding_for_quantization": {"router-padding-dispatcher"},
    "Reuse grad buffer only": {"resolve"},
    "only supported with adam": {"precision-aware-needs-adam"},
    "only supported with distributed optimizer": {"precision-aware-needs-distributed-optimizer"},
    "can only be fp32 when not using precision-aware": {"states-need-precision-aware", "optimizer-section-states-need-precision-aware", "fp16-parameters-alone", "resolve",
                                                                  "fp4-weights-stored"},  # there the policy is precision-aware by itself
    "moe_preprocess cuda graph is not supported": {"router-padding-in-a-graph"},
    "only supported with bf16 or fp16 model": {"expert-overlap-needs-16-bits"},
}  # fmt: skip


@pytest.fixture
def engine_there(monkeypatch):
    """megatron-core believes that Transformer Engine 2.11 is installed; only its version and FusedAdam's signature are asked for by the configs."""
    import megatron.core.utils as utils
    from megatron.core.distributed import DistributedDataParallelConfig  # noqa: F401  (megatron-core must be imported before the stub exists)
    from megatron.core.optimizer import OptimizerConfig  # noqa: F401
    from packaging.version import Version

    # everything that asks at import whether Transformer Engine is there: a module first imported beside the stub would believe in it for good
    from mpbridge.backend.engines.optimizers import CpuFusedAdam
    from mpbridge.backend.megatron import targets  # noqa: F401

    stub = types.ModuleType("transformer_engine.pytorch.optimizers")
    stub.FusedAdam = CpuFusedAdam
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(utils, "_te_version", Version("2.11.0"))


def draw(rng):
    """(precision fields, model, optimizer, ddp, parallel), mostly sensible, often wrong."""

    def maybe(share, make):
        return make() if rng.random() < share else None

    def pick(*choices):
        return lambda: rng.choice(choices)

    base = rng.choice(["bf16"] * 6 + ["fp16"] * 3 + ["fp32"])
    precision = {base: True} | ({rng.choice(["bf16", "fp16"]): True} if rng.random() < 0.03 else {})
    optional = {
        "fp8": maybe(0.6, pick("e4m3", "hybrid")), "fp4": maybe(0.12, pick("e2m1")), "fp8_param_gather": maybe(0.4, pick(True, False)),
        "fp4_param": maybe(0.05, pick(True)), "grad_reduce_in_fp32": maybe(0.5, pick(True, False)), "first_last_layers_bf16": maybe(0.3, pick(True)),
        "num_layers_at_start_in_bf16": maybe(0.3, pick(0, 1, 2, 3, 5)), "num_layers_at_end_in_bf16": maybe(0.3, pick(0, 1, 2, 3, 5)),
        "reuse_grad_buf_for_mxfp8_param_ag": maybe(0.15, pick(True)), "use_precision_aware_optimizer": maybe(0.2, pick(True, False)),
        "exp_avg_dtype": maybe(0.1, pick("bf16", "fp16", "fp8", "fp32")), "exp_avg_sq_dtype": maybe(0.1, pick("bf16", "fp16", "fp32")),
        "main_grads_dtype": maybe(0.05, pick("bf16", "fp32")), "main_params_dtype": maybe(0.05, pick("fp16", "fp32")), "loss_scale": maybe(0.1, pick(1.0, 4096.0)),
        "fp32_residual_connection": maybe(0.1, pick(True)), "autocast_enabled": maybe(0.1, pick(True)), "moe_router_dtype": maybe(0.1, pick("fp32", "fp64")),
        "fp8_margin": maybe(0.1, pick(0, 1)), "fp8_amax_history_len": maybe(0.1, pick(1, 16)), "fp8_dot_product_attention": maybe(0.1, pick(True)),
        "fp8_quantizer_factory": maybe(0.05, pick("a.b")),
    }  # fmt: skip
    precision |= {name: value for name, value in optional.items() if value is not None}
    if precision.get("fp8"):
        precision["fp8_recipe"] = rng.choice(["tensorwise", "delayed", "blockwise", "mxfp8", "custom"])
    if precision.get("fp4"):
        precision["fp4_recipe"] = rng.choice(["nvfp4", "nvfp4", "custom"])
    model = _model(rng, maybe, pick)
    # overlapping experts' communication across stages wants interleaving: no matter of precision
    stages = 1 if model.get("overlap_moe_expert_parallel_comm") else rng.choice([1, 1, 2])
    return precision, model, _optimizer(maybe, pick), _ddp(maybe, pick), {"pipeline_model_parallel_size": stages}


def _model(rng, maybe, pick):
    model = {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "max_sequence_length": 32,
        "add_bias_linear": False,
    }
    if rng.random() < 0.4:
        model |= {
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 64,
            "moe_token_dispatcher_type": rng.choice(["allgather", "alltoall", "flex"]),
        }
        model["moe_router_padding_for_quantization"] = bool(maybe(0.3, pick(True)))
        model["moe_router_padding_for_fp8"] = bool(maybe(0.2, pick(True)))
        if rng.random() < 0.1:
            model |= {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router", "moe_preprocess"]}
        if rng.random() < 0.1:
            model |= {
                "overlap_moe_expert_parallel_comm": True,
                "moe_token_dispatcher_type": "alltoall",
                "expert_model_parallel_size": 2,
            }
    if rng.random() < 0.2:
        model |= {
            "recompute_granularity": "selective",
            "recompute_modules": [rng.choice(["layernorm", "core_attn", "mlp"])],
        }
    if rng.random() < 0.1:
        model["activation_func_fp8_input_store"] = True
    if rng.random() < 0.3:
        model |= {"gated_linear_unit": True, "activation_func": "silu"}
    if rng.random() < 0.1:
        model["apply_query_key_layer_scaling"] = True
    return model


def _optimizer(maybe, pick):
    optional = {
        "optimizer": maybe(0.05, pick("sgd")), "use_precision_aware_optimizer": maybe(0.1, pick(True)), "exp_avg_dtype": maybe(0.06, pick("bf16")),
        "main_grads_dtype": maybe(0.04, pick("bf16")), "fp8_recipe": maybe(0.05, pick("tensorwise", "delayed")), "store_param_remainders": maybe(0.1, pick(False)),
    }  # fmt: skip
    return {"lr": 1e-3} | {name: value for name, value in optional.items() if value is not None}


def _ddp(maybe, pick):
    optional = {
        "use_distributed_optimizer": maybe(0.6, pick(True)), "overlap_grad_reduce": maybe(0.5, pick(True)), "overlap_param_gather": maybe(0.4, pick(True)),
        "reduce_scatter_with_fp32_accumulation": maybe(0.1, pick(True)), "check_for_nan_in_grad": maybe(0.3, pick(True)),
    }  # fmt: skip
    return {name: value for name, value in optional.items() if value is not None}


def ours(precision, model, optimizer, ddp, parallel):
    """(ids of broken errors, or 'resolve'; the Run or None)."""
    split = {name: model[name] for name in ("expert_model_parallel_size",) if name in model}
    rest = {name: value for name, value in model.items() if name not in split}
    container = ConfigContainer(
        mixed_precision=dict(precision), model=rest, optimizer=optimizer, ddp=ddp, parallel=parallel | split
    )
    try:
        run = container.resolved(container.smallest_world(), machine=machine("b200"), versions=NOW, training=False)
    except Contradiction:
        return {"resolve"}, None
    return {violation.rule for violation in broken(run.policy, run.facts) if violation.severity == "error"}, run


def theirs(precision, model, optimizer, ddp, parallel):
    """megatron-core's verdict on the same values copied by name, dtypes derived as every recipe does: an exception's text, or None."""
    import torch
    import torch.nn.functional as F
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    flag = next((name for name in ("bf16", "fp16") if precision.get(name)), "fp32")
    base = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[flag]
    lower = any(
        precision.get(name) not in (None, "fp32") for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    )
    derived = (
        {"use_precision_aware_optimizer": True}
        if lower and precision.get("main_params_dtype") != flag and "use_precision_aware_optimizer" not in precision
        else {}
    )
    values = (
        {"params_dtype": base, "pipeline_dtype": base, "fp8_param": precision.get("fp8_param_gather")}
        | derived
        | precision
    )
    aware = values.get("use_precision_aware_optimizer", optimizer.get("use_precision_aware_optimizer"))
    if aware:  # as our sections do, and say so: FusedAdam's own main weights exist in the distributed optimizer only
        ddp = {"use_distributed_optimizer": True} | ddp
    spelled = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.uint8}

    def fields(kind, section):
        known = kind.__dataclass_fields__
        merged = section | {name: value for name, value in values.items() if name in known and value is not None}
        merged = {
            name: spelled.get(value, value) if name.endswith("_dtype") and name != "moe_router_dtype" else value
            for name, value in merged.items()
            if name in known
        }
        if kind is OptimizerConfig and not precision.get("fp8") and "fp8_recipe" in merged:
            del merged["fp8_recipe"]
        return {name: getattr(F, value) if name == "activation_func" else value for name, value in merged.items()}

    try:
        TransformerConfig(**fields(TransformerConfig, model | parallel))
        OptimizerConfig(
            **fields(OptimizerConfig, optimizer | {n: v for n, v in ddp.items() if n == "use_distributed_optimizer"})
        )
        DistributedDataParallelConfig(**fields(DistributedDataParallelConfig, ddp))
    except (ValueError, AssertionError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.filterwarnings("ignore")
def test_rules_and_megatron_core_agree(engine_there):
    from mpbridge.backend.megatron.targets import build

    rng = random.Random(20260911)
    seen: Counter[str] = Counter()
    escaped, unnamed, unbuilt = [], [], []
    for _ in range(SAMPLES):
        sample = draw(rng)
        errors, run = ours(*sample)
        verdict = theirs(*sample)
        if verdict is not None:
            seen["rejected upstream"] += 1
            # a value that the plan takes back, and says so, is no longer megatron-core's to reject: the build below shows it
            said = errors | ({f"plan:{write.field}" for write in run.plan.conflicts} if run is not None else set())
            named = next((rules for words, rules in NAMED.items() if words in verdict), None)
            if named is not None:
                named = named | {
                    f"plan:{word}" for word in re.findall(r"[a-z][a-z0-9_]{5,}", verdict.replace("-", "_"))
                }
            seen[verdict[:60]] += 1
            if not said:
                escaped.append((verdict, sample))
            elif named is None or not (named & said or "resolve" in said):
                unnamed.append((verdict, sorted(said), sample))
        if run is not None and not errors:
            seen["passed"] += 1
            try:
                build(run.inputs, run.plan, machine=machine("b200"), versions=NOW)
            except (MpbridgeError, ValueError, AssertionError, TypeError, RuntimeError) as error:
                unbuilt.append((str(error), sample))
    assert not escaped, f"{len(escaped)} rejected by megatron-core only, such as {escaped[0]}"
    assert not unnamed, f"{len(unnamed)} rejected for another reason than megatron-core's, such as {unnamed[0]}"
    assert not unbuilt, f"{len(unbuilt)} pass the rules and do not build, such as {unbuilt[0]}"
    # the sample must reach both sides, or the agreement means nothing
    assert seen["passed"] > SAMPLES // 10, seen
    assert seen["rejected upstream"] > SAMPLES // 10, seen
    reached = {words for words in NAMED if any(words[:30] in text for text in seen)}
    assert len(reached) >= 12, sorted(set(NAMED) - reached)


def test_the_neighbours_accepted_nonsense_is_refused_here():
    for fields in (
        {"fp16": True, "bf16": True},
        {"bf16": True, "params_dtype": "fp16"},
        {"bf16": True, "fp8": "e5m2"},
        {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwize"},
    ):
        container = ConfigContainer(
            mixed_precision=MixedPrecisionConfig(**fields),
            model={"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 32},
        )
        with pytest.raises(Contradiction):
            container.resolved(training=False)
