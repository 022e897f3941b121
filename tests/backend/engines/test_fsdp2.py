"""FSDP2 in one process: what is kept in FP32, what is refused, pipeline and output dtypes, RoPE, and who owns the main weights."""

from functools import partial
from typing import Any

import pytest
import torch

from mpbridge.backend.engines.fsdp2 import Fsdp2Engine
from mpbridge.common.errors import BadValue, Refused
from mpbridge.numerics.observation.tensors import size
from tests.backend.engines import tiny, two_ranks


@pytest.fixture
def build(engines: Any) -> Any:
    return partial(engines, engine="fsdp2")


def roles(engine: Any) -> dict[str, str]:
    return {live.role: str(live.tensor.dtype).removeprefix("torch.") for live in engine.tensors()}


def bytes_a_parameter(engine: Any) -> float:
    total = sum(size(live.tensor) for live in engine.tensors() if live.role != "buffers")
    return total / sum(parameter.numel() for _, parameter in engine.named_parameters())


def test_a3_pattern_a_trains_exactly_what_fp32_masters_train(build: Any) -> None:
    losses = {}
    for remainders in (True, False):
        engine = build({"recipe": "bf16_params_fp32_states", "store_param_remainders": remainders})
        losses[remainders] = tiny.losses(engine, 5)
        engine.close()
    # ties round away from zero with remainders and to even without, so equal but for ties
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_a7_fused_adam_on_fp32_parameters_keeps_no_second_copy(build: Any) -> None:
    engine = build({"recipe": "fp32_params_bf16_compute", "use_precision_aware_optimizer": True})
    engine.train_step(tiny.batches(), microbatches=2)
    assert [part.master_weights for part in engine.optimizer.parts] == [False]
    assert "main_params" not in roles(engine)
    assert bytes_a_parameter(engine) == pytest.approx(16)


def test_a12_kept_parameters_are_fp32_in_storage_and_compute(build: Any) -> None:
    engine = build({"recipe": "bf16_params_fp32_states", "keep_fp32": ["*layernorm*"]})
    norm = engine.model[0].decoder.layers[0].input_layernorm
    seen: dict[str, torch.dtype] = {}
    norm.register_forward_pre_hook(lambda module, inputs: seen.update(weight=module.weight.dtype))
    norm.register_forward_hook(lambda module, inputs, output: seen.update(input=inputs[0].dtype, output=output.dtype))
    engine.train_step(tiny.batches(), microbatches=2)
    assert seen["weight"] is torch.float32
    assert seen["input"] is torch.float32
    names = {name: parameter.dtype for name, parameter in engine.named_parameters()}
    assert {dtype for name, dtype in names.items() if "layernorm" in name} == {torch.float32}
    assert {dtype for name, dtype in names.items() if "layernorm" not in name} == {torch.bfloat16}
    # two FusedAdams, so that the FP32 parameters have no second copy
    assert sorted(part.master_weights for part in engine.optimizer.parts) == [False, True]


def test_a12_a_router_can_be_kept(build: Any) -> None:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
    engine = build({"recipe": "bf16_params_fp32_states", "keep_fp32": ["*router.weight"]}, model=experts)
    kept = [parameter for name, parameter in engine.named_parameters() if name.endswith("router.weight")]
    before = [weight.full_tensor().clone() for weight in kept]
    assert engine.train_step(tiny.batches(), microbatches=2).applied
    assert [weight.dtype for weight in kept] == [torch.float32] * 2
    assert not any(torch.equal(weight.full_tensor(), old) for weight, old in zip(kept, before, strict=True))


def test_a12_half_a_module_cannot_be_kept(build: Any) -> None:
    with pytest.raises(BadValue, match="name both or neither"):
        build({"recipe": "bf16_params_fp32_states", "keep_fp32": ["*input_layernorm.weight"]})


def test_t4_rotary_angles_reach_the_layers_in_fp32_and_the_loss_is_fp32(build: Any) -> None:
    engine = build("full_bf16")
    angles: list[torch.Tensor] = []
    layer = engine.model[0].decoder.layers[0]
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: angles.append(kwargs["rotary_pos_emb"]), with_kwargs=True
    )
    losses: list[torch.Tensor] = []
    engine.model[0].register_forward_hook(lambda module, args, output: losses.append(output))
    engine.train_step(tiny.batches(), microbatches=1)
    assert angles[0].dtype is torch.float32
    frequency = 1.0 / (10000 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16))
    wanted = torch.outer(torch.arange(tiny.SEQ, dtype=torch.float32), frequency)
    assert torch.equal(torch.cos(angles[0].squeeze()[:, :8]), torch.cos(wanted)), "not one angle rounded"
    assert losses[0].dtype is torch.float32


def test_refusals_come_all_at_once() -> None:
    sections = {"parallel": {"tensor_model_parallel_size": 2}, "ddp": {"use_distributed_optimizer": True}}
    run = tiny.run("bf16", world=2, engine="fsdp2", **sections)
    with pytest.raises(Refused) as caught:
        Fsdp2Engine.build(run)
    assert "tensor 2 parallelism" in str(caught.value)
    assert "use_distributed_optimizer" in str(caught.value)
    assert caught.value.exit_code == 1


def test_further_tokens_are_predicted_as_on_megatron_core(engines: Any) -> None:
    losses = []
    for name in ("mcore", "fsdp2"):
        engine = engines("fp32", engine=name, model={"mtp_num_layers": 1})
        losses.append(tiny.losses(engine, 2))
        assert any(name.startswith("mtp.") for name, _ in engine.named_parameters())
        engine.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


FLIPS = {  # setting -> what alone it changes of a run with FP32 storage under BF16 compute
    "storage": ({"params_dtype": "bf16", "main_params_dtype": "fp32"}, {"storage": "bfloat16", "grad": "bfloat16"}),
    "compute": (
        {"bf16": False, "fp32": True, "pipeline_dtype": "fp32"},
        {"weight": "float32", "between": "float32", "inside": "float32"},
    ),
    "reduction": ({"grad_reduce_in_fp32": False}, {}),
    "output": ({"output_dtype": "fp32"}, {"between": "float32"}),
}


def _facts(engine: Any) -> dict[str, str]:
    """dtypes of one step: a weight as stored and as used, what a linear and its layer hand on, the gradient and the moment of the shard."""
    seen: dict[str, Any] = {}
    layer, name = engine.model[0].decoder.layers[0], "decoder.layers.0.mlp.linear_fc1.weight"
    layer.mlp.linear_fc1.register_forward_hook(
        lambda module, inputs, output: seen.update(weight=module.weight.dtype, inside=output[0].dtype)
    )
    engine.model[0].decoder.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(between=kwargs["hidden_states"].dtype), with_kwargs=True
    )
    engine.train_step(tiny.batches(), microbatches=1)
    seen |= {live.role: live.tensor.dtype for live in engine.tensors() if live.parameter == name}
    renamed = {"params": "storage", "grads": "grad", "exp_avg": "moment"}
    return {
        renamed.get(key, key): str(value).removeprefix("torch.")
        for key, value in seen.items()
        if key in {*renamed, "weight", "inside", "between"}
    }


@pytest.mark.parametrize("setting", FLIPS)
def test_g1_each_setting_changes_what_the_guide_says_and_nothing_else(build: Any, setting: str) -> None:
    changes, wanted = FLIPS[setting]
    usual = dict.fromkeys(("storage", "grad", "moment"), "float32")
    usual |= dict.fromkeys(("weight", "inside", "between"), "bfloat16")
    assert _facts(build({"recipe": "fp32_params_bf16_compute"} | changes)) == usual | wanted


def test_sgd_has_no_main_copy_and_no_second_moment(build: Any) -> None:
    engine = build("fp32", optimizer={"optimizer": "sgd", "sgd_momentum": 0.9})
    losses = tiny.losses(engine, 3)
    assert set(roles(engine)) == {"params", "grads", "exp_avg"}
    assert losses[-1] < losses[0]


def test_muon_is_torchs_on_each_hidden_matrix_and_adam_beside_it(build: Any) -> None:
    engine = build("fp32_params_bf16_compute", optimizer=two_ranks.MUON)
    apart, matrices = two_ranks.muon_apart(engine, tiny.batches())
    assert apart < 1e-5
    states = {
        kind: {one.parameter for one in engine.tensors() if one.role == kind} for kind in ("exp_avg", "exp_avg_sq")
    }
    names = {name for name, _ in engine.named_parameters()}
    assert (states["exp_avg"], len(names - states["exp_avg_sq"])) == (names, matrices)
    assert not any(name.startswith("embedding.") or "norm" in name for name in names - states["exp_avg_sq"])


def test_fp16_scales_its_loss_and_recovers_from_overflow(build: Any) -> None:
    engine, batches = build("fp16"), tiny.batches()
    results = [engine.train_step(batches, microbatches=1) for _ in range(30)]
    assert results[0].loss_scale == 2.0**32
    assert not results[0].applied
    assert results[-1].applied
    assert results[-1].loss < results[0].loss


def test_micro_batches_accumulate_in_the_reduction_dtype(build: Any) -> None:
    gradients = {}
    for recipe in ("fp32", "bf16_params_fp32_states"):
        engine = build(recipe, optimizer={"clip_grad": 0.0})
        engine.train_step(tiny.batches(), microbatches=8)
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        gradients[recipe] = engine.optimizer.shards[name].grad.float().clone()
        engine.close()
    error = (gradients["bf16_params_fp32_states"] - gradients["fp32"]).norm() / gradients["fp32"].norm()
    # BF16 arithmetic costs about one part in 200 once; eight roundings of a BF16 sum would cost several times that
    assert error < 0.01
