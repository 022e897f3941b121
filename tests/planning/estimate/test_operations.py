"""The list of operations against hand counts and published FLOPs."""

from __future__ import annotations

import dataclasses

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.planning.estimate.build import work
from mpbridge.planning.estimate.gemms import model_flops_per_token
from mpbridge.settings.container import ConfigContainer
from scripts.evidence.published import CANNOT, UNUSUAL, priced, rows, run_of

SAMPLE = [0, 1, 6, 9, 20, 21, 25, 26]


@pytest.mark.parametrize("ident", SAMPLE)
def test_model_flops_are_those_of_the_published_table(ident):
    row = rows()[ident]
    facts = run_of(row).facts
    mine = model_flops_per_token(facts.shape, facts.model) * row["tokens"] / 1e12
    # tokens/s of these releases are rounded to multiples of 16 or more, TFLOP/s to units
    assert mine == pytest.approx(row["tflops"], rel=0.025)


def test_products_of_a_whole_model_are_six_flops_a_weight_and_token():
    run = run_of(rows()[1])
    alone = dataclasses.replace(run.facts.parallel, world_size=1, pipeline=1, virtual_pipeline=None)
    whole = dataclasses.replace(run.facts, parallel=alone, global_batch_size=1)
    found = sum(one.flops for one in work(run.policy, whole, 0).gemms)
    weights = 80 * (8192 * (64 + 2 * 8) * 128 + 8192 * 8192 + 3 * 8192 * 28672) + 8192 * 128256
    assert found == 6 * weights * 8192


def test_recomputed_modules_are_computed_once_more():
    some = (row for row in rows() if row["model"] == "deepseek_v3_671b")
    run = run_of(next(row for row in some if row["settings"].get("recompute_modules") == ["mla_up_proj"]))
    again = [gemm for gemm in work(run.policy, run.facts, 0).gemms if gemm.step == "recompute"]
    assert {gemm.where.rpartition(".")[2] for gemm in again} == {"linear_q_up_proj", "linear_kv_up_proj"}


@pytest.mark.parametrize(("settings", "passes"), [
    ({}, 3.5), ({"recompute_modules": ["core_attn"]}, 3.5), ({"recompute_granularity": "selective"}, 4.5),
    ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, 4.5),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, 3.5),
    ({"recompute_granularity": "selective", "recompute_modules": []}, 3.5), ({"moe_layer_recompute": True}, 4.5),
], ids=str)  # fmt: skip
def test_selective_recomputation_that_names_nothing_computes_core_attention_once_more(settings, passes):
    run = run_of(rows()[1])  # Llama 3 70B: no experts, fused attention
    bare = {name: value for name, value in run.facts.model.items() if not name.startswith("recompute")}
    facts = dataclasses.replace(run.facts, model={**bare, **settings})
    none = dataclasses.replace(run.facts, model=bare)
    each, alone = (sum(one.flops for one in work(run.policy, asked, 0).attention) for asked in (facts, none))
    assert each / alone == pytest.approx(passes / 3.5)


def test_formats_follow_the_recipe_layer_by_layer():
    run = run_of(rows()[2])
    assert {gemm.scaling for gemm in work(run.policy, run.facts, 0).gemms if gemm.format == "fp4"} == {"nvfp4"}
    last = work(run.policy, run.facts, 63).gemms
    assert {gemm.format for gemm in last if gemm.where == "output_layer"} == {"bf16"}


def test_sizes_that_do_not_divide_are_named_together():
    run = run_of(rows()[6])
    sizes = dataclasses.replace(run.facts.parallel, world_size=24, tensor=3, pipeline=1, virtual_pipeline=None)
    both = r"num_attention_heads 64 by tensor 3.*ffn_hidden_size 28672 by tensor 3"
    with pytest.raises(BadValue, match=both) as said:
        work(run.policy, dataclasses.replace(run.facts, parallel=sizes), 0)
    assert "vocab_size" not in str(said.value)  # 128256 is a multiple of 3


def test_every_published_row_but_the_hybrids_is_priced():
    assert {row["model"] for row in rows()} - {row["model"] for row in priced()} == set(CANNOT)
    assert set(UNUSUAL) < {row["model"] for row in priced()}


def test_parameters_kept_in_fp32_are_gathered_and_reduced_in_fp32_when_sharded():
    config = ConfigContainer(
        mixed_precision={"recipe": "fp32_params_bf16_compute", "keep_fp32": ["*norm*"]},
        model={"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 256, "vocab_size": 256},
        optimizer={"lr": 1e-3},
        train={"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 2},
        data={"seq_length": 32},
        engine="fsdp2",
    )
    run = config.resolved(world_size=2)
    norms = 5 * 2 * 64  # weight and bias of two norms in each layer and of the last
    sent = {(one.kind, one.dtype): one.bytes for one in work(run.policy, run.facts, 0).step}
    assert sent["all_gather", "fp32"] == norms * 4 // 2
    weights = sum(one.bytes for one in work(run.policy, run.facts, 0).step if one.kind == "reduce_scatter")
    assert weights == sent["reduce_scatter", "fp32"]
    assert sent["all_gather", "bf16"] > 0
