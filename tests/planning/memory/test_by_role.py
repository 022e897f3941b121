from __future__ import annotations

import dataclasses
import json

import pytest

from mpbridge import ConfigContainer
from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, RunFacts
from mpbridge.common.machines import machine
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.memory.activations import activations
from mpbridge.planning.memory.activations import kept as kept_of
from mpbridge.planning.memory.by_role import duplicate_main, fit, memory, reasons, total_parameters, verdict
from mpbridge.planning.memory.keeps import trained_by
from mpbridge.planning.memory.layers import parameters
from mpbridge.planning.memory.overheads import left_out_of_memory, left_out_of_time
from mpbridge.planning.memory.ranks import Coordinates, in_flight
from mpbridge.planning.memory.roles import roles, weight_scales
from mpbridge.precision.registry import recipes
from mpbridge.precision.resolve import resolve
from mpbridge.precision.scalings import scaling

LLAMA3_8B = ModelShape(
    num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=14336, num_query_groups=8, kv_channels=128, vocab_size=128256, seq_length=8192,
    gated=True, tied=False, linear_bias=False, norm_bias=False,
)  # fmt: skip
DEEPSEEK_V3 = ModelShape(
    num_layers=61, hidden_size=7168, num_attention_heads=128, ffn_hidden_size=18432, num_query_groups=128, kv_channels=128, vocab_size=129280, seq_length=4096,
    gated=True, tied=False, linear_bias=False, norm_bias=False, qk_layernorm=True, experts=256, expert_ffn_hidden_size=2048,
    expert_layers=(False,) * 3 + (True,) * 58, expert_topk=8, shared_expert_size=2048, expert_bias=True, grouped_gemm=True,
    latent_attention={"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
)  # fmt: skip
SMALL = ModelShape(
    num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=64, seq_length=32,
    linear_bias=False,
)  # fmt: skip
GPT = ModelShape(
    num_layers=8, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=4096, num_query_groups=16, kv_channels=64, vocab_size=128, seq_length=2048
)  # fmt: skip
"""Of multi-head attention, for the formulas of arXiv 2205.05198."""
H100, B200 = machine("h100"), machine("b200")
SHARDED = OptimizerFacts(distributed=True)
WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
QUANTIZED = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)  # the linears of Llama-3-8B


def policy(name, **changes):
    return resolve(recipes[name].make().derive(**changes))


def facts(world=8, **changes):
    usual = {"shape": LLAMA3_8B, "parallel": Parallel(world_size=world), "optimizer": SHARDED, "machine": H100}
    return RunFacts(**(usual | {"global_batch_size": 128} | changes))


def test_published_parameter_counts():
    assert total_parameters(facts()) == 8_030_261_248  # meta-llama/Meta-Llama-3-8B
    # "671B"; without the multi-token prediction module
    assert total_parameters(facts(shape=DEEPSEEK_V3)) == 671_026_404_352


@pytest.mark.parametrize(("name", "changes", "gpu", "expected"), [
    ("bf16_mixed", {}, "h100", 2.00), ("bf16_with_fp8_current_scaling_mixed", {"first_last_layers_bf16": False}, "h100", 2.00),
    ("bf16_with_fp8_current_scaling_mixed", {"first_last_layers_bf16": False}, "b200", 1.00),
    ("bf16_with_mxfp8_mixed", {}, "b200", 2.06), ("fp32", {}, "h100", 4.00),
])  # fmt: skip
def test_a_frozen_linear_takes_the_bytes_measured_on_transformer_engines_tensors(name, changes, gpu, expected):
    """Live tensors of Transformer Engine 2.11's Python: a weight with its scales, and before Blackwell its transposed copy."""
    shape = dataclasses.replace(LLAMA3_8B, lora_rank=8, lora_targets=("mlp.*",))
    ddp = {"reuse_grad_buf_for_mxfp8_param_ag": "mxfp8" in name}
    run, kept = facts(shape=shape, machine=machine(gpu), ddp=ddp), policy(name, frozen=["*"], **changes)
    held = [role for role in roles(kept, run) if role.parameter.endswith((".linear_fc1.weight", ".linear_qkv.weight"))]
    elements = sum(p.weight.elements for chunk in parameters(run, Coordinates.of(0, run.parallel)) for p in chunk
                   if p.name.endswith((".linear_fc1.weight", ".linear_qkv.weight")))  # fmt: skip
    assert sum(role.bytes for role in held) / elements == pytest.approx(expected, abs=0.005)
    assert {role.name for role in held} <= {"params", "weight_copies", "weight_transposes", "weight_scales"}


def test_published_duplicate_of_the_main_weights():
    """Megatron-LM PR 4133: 23425.69 - 19595.55 MiB on 8 GPUs; the difference beyond the copy itself is Megatron-FSDP's padding."""
    mib = duplicate_main(facts(engine="megatron_fsdp")) / 2**20
    assert round(mib) == 3829
    assert 0 <= 3830.14 - mib < 2


# FP8 beside bf16_mixed, in bytes of the quantized linears (memory_table.md, add-ons)
LOW = {
    "fp8_ds": (H100, {}, 0.0), "fp8_cs": (B200, {"first_last_layers_bf16": False}, -1.0), "fp8_sc": (H100, {}, 2.0),
    "mxfp8": (B200, {"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}, 2 + 2 / 32),
    "nvfp4": (B200, {}, 1 + 2 / 16),
}  # fmt: skip


def against_bf16(of, run):
    """(bytes of states more than with bf16_mixed, why)."""
    mine, other = memory(of, run), memory(policy("bf16"), run)
    return mine.states - other.states, reasons(of, run, mine, other)


@pytest.mark.parametrize("name", LOW)
def test_what_a_low_format_costs(name):
    gpu, changes, expected = LOW[name]
    extra, why = against_bf16(policy(name, **changes), facts(machine=gpu))
    assert extra / QUANTIZED == pytest.approx(expected, abs=2e-3)
    assert why


def test_mxfp8_gather_stores_two_copies_and_no_buffer():
    extra, why = against_bf16(policy("mxfp8"), facts(machine=B200, ddp={"reuse_grad_buf_for_mxfp8_param_ag": True}))
    assert extra / QUANTIZED == pytest.approx(2 + 2 / 32 - 2, abs=1e-3)
    assert any("borrows" in reason for reason in why)


def test_where_fp8_costs_more_it_says_why():
    extra, why = against_bf16(policy("fp8_sc"), facts())
    assert extra > 0
    assert "BF16 weights remain" in " ".join(why)


def test_pipeline_imbalance_and_the_second_copy_of_a_tied_embedding():
    tied = dataclasses.replace(LLAMA3_8B, tied=True)
    run = facts(8, shape=tied, parallel=Parallel(world_size=8, pipeline=4))
    stages = [memory(policy("bf16"), run, rank=2 * stage) for stage in range(4)]
    rows = 128256 * 4096
    assert stages[0].elements - stages[1].elements == rows
    assert stages[3].elements - stages[1].elements == rows + 4096  # the copy, and the final norm
    assert total_parameters(run) == 8_030_261_248 - rows
    assert memory(policy("bf16"), run).total == max(stage.total for stage in stages)


def test_experts_are_shared_out():
    few = facts(64, shape=DEEPSEEK_V3, parallel=Parallel(world_size=64, expert=8))
    many = facts(64, shape=DEEPSEEK_V3, parallel=Parallel(world_size=64, expert=64))
    expert = 58 * 256 * 3 * 7168 * 2048
    assert memory(policy("bf16"), few).elements - memory(policy("bf16"), many).elements == expert // 8 - expert // 64


def test_a_run_that_does_not_fit_hears_what_would():
    tight = fit(policy("bf16"), facts(), H100)
    assert not tight.ok
    assert tight.needed == memory(policy("bf16"), facts()).needed > memory(policy("bf16"), facts()).total
    assert any("tensor_model_parallel_size=2" in way for way in tight.ways)
    assert fit(policy("bf16"), facts(), machine("gb300")).ok
    hopeless = fit(policy("bf16"), facts(1), machine("t4"))
    assert all("not enough alone" in way for way in hopeless.ways)


def test_lower_moments_are_not_offered_where_a_rule_warns_of_them():
    ways = {name: " ".join(fit(policy(name), facts(1), H100).ways) for name in ("bf16", "fp8_cs")}
    assert "exp_avg_dtype=bf16" in ways["bf16"]
    assert "exp_avg_dtype=bf16" not in ways["fp8_cs"]


@pytest.mark.parametrize("way", ["tensor_model_parallel_size", "recompute_granularity", "micro_batch_size=1"])
def test_every_way_that_is_offered_really_saves(way):
    run = facts(micro_batch_size=2)
    words = " ".join(fit(policy("bf16"), run, machine("a10")).ways) + " ".join(fit(policy("bf16"), run, H100).ways)
    assert way in words


def at(run, rank=0):
    return Coordinates.of(rank, run.parallel)


def test_recomputation_and_parallelism_lower_activations_in_the_expected_order():
    run = facts(8)
    whole = activations(policy("bf16"), run, at(run))
    some = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}
    selective, full = (dataclasses.replace(run, model=model) for model in (some, WHOLE))
    assert whole > activations(policy("bf16"), selective, at(run)) > activations(policy("bf16"), full, at(run))
    for changes in ({"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2}):
        less = facts(8, parallel=Parallel(world_size=8, **changes))
        assert activations(policy("bf16"), less, at(less)) < whole
    assert activations(policy("fp8_ds"), run, at(run)) < whole


def test_full_recomputation_keeps_the_inputs_of_layers():
    run = facts(1, model=WHOLE, shape=dataclasses.replace(LLAMA3_8B, vocab_size=128))
    deeper = dataclasses.replace(run, shape=dataclasses.replace(run.shape, num_layers=33))
    assert activations(policy("bf16"), deeper, at(run)) - activations(policy("bf16"), run, at(run)) == 8192 * 4096 * 2


def test_layers_that_share_a_kept_input_are_all_in_memory_when_they_are_computed_again():
    """Two layers more at once: two more of 34 s b h bytes, and two inputs of 2 s b h bytes fewer (arXiv 2205.05198; transformer_block.py _checkpointed_forward)."""
    few, many = (facts(1, shape=GPT, model=WHOLE | {"recompute_num_layers": n, "hidden_dropout": 0.1}) for n in (2, 4))
    found = activations(policy("bf16"), many, at(many)) - activations(policy("bf16"), few, at(few))
    assert found / (2048 * 1024) == pytest.approx(2 * 34 - 2 * 2, abs=6)
    block, blocks = (dataclasses.replace(run, model=run.model | {"recompute_method": "block"}) for run in (few, many))
    assert activations(policy("bf16"), blocks, at(many)) < activations(policy("bf16"), block, at(few))


@pytest.mark.parametrize("count", [8, 20])
def test_a_block_of_recomputed_layers_has_no_prediction_layer(count):
    """It keeps 34 s b h bytes instead of its input's 2 (arXiv 2205.05198; multi_token_prediction.py _checkpointed_forward: block is not supported)."""
    gpt = dataclasses.replace(GPT, mtp_layers=1)
    uniform, block = (
        facts(1, shape=gpt, model=WHOLE | {"recompute_method": how, "recompute_num_layers": n, "hidden_dropout": 0.1})
        for how, n in (("uniform", 1), ("block", count))
    )
    found = activations(policy("bf16"), block, at(block)) - activations(policy("bf16"), uniform, at(uniform))
    assert found / (2048 * 1024) == pytest.approx(34 - 2, abs=3)


def test_latent_down_projections_keep_a_ranks_part_of_the_sequence():
    """512 more ranks of queries: in BF16 an output and, normed, the input of the projection up, of half of the 4096 tokens (multi_latent_attention.py)."""
    latent = DEEPSEEK_V3.latent_attention
    more = dataclasses.replace(DEEPSEEK_V3, latent_attention=latent | {"q_lora_rank": latent["q_lora_rank"] + 512})
    runs = [
        facts(8, shape=shape, parallel=Parallel(world_size=8, tensor=2, sequence=True)) for shape in (DEEPSEEK_V3, more)
    ]
    less, whole = (kept_of(policy("bf16"), run, 0, {}).whole for run in runs)
    assert whole - less == 4096 / 2 * 512 * (2 + 2)


def test_a_layer_of_activations_by_the_published_formula():
    """arXiv 2205.05198, equation 2: s b h (34 + 5 a s / h) with dropout, without fused attention; ours has neither scores nor their dropout mask."""
    run = facts(1, shape=GPT, model={"hidden_dropout": 0.1})
    less = dataclasses.replace(run, shape=dataclasses.replace(GPT, num_layers=7))
    layer = activations(policy("bf16"), run, at(run)) - activations(policy("bf16"), less, at(run))
    assert layer / (2048 * 1024) == pytest.approx(34, abs=3)


def test_in_flight_micro_batches():
    run = facts(8, parallel=Parallel(world_size=8, pipeline=4), global_batch_size=64)
    assert [in_flight(run, stage, [1.0]) for stage in range(4)] == [4, 3, 2, 1]
    few = dataclasses.replace(run, global_batch_size=2)
    assert [in_flight(few, stage, [1.0]) for stage in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("each", [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [2.0, 1.0]], ids=str)
@pytest.mark.parametrize(("group", "count"), [(None, 32), (8, 32), (8, 28), (32, 32), (6, 6)])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_interleaved_stage_holds_as_much_as_the_schedules_passes_one_by_one(each, group, count, stage):
    """Warm-up, then a backward pass for each forward pass, in megatron-core's own order (schedules.py)."""
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    sizes = Parallel(world_size=8, pipeline=4, virtual_pipeline=2)
    order = [chunk for _, chunk in get_schedule_table(count, 2, group or 4)]
    ahead = (3 - stage) * 2 + (group or 4)  # get_pp_rank_microbatches
    flying, most = [0, 0], 0.0
    for number, chunk in enumerate(order):
        flying[chunk] += 1
        most = max(most, sum(one * many for one, many in zip(each, flying, strict=True)))
        if number >= ahead:
            flying[1 - order[number - ahead]] -= 1
    run = facts(8, parallel=sizes, global_batch_size=2 * count, model={"microbatch_group_size_per_vp_stage": group})
    assert in_flight(run, stage, each) == most


@pytest.mark.parametrize(("changes", "kept"), [
    # bytes a token that autograd kept of megatron-core's layer (scripts/evidence/measure_activations.py)
    ({}, 7862.7), ({"bias_activation_fusion": False}, 10166.7),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]}, 6706.7),
], ids=str)  # fmt: skip
def test_a_layer_of_experts_keeps_what_autograd_kept(changes, kept):
    tokens, angles = 3 * 320, 4 * 64 * 2 / 3  # four tables of rotary angles, the same for each of three samples
    model = {
        "num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 512, "num_moe_experts": 4, "moe_router_topk": 2,
        "moe_ffn_hidden_size": 160, "moe_shared_expert_intermediate_size": 96, "gated_linear_unit": True, "activation_func": "silu",
        "add_bias_linear": False, "hidden_dropout": 0.0, "bias_activation_fusion": True, "max_sequence_length": 320, "vocab_size": 64,
    }  # fmt: skip
    train = {"micro_batch_size": 3, "global_batch_size": 3, "train_iters": 1}
    asked = ConfigContainer(mixed_precision="bf16_mixed", model=model | changes, optimizer={"lr": 1e-3}, train=train)
    run = asked.resolved(1, machine=machine("b200"), versions=ASSUMED, training=False)
    assert kept_of(run.policy, run.facts, 0, {}).each / tokens == pytest.approx(kept - angles, rel=0.01)


def test_a_671b_estimate_is_quick():
    import time

    sizes = Parallel(world_size=512, pipeline=8, expert=64)
    split = {"num_layers_in_first_pipeline_stage": 7, "num_layers_in_last_pipeline_stage": 6}
    run = facts(512, shape=DEEPSEEK_V3, parallel=sizes, model=split)
    start = time.process_time()
    found = memory(policy("fp8_sc"), run)
    assert time.process_time() - start < 0.4
    # experts live on one replica each, so their states are whole; everything else is shared by 64 ranks
    experts = 8 * 4 * 3 * 7168 * 2048
    assert found.roles["main_params"] == pytest.approx(4 * (experts + (found.elements - experts) / 64), rel=1e-3)


# --- what is neither a state nor an activation, held against measured rows


def test_measured_cases_are_met():
    """The goals of docs/memory_and_time.md on a sample of Megatron-LM's cases; `scripts/evidence/check_memory_rows.py` prints all of them."""
    from scripts.evidence import measured

    sample = [row for row in measured.rows() if not measured.apart(row)][::5]
    off = []
    for row in sample:
        run = measured.run_of(row)
        found = memory(run.policy, run.facts, rank=run.facts.parallel.world_size - 1)
        apart, small = abs(found.total - row["peak"]), row["peak"] <= 2 * 2**30
        off.append(apart <= (150 * 2**20 if small else 0.15 * row["peak"]))
    assert len(off) >= 40
    assert sum(off) >= 0.9 * len(off)


def test_no_published_run_is_told_that_it_does_not_fit():
    from scripts.evidence import published

    said = {}
    for row in published.priced():
        run = published.run_of(row)
        said[row["id"]] = verdict(memory(run.policy, run.facts), run.facts.machine.memory_bytes)
    wrong = {ident for ident, answer in said.items() if answer == "does not fit"}
    assert wrong == {ident for ident, _ in published.WRONG}
    assert sum(answer == "fits" for answer in said.values()) >= 0.6 * len(said)


def test_the_answer_follows_the_band():
    one = memory(policy("bf16"), facts())
    assert verdict(one, one.needed + one.band) == "fits"
    assert verdict(one, one.needed + one.band - 1) == "tight"
    assert verdict(one, one.needed - one.band) == "tight"
    assert verdict(one, one.needed - one.band - 1) == "does not fit"
    assert verdict(one, one.states - 1) == "does not fit"
    wide = dataclasses.replace(one, uncertainty=10.0)
    assert verdict(wide, one.states - 1) == "does not fit"  # states are exact, whatever the band


@pytest.mark.parametrize(("model", "more"), [
    ({"attention_backend": "unfused"}, True), ({"transformer_impl": "local"}, True), ({"cross_entropy_loss_fusion": True}, True),
    ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, False),
    ({"defer_embedding_wgrad_compute": True}, True), ({"cpu_offloading": True, "cpu_offloading_num_layers": 16}, False),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, False),
], ids=str)  # fmt: skip
def test_activations_follow_the_settings_that_change_them(model, more):
    plain, changed = facts(), facts(model=model)
    base, other = (memory(policy("bf16"), run).activations for run in (plain, changed))
    assert (other > base) == more
    assert other != base


@pytest.mark.parametrize("named", [{}, {"recompute_modules": None}, {"recompute_modules": ["core_attn"]}], ids=str)
def test_unfused_attention_keeps_its_scores(named):
    model = {"attention_backend": "unfused", "attention_dropout": 0.0}
    scores = 32 * 8192 * 8192 * 2
    extra = memory(policy("bf16"), facts(model=model)).activations - memory(policy("bf16"), facts()).activations
    assert extra == 33 * scores  # 32 layers, and the gradient of the one that computes
    again = facts(model=model | {"recompute_granularity": "selective"} | named)
    assert memory(policy("bf16"), again).activations - memory(policy("bf16"), facts()).activations == scores


def test_every_part_says_how_it_is_known():
    sizes = Parallel(world_size=64, expert=8, pipeline=4, tensor=2, sequence=True)
    split = {"num_layers_in_first_pipeline_stage": 16, "num_layers_in_last_pipeline_stage": 15}
    model = {"moe_token_dispatcher_type": "flex", "tp_comm_overlap": True}
    run = facts(64, shape=DEEPSEEK_V3, parallel=sizes, model=model | split)
    found = memory(policy("bf16"), run, rank=63)
    names = [part.name for part in (*found.overheads, *found.outside)]
    assert names == ["workspaces", "overlap buffers", "gather buffer", "pipeline buffers", "context", "fragmentation", "dispatch"]  # fmt: skip
    assert all(part.because and part.band > 0 and part.known in ("measured", "estimated") for part in found.overheads)
    rest = sum(part.bytes for part in (*found.overheads, *found.outside))
    assert found.needed == found.states + found.activations + rest


MIB = 2**20


def beside(run, rank=None, name="bf16"):
    return {part.name: part.bytes for part in memory(policy(name), run, rank=rank).overheads}


# torch: one workspace for the forward and one for the backward thread; Transformer Engine: one, four more for grouped products, three for overlap
WORKSPACES = {
    "Hopper": ("h100", {}, {}, 3 * 32 * MIB + 2**10),
    "Ampere": ("a100", {}, {}, 2 * (8 * MIB + 2**17) + 4 * MIB),
    "Ampere, deterministic": ("a100", {"deterministic_mode": True}, {}, 2 * 32 * MIB + 4 * MIB),
    "local modules": ("h100", {"transformer_impl": "local"}, {}, 2 * 32 * MIB),
    "overlapped tensor parallelism": ("h100", {"tp_comm_overlap": True}, {"tensor": 2, "sequence": True}, 6 * 32 * MIB + 4 * 2**10),
}  # fmt: skip


@pytest.mark.parametrize("case", WORKSPACES)
def test_workspaces_are_those_of_torch_and_transformer_engine(case):
    name, model, sizes, wanted = WORKSPACES[case]
    run = facts(8, parallel=Parallel(world_size=8, **sizes), model=model, machine=machine(name))
    assert beside(run)["workspaces"] == wanted


def test_fused_gradient_accumulation_leaves_one_tensor_for_each_shape_of_weight():
    run = facts(model={"gradient_accumulation_fusion": True})
    hidden, ffn, vocabulary = run.shape.hidden_size, run.shape.ffn_hidden_size, run.shape.vocab_size
    inner = run.shape.num_attention_heads * run.shape.kv_channels
    queries = (inner + 2 * run.shape.num_query_groups * run.shape.kv_channels, hidden)
    shapes = {queries, (hidden, inner), (2 * ffn, hidden), (hidden, ffn), (vocabulary, hidden)}
    assert beside(run)["gradient placeholders"] == 2 * sum(a * b for a, b in shapes)
    assert "gradient placeholders" not in beside(facts())


def test_a_stage_keeps_the_input_of_each_chunk_and_its_gradient():
    sizes = Parallel(world_size=8, pipeline=4, virtual_pipeline=2, tensor=2, sequence=True)
    run = facts(8, parallel=sizes)
    share = run.shape.seq_length * run.micro_batch_size * run.shape.hidden_size * 2 // 2
    # the very first chunk reads tokens
    assert beside(run, rank=0)["pipeline buffers"] == 2 * share
    assert beside(run, rank=7)["pipeline buffers"] == 4 * share
    # the output layer gathers the sequence into a buffer that stays
    assert beside(run, rank=7)["gather buffer"] == 2 * share
    assert "gather buffer" not in beside(run, rank=0)


def test_local_attention_multiplies_into_a_buffer_that_stays():
    run = facts(model={"transformer_impl": "local"})
    scores = run.micro_batch_size * run.shape.num_attention_heads * run.shape.seq_length**2
    assert beside(run)["gather buffer"] == scores * 2


def test_graphs_keep_hidden_states_and_masks_of_their_layers():
    run = facts(model={"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]})
    length, layers = run.shape.seq_length, run.shape.num_layers
    assert beside(run)["CUDA graphs"] == layers * run.micro_batch_size * length * (run.shape.hidden_size * 2 + length)


@pytest.mark.parametrize(("settings", "masks"), [
    ({"external_cuda_graph": True}, 1), ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, 1),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mlp"]}, 0), ({"cuda_graph_scope": "attn"}, None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, None), ({"cuda_graph_impl": "full_iteration"}, None),
], ids=str)  # fmt: skip
def test_graphs_keep_what_goes_into_captured_layers_and_nothing_of_others(settings, masks):
    run = facts(model=settings)
    length, each = run.shape.seq_length, run.shape.hidden_size * 2
    expected = None if masks is None else run.shape.num_layers * run.micro_batch_size * length * (each + masks * length)
    assert beside(run).get("CUDA graphs") == expected


def test_offloaded_modules_keep_their_inputs_on_the_host():
    model = {"attention_backend": "unfused", "attention_dropout": 0.0}
    there = memory(policy("bf16"), facts(model=model)).activations
    run = facts(model=model | {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]})
    scores = run.shape.num_attention_heads * run.shape.seq_length**2 * run.micro_batch_size * 2
    # of 32 layers the scores of two stay: of the one that computes, and of the one on its way
    assert there - memory(policy("bf16"), run).activations > 30 * scores


@pytest.mark.parametrize(("settings", "said"), [
    ({"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, True), ({"cpu_offloading": True, "cpu_offloading_num_layers": 4}, True),
    ({"offload_modules": ["core_attn"]}, False), ({}, False),
], ids=str)  # fmt: skip
def test_copies_of_offloaded_activations_take_no_time_and_that_is_said(settings, said):
    run = facts(model=settings)
    assert any("to the host and back" in words and "slower" in words for words in left_out_of_time(run)) is said
    assert not left_out_of_memory(run)


def test_muon_keeps_one_momentum_of_matrices_and_both_moments_of_the_rest():
    """megatron-core 0.16.1 over BF16 parameters: 2 + 4 (gradient) + 4 (main) + 4 (momentum) bytes of a matrix, 4 more of everything else."""
    run = dataclasses.replace(facts(8), optimizer=OptimizerFacts(name="muon"))
    sizes = {p.name: p.weight for chunk in parameters(run, Coordinates.of(0, run.parallel)) for p in chunk}
    hidden = [w for n, w in sizes.items() if not n.startswith(("embedding.", "output_layer."))]
    matrices = sum(w.elements for w in hidden if len(w.shape) == 2)
    rest = sum(w.elements for w in sizes.values()) - matrices
    assert 0 < rest < matrices
    held = memory(policy("bf16"), run)
    assert (held.roles["exp_avg"], held.roles["exp_avg_sq"]) == (4 * (matrices + rest), 4 * rest)
    assert held.exact
    assert any("Muon" in words for words in left_out_of_memory(run))


def test_soap_keeps_both_moments_and_four_square_factors_of_a_matrix():
    """Emerging-Optimizers 0.3.0 soap/soap.py: exp_avg, exp_avg_sq, L and Q_L of the rows, R and Q_R of the columns, all FP32; the rest is Adam's."""
    held = memory(policy("bf16"), facts(1, shape=SMALL, optimizer=OptimizerFacts(name="soap")))
    matrices = [(192, 64), (64, 64), (256, 64), (64, 256)]
    assert held.roles["factors"] == 2 * sum(2 * 4 * (rows**2 + columns**2) for rows, columns in matrices)
    assert held.roles["exp_avg"] == held.roles["exp_avg_sq"] == held.roles["main_params"]
    assert any("SOAP" in words for words in left_out_of_memory(facts(1, optimizer=OptimizerFacts(name="soap"))))


@pytest.mark.parametrize(("rank", "kept"), [(0, (165_120, 165_120, 17_664)), (1, (247_040, 247_040, 1_280))])
def test_dist_muon_deals_whole_parameters_to_two_ranks(rank, kept):
    """Bytes of the live tensors that megatron-core 0.16.1's dist_muon kept on two ranks, with Emerging-Optimizers v0.1.0, after two steps of this model."""
    parts = {"shape": SMALL, "parallel": Parallel(world_size=2), "optimizer": OptimizerFacts(name="dist_muon")}
    held = memory(policy("bf16"), facts(**parts), rank=rank)
    assert tuple(held.roles[name] for name in ("main_params", "exp_avg", "exp_avg_sq")) == kept


def test_dist_muon_deals_nothing_where_one_rank_has_a_dense_weight():
    """megatron-core 0.16.1 optimizer/layer_wise_optimizer.py shard_params returns where the data-parallel group is one rank, whatever replicas experts have."""
    shape = dataclasses.replace(SMALL, experts=4, expert_ffn_hidden_size=64, expert_layers=(True,) * 2, expert_topk=2)
    parallel = Parallel(world_size=4, tensor=4, expert=2, expert_tensor=1)
    assert (parallel.data, parallel.expert_data) == (1, 2)
    for rank in range(4):
        both = (OptimizerFacts(name=name) for name in ("dist_muon", "muon"))
        runs = (facts(1, parallel=parallel, shape=shape, optimizer=one) for one in both)
        sharded, whole = (memory(policy("bf16"), run, rank=rank).roles for run in runs)
        assert sharded["exp_avg"] == whole["exp_avg"] > 0


@pytest.mark.parametrize(("core", "name", "trainer"), [("0.16.1", "muon", "muon"), ("0.20.0", "muon", "adam"), ("0.20.0", "soap", "soap")])  # fmt: skip
def test_a_mixers_first_projection_is_adams_where_its_core_keeps_it_from_muon(core, name, trainer):
    """megatron-core 0.20 ssm/mamba_mixer.py sets use_muon=False on in_proj, which its Muon alone asks for."""
    assert trained_by(name, "decoder.layers.0.mixer.in_proj.weight", 2, core=core) == trainer
    assert trained_by(name, "decoder.layers.0.mixer.out_proj.weight", 2, core=core) == name


def test_memory_of_a_gpu_says_that_it_was_counted_as_emulated():
    for realization, said in (("emulated", True), ("native", False)):
        run = facts(1, realization=realization, machine=machine("b200"))
        assert any("emulate: true" in words for words in left_out_of_memory(run)) is said


@pytest.mark.parametrize("fraction", [None, 0.0, 0.25, 1.0])
def test_states_on_the_host_are_not_counted_and_their_absence_is_said(fraction):
    """A share of the 4 + 4 + 4 bytes of each of Llama-3-8B's weights, over 8 ranks (hybrid_optimizer.py); its default is 0.0: none."""
    lower, settings = (
        {"use_precision_aware_optimizer": True, "store_param_remainders": False},
        {"optimizer_offload_fraction": fraction},
    )
    plain = facts(8)
    away = facts(8, optimizer=OptimizerFacts(distributed=True, cpu_offload=True, settings=settings))
    here, there = (memory(policy("bf16", **lower), run) for run in (plain, away))
    assert here.states - there.states == pytest.approx((fraction or 0) * 12 * total_parameters(plain) / 8, rel=1e-3)
    assert any("on the host" in words for words in left_out_of_time(away)) is bool(fraction)
    assert any("on the host" in words for words in left_out_of_memory(away)) is bool(fraction)
    assert there.exact is not bool(fraction)
    # where offload is refused (offload-on-a-sharded-engine) the states stay
    refused, kept = (dataclasses.replace(run, engine="megatron_fsdp") for run in (away, plain))
    assert memory(policy("bf16"), refused).states == memory(policy("bf16"), kept).states


def test_what_is_smaller_than_it_is_counted_never_certainly_exceeds_a_memory(cli):
    """Sequences of several lengths may all be as long as they are counted; layers of several shapes are smaller, their states too."""
    batches = ["train.micro_batch_size=16", "train.global_batch_size=128", "ddp.use_distributed_optimizer=true"]
    settings = ["--config", "llama3_8b", "--target", "h100", "--world-size", "8", *batches, "--json"]
    assert "does not fit" in json.loads(cli("check", *settings, code=1))["verdict"]
    lengths = ["model.variable_seq_lengths=true", "model.moe_token_dispatcher_type=alltoall"]
    found = json.loads(cli("check", *settings, *lengths, code=1))
    assert "does not fit" in found["verdict"]
    assert any("sequences of several lengths" in note and "at most as large" in note for note in found["notes"])
    several = facts(1, optimizer=OptimizerFacts(), model={"heterogeneous_block_specs": True})
    one = memory(policy("bf16"), several)
    assert one.states > H100.memory_bytes
    assert verdict(one, H100.memory_bytes) == "tight"


def test_a_verdict_beside_another_ranks_bytes_says_whose_it_is(cli):
    asked = ["memory", "--config", "llama3_70b", "--world-size", "64", "--target", "h100"]
    said = {}
    for rank in ("0", "63"):
        said[rank] = " ".join(cli(*asked, "--rank", rank).split())
    other = [text for text in said.values() if "the fullest, needs" in text]
    assert len(other) == 1
    assert "; rank " in other[0]


@pytest.mark.parametrize(("config", "basis"), [("llama3_8b", "measured on Mega"), ("nemotron_h_8b", "measured on 8 ")])
def test_activations_say_which_models_were_measured(cli, config, basis):
    printed = cli("memory --config", config, "--target", "h100", code=1)
    row = next(line for line in printed.splitlines() if line.startswith("activations"))
    assert row.split("  ")[-1].startswith(basis)


@pytest.mark.parametrize(("name", "rows", "columns", "scales"), [
    ("tensorwise", 256, 512, 1),
    ("blockwise", 256, 512, 2 * 4 + 4 * 4),  # 2 x 4 blocks of 128x128 by rows, 4 x 2 padded to 4 x 4 by columns
    ("mxfp8", 256, 512, 256 * 16 + 512 * 8),  # 256 rows of 16 scales; 512 columns of 8
    ("nvfp4", 100, 48, 128 * 4 + 128 * 8),  # 100 rows padded to 128 and 3 scales padded to 4, 48 columns padded to 128 and 7 scales to 8
])  # fmt: skip
def test_scales_of_a_weight_are_counted_with_their_padding(name, rows, columns, scales):
    assert weight_scales(scaling(name), rows, columns) == scales
