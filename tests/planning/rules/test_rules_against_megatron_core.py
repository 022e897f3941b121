"""What `check` passes megatron-core's own config classes accept, and what those reject a rule about the same thing has rejected first:
random recipes and settings out of its schema, judged by the real classes."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mpbridge.backend.megatron.targets import build
from mpbridge.common.errors import MpbridgeError, Refused, UpstreamRefused
from mpbridge.common.facts import ModelShape, RunFacts
from mpbridge.common.machines import machine
from mpbridge.common.probe import installed
from mpbridge.planning.rules.table import broken
from mpbridge.precision.registry import recipes
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.schema import Setting, settings
from mpbridge.settings.sections import LIMITS, LORA
from tests.planning.rules.test_rules import case, ids

NOW = replace(installed(), transformer_engine="2.11.0", torchao=None, cuda="12.9", cublaslt="12.9.1", python=None)
_DENSE = {
    "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 512, "max_sequence_length": 256,
}  # fmt: skip
_EXPERTS = {
    "num_moe_experts": 8, "moe_ffn_hidden_size": 128, "add_bias_linear": False, "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
_LATENT = {"multi_latent_attention": True, "q_lora_rank": 64, "kv_lora_rank": 64}
MODELS = (
    _DENSE, _DENSE | {"gated_linear_unit": True, "activation_func": "silu"}, _DENSE | _EXPERTS, _DENSE | _EXPERTS | _LATENT,
    _DENSE | _LATENT,
)  # fmt: skip
SIZES = ({}, {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2},
         {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}, {"expert_model_parallel_size": 2},
         {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True})  # fmt: skip
SHAPE = ModelShape(
    num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=64, seq_length=32,
)  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 3, 4, 8, 64)
WORDS = {
    "model.recompute_modules": ["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "nothing"],
    "model.offload_modules": ["core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear", "nothing"],
    "model.cuda_graph_scope": ["full", "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "attn,mlp", "nothing"],
    "model.cp_comm_type": ["p2p", "a2a"],
}  # fmt: skip
TOGETHER = (
    "moe_", "recompute", "cuda_graph", "overlap_", "num_layers_in", "account_for", "rotary", "offload", "pipeline", "moe_router", "defer",
)  # fmt: skip
"""Settings whose refusals are about each other: drawn several at a time."""
GRAPH = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router", "moe_preprocess"]}
WITH_PRECISION = (
    {"moe_router_padding_for_quantization": True}, {"moe_router_padding_for_quantization": True, "moe_token_dispatcher_type": "allgather"},
    {"moe_router_padding_for_fp8": True, **GRAPH}, {"overlap_moe_expert_parallel_comm": True},
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, {"activation_func_fp8_input_store": True},
)  # fmt: skip
"""Settings of the model whose refusals depend on the recipe."""
PRECISION = {
    "fp8": ("e4m3", "hybrid"), "fp4": ("e2m1",), "fp8_recipe": ("tensorwise", "delayed", "blockwise", "mxfp8"), "fp8_param_gather": (True, False),
    "first_last_layers_bf16": (True,), "num_layers_at_start_in_bf16": (0, 1, 3, 5), "num_layers_at_end_in_bf16": (0, 1, 3, 5),
    "grad_reduce_in_fp32": (True, False), "reuse_grad_buf_for_mxfp8_param_ag": (True,), "use_precision_aware_optimizer": (True, False),
    "exp_avg_dtype": ("bf16", "fp16", "fp8", "fp32"), "exp_avg_sq_dtype": ("bf16", "fp16", "fp32"), "main_grads_dtype": ("bf16", "fp32"),
    "main_params_dtype": ("fp16", "fp32"), "loss_scale": (1.0, 4096.0), "fp32_residual_connection": (True,), "autocast_enabled": (True,),
    "moe_router_dtype": ("fp32", "fp64"), "fp8_margin": (0, 1), "fp8_amax_history_len": (1, 16), "fp8_dot_product_attention": (True,),
}  # fmt: skip
NAMED = {
    "Delayed scaling does not support first / last": {"edge-layers-with-delayed-scaling"},
    "between 0 and number of layers per pipeline stage": {"edge-layers-beyond-a-stage", "edge-layers-leave-nothing"},
    "Delayed scaling does not support moe_act and layernorm": {"delayed-scaling-with-selective-recompute"},
    "supported only for SwiGLU": {"activation-store-needs-swiglu"},
    "does not support moe_router_padding_for_quantization": {"router-padding-dispatcher"},
    "only supported with adam": {"precision-aware-needs-adam", "optimizer-that-the-engine-does-not-build"},
    "only supported with distributed optimizer": {"precision-aware-needs-distributed-optimizer"},
    "can only be fp32 when not using precision-aware": {"states-need-precision-aware", "optimizer-section-states-need-precision-aware", "fp16-parameters-alone",
                                                        "fp4-weights-stored"},  # there the policy is precision-aware by itself
    "moe_preprocess cuda graph is not supported": {"router-padding-in-a-graph", "graph-scope"},
    "only supported with bf16 or fp16 model": {"expert-overlap-needs-16-bits"},
}  # fmt: skip
"""Words of megatron-core's refusals that are about precision -> the rules of ours of which one must have said it."""


def value(rng: random.Random, section: str, name: str, setting: Setting) -> Any:
    """A legal value of the schema: every kind that the field may have."""
    words = WORDS.get(f"{section}.{name}")
    kind = rng.choice([kind for kind in setting.types if kind not in ("object", "list", "null")] or ["null"])
    if kind.startswith("list["):
        item = kind.removeprefix("list[").removesuffix("]")
        count = rng.choice((0, 1, 2, 8))
        return [_plain(rng, item, setting, words) for _ in range(count)]
    return _plain(rng, kind, setting, words)


def _plain(rng: random.Random, kind: str, setting: Setting, words: list[str] | None) -> Any:
    if kind == "bool":
        return rng.random() < 0.7
    if kind == "int":
        return rng.choice(NUMBERS)
    if kind == "float":
        return rng.choice((-1.0, 0.0, 0.1, 1.0, 2.0))
    if kind == "choice":
        return rng.choice(setting.choices)
    if kind == "activation":
        return rng.choice(("gelu", "silu", "relu", "squared_relu", "quick_gelu"))
    return {"dtype": "bf16", "null": None}.get(kind) or rng.choice(words or ["nothing"])


def drawn(rng: random.Random) -> dict[str, Any]:
    """One random configuration: a model, parallel sizes, a recipe, and up to six further settings, or several of the recipe's fields."""
    recipe = rng.choice(("bf16_mixed", "bf16_mixed", "fp16_mixed", "fp32", rng.choice(list(recipes))))
    precision = rng.random() < 0.6
    fields = rng.sample(list(PRECISION), rng.randint(0, 4)) if precision else ()
    tree: dict[str, Any] = {
        "mixed_precision": {"recipe": recipe} | {name: rng.choice(PRECISION[name]) for name in fields},
        "model": dict(rng.choice(MODELS)) | {"masked_softmax_fusion": False},
        "parallel": dict(rng.choice(SIZES)),
        "optimizer": {"lr": 1e-3},
        "ddp": rng.choice(({}, {"use_distributed_optimizer": True}, {"use_distributed_optimizer": False})),
        "train": {"train_iters": 1, "global_batch_size": 8, "micro_batch_size": 1},
    }
    if precision:
        tree["model"] |= rng.choice(WITH_PRECISION) if rng.random() < 0.4 else {}
        states = ({"optimizer": "sgd"}, {"main_grads_dtype": "bf16"}, {"exp_avg_dtype": "bf16"})
        tree["optimizer"] |= rng.choice(states) if rng.random() < 0.3 else {}
        return tree
    latent = "q_lora_rank" in tree["model"]
    sections = {section: settings(section, latent=latent) for section in ("model", "optimizer", "ddp")}
    for _ in range(rng.randint(1, 3)):
        section = rng.choice(("model", "model", "model", "model", "optimizer", "ddp"))
        known = sorted(sections[section].keys() - {"num_layers", "lr", *LORA})
        first = rng.choice(known)
        group = next((stem for stem in TOGETHER if first.startswith(stem)), None)
        family = [name for name in known if group and name.startswith(group)]
        names = [first, *(rng.sample(family, min(2, len(family))) if rng.random() < 0.7 else ())]
        for name in names:
            picked = value(rng, section, name, sections[section][name])
            limit = LIMITS.get(f"{section}.{name}")
            if limit is None or not isinstance(picked, (int, float)) or limit.holds(picked):
                tree[section][name] = picked
    return tree


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """megatron-core asks for Transformer Engine's version and for its fused kernels; both are there on the machine that is meant."""
    import megatron.core.models.common.embeddings.rope_utils as rope
    import megatron.core.optimizer.optimizer_config as optimizer
    import megatron.core.transformer.moe.moe_utils as moe
    import megatron.core.transformer.transformer_config as model

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.optimizers import CpuFusedAdam

    for module in (model, optimizer):
        monkeypatch.setattr(module, "is_te_min_version", lambda *args, **kwargs: True)
    monkeypatch.setattr(rope, "fused_apply_rotary_pos_emb", print)
    sort = "sort_chunks_by_index"
    for name in ("permute", "permute_with_probs", "unpermute", sort, f"{sort}_with_probs"):
        monkeypatch.setattr(moe, f"fused_{name}", print, raising=False)
    with device_layer(False, fused_adam=CpuFusedAdam), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def judged(numbers: range, seed: int) -> tuple[Counter[str], list[str], list[str]]:
    """(How many configurations passed `check`, and how often megatron-core refused in each of the NAMED words; what it refused without any
    rule; what it refused in NAMED words while no rule of that row was broken)."""
    seen: Counter[str] = Counter()
    refused, misnamed = [], []
    for number in numbers:
        tree = drawn(random.Random(f"{seed}/{number}"))
        try:
            box = ConfigContainer(**tree)
            run = box.resolved(box.smallest_world(), machine=machine("gb200"), versions=NOW)
        except MpbridgeError:
            continue
        errors = {violation.rule for violation in broken(run.policy, run.facts) if violation.severity == "error"}
        seen["passed"] += not errors
        inputs = dict(run.inputs)
        if run.engine != "mcore":
            # these engines say so to megatron-core, which accepts state dtypes only beside its distributed optimizer
            inputs["optimizer"] = inputs["optimizer"] | {"use_distributed_optimizer": bool(run.policy.precision_aware)}
        try:
            build(inputs, run.plan, machine=machine("gb200"), versions=NOW)
        except UpstreamRefused as error:
            named = next((words for words in NAMED if words in str(error)), None)
            seen[str(named)] += 1
            if not errors:
                refused.append(f"{seed}/{number}: {error} {tree}")
            elif named is not None and not NAMED[named] & errors:
                misnamed.append(f"{seed}/{number}: {error} {errors} {tree}")
        except Refused:
            assert errors, f"{seed}/{number}: {tree}"
    return seen, refused, misnamed


@pytest.mark.usefixtures("library")
def test_what_the_rules_pass_the_config_classes_accept_and_what_those_reject_a_rule_names() -> None:
    seen, refused, misnamed = judged(range(2000), 11)
    assert refused == []
    assert misnamed == []
    assert seen["passed"] > 300
    # which ones the draws meet depends on the release's settings
    assert len(NAMED.keys() & seen) >= 6, NAMED.keys() - seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("library")
def test_what_the_rules_pass_the_config_classes_accept_many_times() -> None:
    seen, refused, misnamed = judged(range(20_000), 20260911)
    assert refused == []
    assert misnamed == []
    assert seen["passed"] > 4_000


@pytest.mark.parametrize("settings", [
    {}, {"cuda_graph_scope": "attn"}, {"enable_cuda_graph": True}, {"external_cuda_graph": True}, {"external_cuda_graph": True, "cuda_graph_scope": []},
    {"cuda_graph_impl": "local", "cuda_graph_scope": None}, {"cuda_graph_impl": "local", "cuda_graph_scope": "full"},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, {"cuda_graph_scope": "full_iteration"}, {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,mlp"},
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["mlp", "attn"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"], "num_moe_experts": 2}, {"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_preprocess"], "num_moe_experts": 2},
], ids=str)  # fmt: skip
def test_cuda_graphs_are_read_as_megatron_core_reads_them(settings):
    from megatron.core.transformer.transformer_config import TransformerConfig

    with warnings.catch_warnings(action="ignore"):  # the deprecated switches
        theirs = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **settings)
    ours = RunFacts(shape=SHAPE, model=settings, versions=NOW).cuda_graphs
    parts = theirs.cuda_graph_scope if theirs.cuda_graph_scope is not None else theirs.cuda_graph_modules  # since 0.18
    names = [part.name for part in parts] or [theirs.cuda_graph_impl] * (theirs.cuda_graph_impl == "full_iteration")
    assert (ours.implementation, list(ours.parts)) == (theirs.cuda_graph_impl, names)
    whole = not names or "attn" in names
    assert ours.inside_layers("attn") is (theirs.cuda_graph_impl != "none" and whole)


@pytest.mark.parametrize("settings", [
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration", "attn"]}, {"cuda_graph_impl": "full_iteration", "cuda_graph_scope": ["attn"]},
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["full_iteration"]},
], ids=str)  # fmt: skip
def test_a_graph_of_the_whole_step_is_refused_where_megatron_core_refuses_it(settings):
    """By its release: 0.16.1 takes the first."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    ours = {"graph-scope", "graph-scope-words"} & ids(broken(*case(model=settings, versions=NOW)))
    try:
        with warnings.catch_warnings(action="ignore"):
            TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **settings)
    except (AssertionError, TypeError):
        assert ours
    else:
        assert not ours
