"""The model builder on a CPU: attention, norms, experts, latent attention, logits in FP32, parameters kept in FP32, what a CPU refuses."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mpbridge.backend.engines.mcore import McoreEngine
from mpbridge.backend.engines.registry import build_engine, engine_class
from mpbridge.backend.megatron.inside_model import made_of
from mpbridge.backend.models.gpt import fp32_modules
from mpbridge.common.errors import BadValue, Refused, UpstreamRefused
from mpbridge.common.machines import machine
from mpbridge.common.traits import engine_names
from mpbridge.planning.capability import ASSUMED
from tests.backend.engines import tiny

LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16, "rope_type": "rope",
}  # fmt: skip


@pytest.fixture
def build(engines: Any) -> Any:
    return engines


def losses(engine: McoreEngine, steps: int = 4) -> list[float]:
    """Of a few steps, after which the engine is closed: there is one at a time in a process."""
    found = tiny.losses(engine, steps)
    engine.close()
    return found


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_blocked_attention_is_attention(length: int, dtype: torch.dtype, tolerance: float) -> None:
    from mpbridge.backend.devices.fused import BlockedAttention

    torch.manual_seed(0)
    tensors = [torch.randn(length, 2, 3, width, dtype=dtype) for width in (16, 16, 8)]
    weight = torch.randn(length, 2, 24)
    results = []
    for ours in (True, False):
        q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
        if ours:
            out = BlockedAttention.apply(q, k, v, 0.25)  # type: ignore[no-untyped-call]
        else:
            a, b, c = (tensor.permute(1, 2, 0, 3).float() for tensor in (q, k, v))
            out = F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=0.25)
            out = out.permute(2, 0, 1, 3).reshape(length, 2, 24)
        (out.float() * weight).sum().backward()
        results.append([out.float(), *(tensor.grad.float() for tensor in (q, k, v) if tensor.grad is not None)])
    for mine, other in zip(*results, strict=True):
        # relative to the largest: FP32 sums in another order, BF16 rounds scores, probabilities and gradients once each
        assert (mine - other).abs().max() <= tolerance * other.abs().max().clamp(min=1.0)


LAYERS = [
    {"num_query_groups": 2},
    {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu"},
    {"qk_layernorm": True, "add_bias_linear": True},
    {"position_embedding_type": "learned_absolute"},
    {"attention_softmax_in_fp32": False},
    {"recompute_granularity": "selective"},
    {"fp32_residual_connection": True},
    {"fp32_residual_connection": True, "normalization": "RMSNorm"},
    {"mtp_num_layers": 1},
    {"window_size": [8, 0]},
    {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2, "moe_layer_freq": 2, "moe_ffn_hidden_size": 64},
    LATENT,
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "kind"),
    [pytest.param(model, ("bf16", "fp16_static")[i % 2], id="+".join(model)[:40]) for i, model in enumerate(LAYERS)],
)
def test_every_kind_of_layer_trains(build: Any, model: dict[str, Any], kind: str) -> None:
    recipe = {"recipe": "fp16_mixed", "loss_scale": 128.0} if kind == "fp16_static" else kind
    found = losses(build(recipe, model=model), 6)
    assert found[-1] < found[0] - 0.3


def test_a_model_is_built_of_the_operations_in_one_pass(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback that is always taken would cost a twentieth of a step, and nothing else would see it."""
    from mpbridge.backend.devices import fused

    seen: set[type] = set()
    kinds = {fused.BlockedAttention, fused.RootMeanSquare, fused.SwiGLU, fused.Rotary}
    for kind in kinds:
        real = kind.apply
        monkeypatch.setattr(kind, "apply", lambda *args, kind=kind, real=real: (seen.add(kind), real(*args))[1])
    model = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu"}
    losses(build("bf16", model=model), 1)
    assert seen == kinds


def test_our_attention_and_megatron_cores_train_alike(build: Any) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from mpbridge.backend.models.local_spec import CpuSpecProvider

    class Cores(CpuSpecProvider):
        def core_attention(self) -> type:
            return DotProductAttention

    theirs = McoreEngine.build(tiny.run("fp32"), backend=Cores)
    assert losses(theirs) == pytest.approx(losses(build("fp32")), rel=1e-6)


def test_a_backend_replaces_every_linear_of_every_layer(layer: None) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from mpbridge.backend.models.local_spec import CpuSpecProvider

    class Column(ColumnParallelLinear):
        pass

    class Row(RowParallelLinear):
        pass

    other = partial(CpuSpecProvider, linears=(Column, Row))
    for model in ({"num_moe_experts": 2, "moe_layer_freq": 2}, LATENT):
        engine = McoreEngine.build(tiny.run("bf16", model=model), backend=other)
        modules = engine.model[0].named_modules()
        assert {type(one) for name, one in modules if "layers." in name and "linear" in name} == {Column, Row}
        engine.close()


def test_checkpoints_name_norms_as_transformer_engines_modules_do(build: Any) -> None:
    """Those fuse the norm before a dense MLP into its first linear, and none before experts."""
    model = build("bf16", model={"num_moe_experts": 2, "moe_layer_freq": [0, 1]}).model[0].module.module
    keys = {getattr(one, "key", "") for one in model.sharded_state_dict().values()}
    found = {key.removeprefix("decoder.layers.") for key in keys if "norm" in key and key.endswith("weight")}
    attention = "self_attention.linear_qkv.layer_norm_weight"
    dense = {f"0.{attention}", "0.mlp.linear_fc1.layer_norm_weight"}
    experts = {f"1.{attention}", "1.pre_mlp_layernorm.weight"}
    assert found == dense | experts | {"decoder.final_layernorm.weight"}


def test_megatron_cores_own_specifications_are_as_they_were_after_a_build_and_after_a_failure(build: Any) -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    before = dict(vars(gpt_layer_specs))
    build("bf16", model={"mtp_num_layers": 1})
    assert vars(gpt_layer_specs) == before
    with pytest.raises(AttributeError, match="layer_norm"), made_of(object()):
        gpt_layer_specs.get_gpt_layer_local_spec()
    assert vars(gpt_layer_specs) == before


def test_logits_come_in_the_dtype_that_the_policy_says(build: Any) -> None:
    found: dict[str, set[torch.dtype]] = {}
    for name, recipe in (("own", "bf16"), ("fp32", {"recipe": "bf16_mixed", "logit_dtype": "fp32"})):
        engine = build(recipe)
        seen = found.setdefault(name, set())
        model = engine.model[0].module.module
        model.output_layer.register_forward_hook(lambda module, args, output, seen=seen: seen.add(output[0].dtype))
        assert model.embedding.word_embeddings.weight.dtype is torch.bfloat16
        assert losses(engine)[-1] < 4.0
    assert found == {"own": {torch.bfloat16}, "fp32": {torch.float32}}


def test_named_parameters_stay_in_fp32_and_train(build: Any) -> None:
    engine = build(
        {"recipe": "bf16_mixed", "keep_fp32": ["*layernorm*", "*.mlp.linear_fc2.weight"]},
        ddp={"use_distributed_optimizer": True},
    )
    wide = {name: parameter.dtype is torch.float32 for name, parameter in engine.named_parameters()}
    assert wide == {name: "layernorm" in name or name.endswith("linear_fc2.weight") for name in wide}
    assert sum(wide.values()) == 12
    found = losses(engine, 6)
    assert found[-1] < found[0] - 0.3


def test_a_keep_fp32_pattern_that_matches_nothing_is_an_error(build: Any) -> None:
    with pytest.raises(Refused, match=r"keep_fp32 '\*\.nosuch' match no parameter"):
        build({"recipe": "bf16_mixed", "keep_fp32": ["*.nosuch", "*layernorm*"]})
    # the rule went by the names that this shape should have; the model's own names have the last word
    with pytest.raises(BadValue, match=r"\['\*\.nosuch'\] matches no parameter"):
        fp32_modules(build("bf16").model[0], ("*.nosuch", "*layernorm*"))


def test_a_keep_fp32_pattern_may_name_what_another_rank_holds(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bf16").model[0]
    monkeypatch.setattr("megatron.core.parallel_state.get_expert_model_parallel_world_size", lambda: 2)
    assert fp32_modules(model, ("*local_experts.3.*",)) == {}


def test_the_loss_is_the_mean_over_the_tokens_of_the_mask(build: Any) -> None:
    engine = build("fp32")
    batch = next(tiny.batches())
    half = batch["loss_mask"].clone()
    half[:, tiny.SEQ // 2 :] = 0.0
    first = engine.evaluate(itertools.repeat(batch | {"loss_mask": half}), microbatches=1)
    second = engine.evaluate(itertools.repeat(batch | {"loss_mask": 1.0 - half}), microbatches=1)
    assert (first + second) / 2 == pytest.approx(engine.evaluate(itertools.repeat(batch), microbatches=1), rel=1e-6)
    assert engine.evaluate(itertools.repeat(batch | {"loss_mask": half * 0.0}), microbatches=1) == 0.0


def test_a_failed_build_leaves_no_parallel_state(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import optimizer, parallel_state

    def fails(*args: Any, **kwargs: Any) -> None:
        assert parallel_state.model_parallel_is_initialized()
        raise RuntimeError("half built")

    monkeypatch.setattr(optimizer, "get_megatron_optimizer", fails)
    with pytest.raises(RuntimeError, match="half built"):
        build("bf16")
    assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may really run it")
@pytest.mark.parametrize("name", engine_names())
def test_a_run_resolved_for_another_machine_does_not_train_here(layer: None, name: str) -> None:
    recipe = {"recipe": "bf16_with_fp8_current_scaling_mixed"}
    run = tiny.run(recipe | dict.fromkeys(("first_last_layers_bf16", "fp8_param_gather"), False), engine=name)
    elsewhere = run.container.resolved(machine=machine("b200"), versions=ASSUMED)
    with pytest.raises(Refused, match="needs a GPU"):
        engine_class(name).build(elsewhere)


def test_what_megatron_core_refuses_while_it_builds_is_said_in_one_line(
    layer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpbridge.backend.engines.base.require_here", lambda *args: None)  # a rule says it first
    with pytest.raises(UpstreamRefused, match="divisible"):
        build_engine(tiny.run("bf16", ddp={"num_distributed_optimizer_instances": 2}))


def test_dropout_draws_anew_and_repeats_with_the_seed(build: Any) -> None:
    noisy = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
    first, second = losses(build("fp32", model=noisy)), losses(build("fp32", model=noisy))
    assert first == second
    assert first != losses(build("fp32"))


def test_an_fp32_residual_stream_stays_fp32_through_every_layer(layer: None) -> None:
    from mpbridge.backend.models.hybrid import wide_add

    add = wide_add(True, False)
    stream, branch = torch.full((4, 8), 1.0 + 2.0**-20), torch.full((4, 8), 0.5, dtype=torch.bfloat16)
    out = add((branch, None), stream, 0.0)
    assert out.dtype is torch.float32
    assert torch.equal(out, stream + 0.5)
    assert torch.equal(add((branch, torch.ones(8, dtype=torch.bfloat16)), stream, 0.0), stream + 1.5)
