"""A recipe on Megatron Bridge's container: its three configs are megatron-core's own; the container here has the attributes of Bridge's."""

import copy
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

import mpbridge
from mpbridge.common.errors import BadValue, Conflict, Refused
from mpbridge.common.machines import machine
from mpbridge.common.probe import playing
from mpbridge.compat import megatron_bridge
from mpbridge.planning.capability import ASSUMED
from mpbridge.settings.shape import live_parallel


def container(**more):
    model = TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=4)
    model.vocab_size, model.seq_length = 256, 64
    parts = {"model": model, "optimizer": OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)}
    parts |= {"ddp": DistributedDataParallelConfig(use_distributed_optimizer=True), "mixed_precision": "bf16_mixed"}
    parts |= {"train": SimpleNamespace(micro_batch_size=2, global_batch_size=4), "tokenizer": SimpleNamespace()}
    return SimpleNamespace(**parts | more)


@pytest.fixture
def h100():
    with playing(machine("h100"), ASSUMED):
        yield


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("bf16_mixed", {"model.bf16": True, "optimizer.bf16": True, "ddp.grad_reduce_in_fp32": True}),
        ("fp16_mixed", {"model.fp16": True, "optimizer.initial_loss_scale": 2.0**32, "ddp.grad_reduce_in_fp32": False}),
        ("file.yaml", {"model.bf16": True, "ddp.grad_reduce_in_fp32": False}),
    ],
)
def test_one_call_writes_a_recipe_and_leaves_nothing_that_bridge_would_write(tmp_path, monkeypatch, recipe, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").write_text("extends: bf16_mixed\ngrad_reduce_in_fp32: false\n", encoding="utf-8")
    cfg = container()
    megatron_bridge.apply(cfg, recipe)
    assert cfg.mixed_precision is None
    found = {name: getattr(getattr(cfg, name.partition(".")[0]), name.partition(".")[2]) for name in said}
    assert found == said


def values(cfg, section):
    found = vars(getattr(cfg, section))
    return {name: value for name, value in found.items() if not callable(value)}


def test_a_second_recipe_replaces_the_first():
    cfg, fresh = container(), container()
    megatron_bridge.apply(cfg, "fp16_mixed")
    megatron_bridge.apply(cfg, "bf16_mixed")
    megatron_bridge.apply(fresh, "bf16_mixed")
    for section in ("model", "optimizer", "ddp"):
        assert values(cfg, section) == values(fresh, section)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("fp32_params_bf16_compute", "megatron-core's Float16Module casts the whole model"),
        ("full_bf16", "the distributed optimizer silently creates FP32 main weights"),
        ("bf16_with_mxfp8_mixed", "MXFP8 needs compute capability 10.0 or later"),
        ("bf16_with_fp8_rowwise", "scaling-of-a-library-that-the-engine-does-not-use"),
        (
            mpbridge.MixedPrecisionConfig(bf16=True, frozen=["*norm*"]),
            r"does neither: mixed_precision\.frozen=null, or mpbridge's",
        ),
        (
            mpbridge.MixedPrecisionConfig(bf16=True, keep_fp32=["*norm*"]),
            r"does neither: mixed_precision\.keep_fp32=null, or",
        ),
    ],
)
def test_what_bridges_loop_would_undo_or_the_machine_cannot_run_is_refused(h100, recipe, words):
    cfg, untouched = container(), container()
    with pytest.raises(Refused, match=words):
        megatron_bridge.apply(cfg, recipe)
    assert cfg.mixed_precision == "bf16_mixed"
    for section in ("model", "optimizer", "ddp"):
        assert values(cfg, section) == values(untouched, section)


def test_a_layout_that_is_not_read_yet_makes_the_virtual_stages_that_megatron_core_will_make(h100, monkeypatch):
    """Bridge's providers are finalized after this; a TransformerConfig has set them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg, layout, sizes = container(), "Et|t|t|tL", {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.bfloat16}
    read = TransformerConfig(
        num_layers=4, hidden_size=128, num_attention_heads=4, pipeline_model_parallel_layout=layout, **sizes
    )
    vars(cfg.model).update(sizes, pipeline_model_parallel_layout=layout, microbatch_group_size_per_vp_stage=None)
    megatron_bridge.apply(cfg, "bf16_mixed")
    found = [live_parallel(one, 2) for one in (cfg.model, read)]
    assert [one.virtual_pipeline for one in found] == [2, read.virtual_pipeline_model_parallel_size]


def test_the_plan_names_what_bridge_overrides_or_drops(h100):
    from mpbridge.backend.megatron.bridge_container import container_plan

    own = {"comm_overlap": object(), "checkpoint": SimpleNamespace(save="somewhere", load=None)}
    cfg = container(mixed_precision="fp16_mixed", ddp=DistributedDataParallelConfig(), **own)
    told = str(container_plan(cfg, "bf16_with_fp8_current_scaling_mixed"))
    assert cfg.mixed_precision == "fp16_mixed"
    assert "Bridge  mixed_precision=fp16_mixed becomes None" in told
    assert "Bridge turns both on" in told
    assert "comm_overlap decides ddp.overlap_grad_reduce" in told
    assert "checkpoints of this run cannot be loaded again" in told
    assert "fp8_param_gather=false" in told


def test_fsdp_said_in_dist_alone_is_planned_as_fsdp():
    from mpbridge.backend.megatron.bridge_container import container_plan

    dist = SimpleNamespace(use_torch_fsdp2=False, use_megatron_fsdp=True)
    ddp = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    alone, both = container(dist=dist, ddp=ddp), container(dist=dist, ddp=copy.copy(ddp))
    both.ddp.use_megatron_fsdp = True
    with playing(machine("h100"), ASSUMED):  # its own main copy: another field of Megatron-FSDP
        assert str(container_plan(alone, "full_bf16")) == str(container_plan(both, "full_bf16"))
    assert alone.ddp.use_megatron_fsdp is False


def test_an_authors_values_can_be_kept_from_being_overridden():
    cfg = container()
    cfg.ddp.grad_reduce_in_fp32 = True
    recipe = mpbridge.get_mixed_precision_config("bf16_mixed").derive(grad_reduce_in_fp32=False)
    with pytest.raises(Conflict, match=r"ddp\.grad_reduce_in_fp32"):
        megatron_bridge.apply(cfg, recipe, on_conflict="error")
    assert cfg.mixed_precision == "bf16_mixed"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (SimpleNamespace(), "SimpleNamespace has no model, optimizer, ddp"),
        (SimpleNamespace(model=1, optimizer=1, ddp=1), "has no mixed_precision"),
        (container(dist=SimpleNamespace(use_torch_fsdp2=True, use_megatron_fsdp=False)), "use_torch_fsdp2"),
    ],
    ids=["nothing", "no precision", "fsdp2"],
)
def test_what_is_no_container_of_bridge_is_refused(given, words):
    with pytest.raises(BadValue, match=words):
        megatron_bridge.apply(given, "bf16_mixed")
