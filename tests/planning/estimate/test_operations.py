"""The list of operations against hand counts and published FLOPs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.planning.estimate.build import work
from mpbridge.planning.estimate.gemms import model_flops_per_token
from mpbridge.planning.estimate.price import host_units
from mpbridge.planning.memory.layers import layer_weights
from mpbridge.precision.registry import recipes
from mpbridge.precision.resolve import resolve
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


@pytest.mark.parametrize(("settings", "share"), [
    ({}, 1), ({"cuda_graph_scope": "full_iteration"}, 1), ({"external_cuda_graph": True}, 0.5), ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, 0.5),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "mlp,attn"}, 0.5), ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["mlp"]}, 0.8),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, 0), ({"cuda_graph_impl": "full_iteration"}, 0),
], ids=str)  # fmt: skip
def test_the_host_launches_what_no_graph_captures(settings, share):
    run = run_of(rows()[1])  # Llama 3 70B, without graphs
    asked = dataclasses.replace(run.facts, model={**run.facts.model, **settings})
    alone, graphed = (host_units(facts, work(run.policy, facts, 0)) for facts in (run.facts, asked))
    assert graphed == pytest.approx(share * alone)


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


def sent_by(world, rank=0, engine="mcore", config="moe_tiny", **sections):
    """(kind, group, ranks) -> bytes of one rank's part, times how often, over a micro-batch and a step."""
    box = ConfigContainer.load(
        f"configs/{config}.yaml",
        [
            f"{section}.{name}={json.dumps(value)}"
            for section, given in sections.items()
            for name, value in given.items()
        ],
        check=False,
    )
    run = box.resolved(world)
    listed = work(run.policy, dataclasses.replace(run.facts, engine=engine), rank)
    found = Counter()
    for one in (*listed.collectives, *listed.step):
        found[one.kind, one.group, one.ranks] += one.bytes * one.times
    return run.facts, found


def test_experts_split_over_tensor_ranks_gather_and_scatter_their_rows():
    """token_dispatcher.py MoEAlltoAllTokenDispatcher: dispatch_postprocess gathers each rank's rows, combine_preprocess scatters their sums; backward the reverse."""
    sizes = {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "expert_model_parallel_size": 1,
        "sequence_parallel": True,
    }
    run, found = sent_by(2, parallel=sizes, model={"moe_token_dispatcher_type": "alltoall"})
    _, alone = sent_by(
        2, parallel=sizes | {"expert_tensor_parallel_size": 1}, model={"moe_token_dispatcher_type": "alltoall"}
    )
    rows = run.tokens // 2 * run.shape.expert_topk
    each = rows * run.shape.hidden_size * 2 * sum(run.shape.expert_layers)
    for kind, parts in (("all_gather", 1), ("reduce_scatter", 2)):
        assert found[kind, "expert", 2] == 2 * parts * each
        assert found[kind, "tensor", 2] == alone[kind, "tensor", 2]


def test_the_dispatcher_that_gathers_sends_every_token_to_every_rank():
    """token_dispatcher.py MoEAllGatherTokenDispatcher over expert x tensor ranks: a gather of hidden states, a scatter of sums, and both again backward."""
    run, found = sent_by(
        4, parallel={"expert_model_parallel_size": 4}, model={"moe_token_dispatcher_type": "allgather"}
    )
    part = run.tokens * run.shape.hidden_size * 2 * sum(run.shape.expert_layers)
    assert found["all_gather", "expert", 4] == 2 * part
    assert found["reduce_scatter", "expert", 4] == 2 * 4 * part
    assert not found["all_to_all", "expert", 4]


def test_padding_to_a_capacity_is_sent_and_computed():
    parts = {"parallel": {"expert_model_parallel_size": 4}}
    padded = {
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": 3.0,
        "moe_pad_expert_input_to_capacity": True,
    }
    dropped = padded | {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": False}
    plain, thrice, half = (
        sent_by(4, **parts, model=model)[1]["all_to_all", "expert", 4]
        for model in ({"moe_token_dispatcher_type": "alltoall"}, padded, dropped)
    )
    assert thrice == 3 * plain == 6 * half


@pytest.mark.parametrize(
    ("way", "kind", "sizes"), [("p2p", "send", 3), ("all_gather", "send", 3), ("a2a", "all_to_all", 2)]
)
def test_context_parallel_ranks_send_what_their_way_sends(way, kind, sizes):
    """context_parallel.py: keys and values, again in backward, and their gradients; by a2a queries and results beside them, and all gradients."""
    run, found = sent_by(2, config="gpt_tiny", parallel={"context_parallel_size": 2}, model={"cp_comm_type": way})
    shape, pairs = run.shape, 2 * run.shape.num_query_groups * run.shape.kv_channels
    width = pairs + (2 * shape.num_attention_heads * shape.kv_channels if way == "a2a" else 0)
    assert found[kind, "context", 2] == sizes * shape.num_layers * run.tokens * width * 2


def test_each_tensor_parallel_rank_sends_a_whole_group_of_keys_and_values():
    sizes = {"context_parallel_size": 2, "tensor_model_parallel_size": 4}
    run, found = sent_by(8, config="gpt_tiny", parallel=sizes, model={"num_query_groups": 1})
    shape = run.shape
    assert found["send", "context", 2] == 3 * shape.num_layers * run.tokens * 2 * shape.kv_channels * 2


def test_a_prediction_layer_is_computed_again_by_uniform_recomputation_alone():
    """multi_token_prediction.py: _checkpointed_forward wraps _proj_and_transformer_layer; of block it warns that it is skipped."""
    sizes, gathered, again = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}, {}
    for how, count in (("uniform", 1), ("block", 20)):
        model = {
            "mtp_num_layers": 1,
            "recompute_granularity": "full",
            "recompute_method": how,
            "recompute_num_layers": count,
        }
        run, sent = sent_by(2, config="gpt_tiny", parallel=sizes, model=model)
        listed = work(resolve(recipes["bf16"].make()), run, 0)
        gathered[how] = sent["all_gather", "tensor", 2]
        flops = {
            step: sum(one.flops for one in listed.gemms if one.step == step and one.where != "output_layer")
            for step in ("forward", "recompute")
        }
        again[how] = flops["recompute"] / flops["forward"]
    assert again["uniform"] == 1 > again["block"]
    # its two pairs of linears, the projection before them and its result
    assert gathered["uniform"] - gathered["block"] == 4 * run.tokens * run.shape.hidden_size * 2 // 2


def test_attention_alone_is_sent_of_a_hybrid_and_latent_keys_in_their_width():
    run, found = sent_by(2, config="nemotron_h_tiny", parallel={"context_parallel_size": 2})
    each = 3 * run.tokens * 2 * run.shape.num_query_groups * run.shape.kv_channels * 2
    assert found["send", "context", 2] == run.shape.pattern.count("*") * each > 0
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": 32,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 24,
    }
    run, found = sent_by(2, config="gpt_tiny", parallel={"context_parallel_size": 2}, model=latent)
    assert (
        found["send", "context", 2]
        == run.shape.num_layers * 3 * run.tokens * run.shape.num_attention_heads * (32 + 16 + 24) * 2
    )


def test_instances_of_the_distributed_optimizer_add_up_their_shards():
    """param_and_grad_buffer.py start_grad_sync: a scatter in each instance of 2 ranks, then a sum of the shards over 4 instances."""
    one, many = ({"use_distributed_optimizer": True, "num_distributed_optimizer_instances": count} for count in (1, 4))
    (_, alone), (_, found) = (
        sent_by(8, config="gpt_tiny", ddp=given, train={"global_batch_size": 64}) for given in (one, many)
    )
    assert not [key for key in alone if key[0] == "all_reduce"]
    assert found["all_reduce", "data", 4] == found["reduce_scatter", "data", 2] // 2 > 0


def test_a_tied_embedding_of_two_stages_is_added_up_once_per_step():
    sizes, batch = {"pipeline_model_parallel_size": 2}, {"global_batch_size": 16}
    run, found = sent_by(
        2, config="gpt_tiny", parallel=sizes, train=batch, model={"share_embeddings_and_output_weights": True}
    )
    assert found["all_reduce", "embedding", 2] in (
        run.shape.vocab_size * run.shape.hidden_size * width for width in (2, 4)
    )
    _, untied = sent_by(
        2, config="gpt_tiny", parallel=sizes, train=batch, model={"share_embeddings_and_output_weights": False}
    )
    assert not untied["all_reduce", "embedding", 2]


def test_a_wrapper_that_shards_states_alone_gathers_weights_once_per_step():
    def once(strategy):
        box = ConfigContainer.load(
            "configs/gpt_tiny.yaml",
            [
                f"ddp.data_parallel_sharding_strategy={strategy}",
                "engine=megatron_fsdp",
                "train.global_batch_size=16",
                "train.micro_batch_size=2",
            ],
            check=False,
        )
        run = box.resolved(2)
        return {one.kind: one.times for one in work(run.policy, run.facts, 0).step}

    micro = 4
    assert once("optim_grads_params") == {"all_gather": 2 * micro, "reduce_scatter": micro}
    assert once("optim_grads") == {"all_gather": 1, "reduce_scatter": micro}
    assert once("optim") == {"all_gather": 1, "reduce_scatter": 1}


def test_the_last_stage_computes_the_logits_of_prediction_on_another_stage():
    layout = {"mtp_num_layers": 2, "pipeline_model_parallel_layout": "Etttt|mm|L"}
    box = ConfigContainer.load(
        "configs/gpt_tiny.yaml",
        [f"model.{name}={value}" for name, value in layout.items()]
        + ["parallel.pipeline_model_parallel_size=3", "train.global_batch_size=16"],
        check=False,
    )
    run = box.resolved(3)
    heads = [
        sum(one.where == "output_layer" and one.step == "forward" for one in work(run.policy, run.facts, rank).gemms)
        for rank in range(3)
    ]
    assert heads == [0, 0, 3]


def test_a_gate_of_attentions_output_is_a_product_of_the_projection():
    """attention.py SelfAttention: kv_channels x num_attention_heads rows more."""
    plain, gated = (
        ConfigContainer.load("configs/gpt_tiny.yaml", [f"model.attention_output_gate={on}"], check=False)
        .resolved(1)
        .facts.shape
        for on in ("false", "true")
    )
    rows = [
        next(
            w.shape[0]
            for w in layer_weights(shape, parts=("attention", "mlp"))
            if w.path == "self_attention.linear_qkv.weight"
        )
        for shape in (plain, gated)
    ]
    assert rows[1] - rows[0] == plain.num_attention_heads * plain.kv_channels
