"""Hybrids on a CPU: megatron-core's MambaModel (since 0.18 HybridModel) from a pattern, its parameters and their dtypes, and what is refused."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpbridge.backend.devices.mamba import mamba_on_cpu
from mpbridge.backend.megatron.emulated_linears import places
from mpbridge.common.errors import Contradiction, Refused
from mpbridge.planning.memory.layers import model_names, parameters
from mpbridge.planning.memory.ranks import Coordinates
from tests.backend.engines import tiny

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "nemotron_h_tiny.yaml"
HYBRID: dict[str, Any] = {
    "num_layers": 5, "hybrid_override_pattern": "M-M*E", "normalization": "RMSNorm", "num_query_groups": 2, "position_embedding_type": "rope",
    "mamba_num_heads": 16, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 12, "num_moe_experts": 4, "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32, "share_embeddings_and_output_weights": False,
}  # fmt: skip


@pytest.fixture
def build(engines: Any) -> Any:
    return lambda kind="bf16", **model: engines(kind, model=HYBRID | model)


def test_a_pattern_is_megatron_cores_own_model_and_trains(build: Any) -> None:
    engine = build()
    model = engine.model[0].module.module
    assert (type(model).__name__ in ("MambaModel", "HybridModel"), type(model).__module__.partition(".")[0]) == (True, "megatron")  # fmt: skip
    assert [type(one).__name__ for one in model.decoder.layers] == ["MambaLayer", "MLPLayer", "MambaLayer", "TransformerLayer", "TransformerLayer"]  # fmt: skip
    losses = tiny.losses(engine, 12)
    assert losses[-1] < losses[0] - 0.3


def test_buckets_find_a_parameter_behind_one_of_16_elements_where_its_gradient_is(engines: Any) -> None:
    """megatron-core's own views of the buffer are the judge; it copies gathered MXFP8 weights back by the buckets' places."""
    chunk = engines(model=HYBRID, ddp={"use_distributed_optimizer": True}).model[0]
    buckets = [bucket for buffer in chunk.buffers + chunk.expert_parallel_buffers for bucket in buffer.buckets]
    found = [
        (one.param_to_index[p], p.main_grad.storage_offset() - one.offset, p) for one in buckets for p in one.params
    ]
    assert any(parameter.numel() == 16 for *_, parameter in found)
    assert [place for place, *_ in found] == [(first, first + parameter.numel()) for _, first, parameter in found]


EMULATED = ("bf16_with_fp8_delayed_scaling_mixed", "bf16_with_mxfp8_mixed")
OTHERS = (
    "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_subchannel_scaling_mixed", "bf16_with_nvfp4_mixed", "nemotron_h_bf16_with_fp8_current_scaling_mixed",
    "nanov2_bf16_with_fp8_current_scaling_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed", "fp16_mixed",
)  # fmt: skip


SMALL: dict[str, dict[str, Any]] = {
    "nemotron_3_super_bf16_with_nvfp4_mixed": {"num_layers_at_end_in_bf16": 1},
    "fp16_mixed": {"initial_loss_scale": 1024.0},
}
"""What a model of seven layers, or a run of eight steps, needs otherwise: 14 layers at the end in BF16, a scale that the first twenty steps halve."""


@pytest.mark.parametrize("recipe", [*EMULATED, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_low_precision_is_emulated_in_every_linear_that_the_recipe_names(engines: Any, recipe: str) -> None:
    pattern = "M-M*EM-" if "nemotron" in recipe or "nano" in recipe else "M*-E"
    model = HYBRID | {"num_layers": len(pattern), "hybrid_override_pattern": pattern, "mamba_state_dim": 28}
    engine = engines({"recipe": recipe} | SMALL.get(recipe, {}), model=model, emulate=True)
    losses = tiny.losses(engine, 8)
    assert losses[-1] < losses[0] - 0.1
    if recipe in EMULATED:
        quantized = {name for linear, name, *_ in places(engine.model[0]) if linear.quant is not None}
        linears = ("0.mixer.in_proj", "0.mixer.out_proj", "1.self_attention.linear_qkv", "2.mlp.linear_fc2")
        assert {f"decoder.layers.{name}" for name in linears} <= quantized


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_that_stops_goes_on_to_the_bit(tmp_path: Any, sharded: bool) -> None:
    """Main weights of the projection and of the convolution too, which megatron-core stores in parts."""
    from mpbridge import ConfigContainer, pretrain
    from mpbridge.training.base import Hook

    class Steps(Hook):
        def __init__(self) -> None:
            self.seen: list[tuple[float, float]] = []

        def stepped(self, training: Any, result: Any) -> None:
            self.seen.append((result.loss, result.grad_norm))

    small = (
        "model.hybrid_override_pattern=M", "model.num_layers=1", "model.hidden_size=32", "model.mamba_num_heads=8", "model.kv_channels=8",
        "model.max_sequence_length=32", "data.seq_length=32", "train.train_iters=4", "train.global_batch_size=2", "train.eval_interval=null",
        "scheduler.lr_warmup_iters=0", f"ddp.use_distributed_optimizer={str(sharded).lower()}",
    )  # fmt: skip

    def run(folder: str, *more: str) -> list[tuple[float, float]]:
        saved = [f"checkpoint.{way}={tmp_path / folder}" for way in ("save", "load")]
        steps = Steps()
        pretrain(ConfigContainer.load(CONFIG, [*small, *saved, *more]).resolved(), hooks=[steps], quiet=True)
        return steps.seen

    whole = run("whole")
    assert [step for _ in range(2) for step in run("parts", "train.exit_interval=2")] == whole
    assert len(whole) == 4


def test_its_parameters_are_the_planned_ones_in_order(build: Any) -> None:
    engine = build()
    at = Coordinates(tensor=0, stage=0, expert=0, data=0, expert_data=0)
    planned = [(p.name, p.weight.shape) for chunk in parameters(engine.run.facts, at) for p in chunk]
    assert [(name, tuple(one.shape)) for name, one in engine.named_parameters()] == planned
    assert model_names(engine.run.facts) == tuple(name for name, _ in planned)


@pytest.mark.parametrize(
    ("core", "ahead"), [("0.16.1", "transformer_layer"), ("0.18.2", "mtp_model_layer"), ("0.19.2", "mtp_model_layer")]
)
def test_names_are_those_of_the_megatron_core_that_is_asked_about(core: str, ahead: str) -> None:
    """Read from the releases' mamba_mixer.py and multi_token_prediction.py; with one of them installed the test above asks its model."""

    def named(**model: Any) -> tuple[str, ...]:
        facts = tiny.run(model=model).facts
        return model_names(replace(facts, versions=replace(facts.versions, megatron_core=core)))

    module, own = ["dt_bias", "A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias"], ["conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D", "in_proj.weight"]  # fmt: skip
    mixer = [name.partition(".mixer.")[2] for name in named(**HYBRID) if name.startswith("decoder.layers.0.mixer.")]
    assert mixer[:6] == (own if core == "0.19.2" else module)
    assert f"mtp.layers.0.{ahead}.mlp.linear_fc1.weight" in named(mtp_num_layers=1)


@pytest.mark.parametrize("kept", [False, True])
def test_decays_lose_their_fp32_unless_they_are_kept(build: Any, kept: bool) -> None:
    """megatron-core makes A_log in FP32 and casts it with the rest of the model; keep_fp32 keeps the values that it was made with, and the projections in BF16."""
    engine = build({"recipe": "bf16_mixed", **({"keep_fp32": ["*.A_log"]} if kept else {})})
    found = dict(engine.named_parameters())["decoder.layers.0.mixer.A_log"].detach()
    assert found.dtype is (torch.float32 if kept else torch.bfloat16)
    # drawn from 1 to 16 before the logarithm, in FP32: more bits than BF16 has
    assert torch.equal(found, found.bfloat16().float()) is not kept
    seen: list[torch.dtype] = []
    engine.model[0].module.module.decoder.layers[0].mixer.in_proj.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].dtype)
    )
    assert engine.train_step(tiny.batches(), microbatches=1).applied
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hybrid_override_pattern": "M-MX"}, "'X'"),
        ({"hybrid_override_pattern": "M-"}, "2 symbols for model.num_layers=5"),
        ({"num_moe_experts": None}, "num_moe_experts is missing"),
        ({"mamba_num_heads": 15}, "cannot be divided into model.mamba_num_groups=2"),
        ({"mamba_state_dim": 0}, "mamba_state_dim"),
    ],
)
def test_a_pattern_that_describes_no_model_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises((Contradiction, Refused), match=words):
        tiny.run(model=HYBRID | change)


def test_the_number_of_layers_and_of_heads_follow() -> None:
    model = {name: value for name, value in HYBRID.items() if name not in ("num_layers", "mamba_num_heads")}
    base = {name: value for name, value in tiny.MODEL.items() if name != "num_layers"}
    shape = tiny.ConfigContainer(mixed_precision="bf16_mixed", model=base | model).resolved(training=False).facts.shape
    assert (shape.num_layers, shape.sizes["mamba_num_heads"]) == (5, 2 * 64 // 8)


def test_the_kernels_names_are_there_inside_only() -> None:
    assert "mamba_ssm" not in sys.modules
    with mamba_on_cpu():
        import mamba_ssm.ops.triton.ssd_combined as combined
        from causal_conv1d import causal_conv1d_update

        assert combined.mamba_chunk_scan_combined.__module__ == "mpbridge.backend.devices.mamba"
        with pytest.raises(Refused, match="causal_conv1d_update is a kernel for inference"):
            causal_conv1d_update()
    assert not [name for name in sys.modules if name.partition(".")[0] in ("mamba_ssm", "causal_conv1d")]


def test_a_mixer_that_was_imported_without_kernels_is_refused() -> None:
    """In a process of its own: megatron-core decides at import."""
    code = """
import sys, types
sys.modules["megatron.core.inference.contexts.attention_context.triton.tensor_ops"] = made = types.ModuleType("tensor_ops")
made.tensor_get_slice_after = made.tensor_masked_update = made.tensor_merge = None
import megatron.core.ssm.mamba_mixer
from mpbridge.backend.models.hybrid import hybrid_model
from mpbridge.common.errors import Refused
try:
    hybrid_model(None, {}, None, None, cuda=False, first=True, last=True)
except Refused as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert "was imported without mamba_ssm" in done.stdout, done.stderr[-2000:]
