"""Predicted roles against live tensors of real megatron-core, element for element and byte for byte."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import ModelShape, Parallel, RunFacts
from mpbridge.common.machines import machine
from mpbridge.planning.memory.ranks import Coordinates, parse_layout, stage_chunks
from mpbridge.planning.memory.roles import roles
from mpbridge.precision.registry import recipes
from mpbridge.precision.resolve import resolve
from mpbridge.settings.draft import filled
from mpbridge.settings.shape import parallel_of
from tests.planning.memory.live_roles import differences

ONE = [
    "gpt2/ddp/fp16", "llama/sharded/fp16", "moe/ddp/bf16", "moe/sharded/bf16_grads", "gpt2_untied/sharded/bf16", "llama_tied/ddp/bf16", "llama_tied/buckets/moments",
    "llama/bus/bf16", "hybrid/sharded/bf16", "hybrid/ddp/mamba_kept", "hybrid_moe/ddp/fp32", "llama/sharded/remainders", "llama/sharded/no_remainders",
    "llama/sharded/kept", "gpt2/ddp/kept", "gpt2/sgd/bf16", "gpt2/ddp/full", "lora/ddp/frozen", "lora/sharded/frozen_wide", "moe/sharded/frozen_layer",
]  # fmt: skip
TWO = [
    *("/".join(parts) for parts in itertools.product(("gpt2", "llama"), ("ddp", "sharded"), ("fp32", "bf16"))),
    "gpt2/sharded/fp16", "moe/ep/bf16", "gpt2/tp/bf16", "gpt2/pp/bf16", "hybrid/tp/bf16", "hybrid/pp/bf16", "llama/pp/bf16", "llama_tied/buckets/moments",
    "moe/sharded/remainders", "lora/pp/frozen", "lora/sharded/frozen",
]  # fmt: skip
LAYOUTS = {1: ("ddp", "sharded", "buckets", "bus"), 2: ("ddp", "sharded", "buckets", "bus", "tp", "pp", "pp_ddp")}


def _agree(found):
    wrong = [
        f"{case} rank {rank}: {report['bytes']} predicted, {report['live_bytes']} live; {report['differ'][:4]}"
        for case, reports in found.items()
        for rank, report in enumerate(reports)
        if report["differ"] or report["bytes"] != report["live_bytes"] or not report["applied"]
    ]
    assert not wrong, "\n".join(wrong)
    return found


def test_every_role_equals_the_live_tensors_on_one_process(tmp_path):
    found = _agree(differences(1, ONE, tmp_path))["llama/bus/bf16"][0]["roles"]
    assert {"params", "grads", "main_params", "exp_avg", "exp_avg_sq", "padding"} <= set(found)


def test_every_role_equals_the_live_tensors_on_two_processes(tmp_path):
    found = _agree(differences(2, TWO, tmp_path))
    # the shards of two ranks are not the same size: that is where a rule of thumb fails
    assert len({report["bytes"] for report in found["llama/sharded/bf16"]}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("size", LAYOUTS)
@pytest.mark.parametrize("shape", ["gpt2", "gpt2_untied", "llama", "llama_tied", "moe"])
def test_every_shape_layout_and_recipe(tmp_path, shape, size):
    plain, aware = ("fp32", "bf16", "fp16", "bf16_grads", "kept"), ("moments", "remainders", "no_remainders")
    kinds = {layout: plain if "ddp" in layout else (*plain, *aware) for layout in LAYOUTS[size]}
    cases = [f"{shape}/{layout}/{kind}" for layout, every in kinds.items() for kind in every]
    _agree(differences(size, cases, tmp_path, timeout=840))


SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=2, kv_channels=16, vocab_size=128, seq_length=32, tied=False
)  # fmt: skip


def _bytes(policy, run, *names, rank=0):
    return sum(role.bytes for role in roles(policy, run, rank=rank) if role.name in names)


def facts(**changes):
    return RunFacts(**({"shape": SHAPE, "machine": machine("h100")} | changes))


def policy(name, **changes):
    return resolve(recipes[name].make().derive(**changes))


def test_stages_share_out_every_layer_once():
    run = facts(parallel=Parallel(world_size=4, pipeline=2, virtual_pipeline=2))
    stages = stage_chunks(run)
    assert [[chunk.layers for chunk in stage] for stage in stages] == [[(0,), (2,)], [(1,), (3,)]]
    assert stages[0][0].first
    assert stages[1][1].last
    uneven = facts(parallel=Parallel(world_size=2, pipeline=2), model={"num_layers_in_first_pipeline_stage": 1})
    assert [stage[0].layers for stage in stage_chunks(uneven)] == [(0,), (1, 2, 3)]
    counted = facts(
        parallel=Parallel(world_size=3, pipeline=3),
        model={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    )
    assert [len(stage[0].layers) for stage in stage_chunks(counted)] == [1, 2, 1]


def test_layout_strings_read_as_megatron_core_reads_them():
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    for text in ("Ettt|(tt|)*3,m|L", "Et*3|tt|(t|)*2t*2L", "E|t|tL"):
        theirs = [[kind.name for kind in stage] for stage in PipelineParallelLayerLayout.parse_str_to_list(text)]
        assert parse_layout(text) == theirs
    with pytest.raises(BadValue, match="'x'"):
        parse_layout("Etx|L")


def test_a_layout_that_loses_layers_is_refused():
    for stages, model, said in (
        (2, {"pipeline_model_parallel_layout": "Ett|t|tL"}, r"has 3 parts, expected 2: .*\(add or drop a \|"),
        (2, {"pipeline_model_parallel_layout": "Et|tL"}, r"places 2 decoder \(t\), expected 4"),
        (2, {"num_layers_in_last_pipeline_stage": -6}, "must not be negative"),
        (3, {}, "4 layers cannot be divided among 3"),
    ):
        with pytest.raises(BadValue, match=said):
            stage_chunks(facts(parallel=Parallel(world_size=stages, pipeline=stages), model=model))


def test_layouts_are_refused_that_megatron_core_refuses_and_interleave_as_it_says():
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    fixed = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "pipeline_model_parallel_size": 2,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
    }
    layouts = ("Ett|ttL", "Et|t|t|tL", "Etttt|mL", "Ett|ttmL", "tt|ttL", "Ett|tt", "tEt|ttL", "Ett|EttL", "Ett|ttmmL", "Ettm|ttL", "Et|t|tt", "Ett|t|tL",
               "Ett|tt||L", "Ett|tt|m|L", "Ett|ttm||L", "Ett|tt|m|mL",
               [["Embedding", " decoder", "decoder"], ["DECODER", "decoder", "loss "]], [["embedding"], ["decoder"] * 4 + ["Loss"]])  # fmt: skip
    agreed = set()
    for text, ahead, given in itertools.product(layouts, (None, 1, 2), (None, 2)):
        own = {
            "virtual_pipeline_model_parallel_size": given,
            "pipeline_model_parallel_layout": text,
            "mtp_num_layers": ahead,
        }
        theirs: object = "refused"
        with contextlib.suppress(AssertionError):
            theirs = TransformerConfig(num_layers=4, **fixed, **own).virtual_pipeline_model_parallel_size
        sizes = filled("parallel", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": given})
        ours: object = "refused"
        with contextlib.suppress(BadValue):
            shape = dataclasses.replace(SHAPE, mtp_layers=ahead or 0)
            run = facts(
                shape=shape, parallel=parallel_of(sizes, 2, text), model={"pipeline_model_parallel_layout": text}
            )
            assert stage_chunks(run)
            ours = run.parallel.virtual_pipeline
        assert ours == theirs, (text, ahead, given)
        agreed.add(ours)
    assert agreed == {"refused", None, 2}


def test_a_world_is_a_whole_number_of_expert_replicas_too():
    with pytest.raises(
        BadValue, match="768 processes cannot be divided into expert tensor 1 x expert 64 x pipeline 8 = 512"
    ):
        Parallel(world_size=768, pipeline=8, expert=64, expert_tensor=1)
    assert Parallel(world_size=1024, pipeline=8, expert=64, expert_tensor=1).expert_data == 2


def test_coordinates_follow_megatron_cores_order():
    sizes = Parallel(world_size=16, tensor=2, pipeline=2, expert=2, expert_tensor=1)
    at = [Coordinates.of(rank, sizes) for rank in range(16)]
    assert [c.tensor for c in at[:4]] == [0, 1, 0, 1]
    assert [c.stage for c in at] == [0] * 8 + [1] * 8
    assert [c.expert for c in at[:4]] == [0, 1, 0, 1]
    assert [c.data for c in at[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [c.expert_data for c in at[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(BadValue):
        Coordinates.of(16, sizes)


def test_stored_fp8_costs_a_byte_and_on_hopper_its_transpose():
    from mpbridge.common.facts import OptimizerFacts

    quantized = 4 * (64 * (64 + 2 * 32) + 64 * 64 + 2 * 64 * 256)
    for gpu, transposes in (("h100", quantized), ("b200", 0)):
        run = facts(machine=machine(gpu), optimizer=OptimizerFacts(distributed=True))
        stored = [role for role in roles(policy("fp8_ds"), run) if role.name == "params" and role.dtype.bytes == 1]
        assert sum(role.bytes for role in stored) == quantized
        assert _bytes(policy("fp8_ds"), run, "weight_transposes") == transposes
        assert _bytes(policy("fp8_ds", fp8_param_gather=False), run, "weight_copies") == quantized


def test_edge_layers_stay_out_and_emulation_keeps_no_copies():
    run = facts()
    copies = [one for one in roles(policy("fp8_cs", fp8_param_gather=False), run) if one.name == "weight_copies"]
    assert {role.parameter.split(".")[2] for role in copies} == {"1", "2"}
    emulated = facts(realization="emulated")
    assert not _bytes(policy("fp8_cs"), emulated, "weight_copies", "weight_transposes")


def test_fsdp2_shares_rows_and_counts_what_the_last_ranks_lack():
    run = facts(engine="fsdp2", parallel=Parallel(world_size=3))
    held = [role for rank in range(3) for role in roles(policy("fsdp_adamw"), run, rank=rank) if role.name == "params"]
    last = [role for role in held if role.parameter == "output_layer.weight"]
    # 128 rows over 3 ranks: 43, 43, 42 and one row of padding
    assert [role.elements + role.padding for role in last] == [43 * 64] * 3
    whole = [role.elements for role in roles(policy("bf16"), facts()) if role.name == "params"]
    assert sum(role.elements for role in held) == sum(whole)
