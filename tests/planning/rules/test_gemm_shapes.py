from __future__ import annotations

import dataclasses

import pytest

from mpbridge.common.facts import ModelShape, Parallel, RunFacts
from mpbridge.common.machines import machine
from mpbridge.planning.rules.gemm_shapes import _field, gemms, lint, spans, token_multiple, vocabulary_multiple
from mpbridge.precision.registry import recipes
from mpbridge.precision.resolve import resolve
from mpbridge.precision.scalings import SCALINGS

GPT = ModelShape(
    num_layers=4, hidden_size=512, num_attention_heads=8, ffn_hidden_size=2048, num_query_groups=8, kv_channels=64, vocab_size=1024, seq_length=256
)  # fmt: skip
H100, B200 = machine("h100"), machine("b200")


def policy(name, **changes):
    return resolve(recipes[name].make().derive(**changes))


def facts(shape=GPT, gpu=B200, **changes):
    return RunFacts(shape=shape, machine=gpu, **changes)


def findings(name, run, level="required"):
    return {(f.module, f.dimension, f.value, f.multiple) for f in lint(policy(name), run) if f.level == level}


def test_a_well_shaped_model_has_nothing_to_say():
    for name in ("fp8_ds", "fp8_sc", "mxfp8", "nvfp4"):
        assert not findings(name, facts())
    assert lint(policy("bf16"), facts()) == ()


# (recipe, GPU, change of the shape, module, dimension, value, multiple): Transformer Engine 2.11's assertions
WRONG = [
    ("fp8_ds", H100, {"ffn_hidden_size": 2056}, "mlp.linear_fc1", "out", 2056, 16),
    ("fp8_ds", H100, {"ffn_hidden_size": 2056}, "mlp.linear_fc2", "in", 2056, 16),
    ("fp8_ds", H100, {"seq_length": 264}, "mlp.linear_fc1", "tokens", 264, 16),
    ("fp8_ds", B200, {"seq_length": 260}, "mlp.linear_fc1", "tokens", 260, 8),
    ("mxfp8", B200, {"ffn_hidden_size": 2064}, "mlp.linear_fc1", "out", 2064, 32),
    ("mxfp8", B200, {"seq_length": 272}, "self_attention.linear_qkv", "tokens", 272, 32),
    ("nvfp4", B200, {"seq_length": 264}, "self_attention.linear_qkv", "tokens", 264, 16),
    ("fp8_sc", H100, {"ffn_hidden_size": 2056}, "mlp.linear_fc2", "in", 2056, 16),
    ("mxfp8", B200, {"num_query_groups": 1, "kv_channels": 72, "num_attention_heads": 8}, "self_attention.linear_qkv", "out", 720, 32),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gpu", "change", "module", "dimension", "value", "multiple"), WRONG)
def test_required_sizes(name, gpu, change, module, dimension, value, multiple):
    run = facts(dataclasses.replace(GPT, **change), gpu)
    assert (module, dimension, value, multiple) in findings(name, run)


def test_tensor_wise_tokens_may_be_a_multiple_of_eight_on_data_centre_blackwell_only():
    odd = dataclasses.replace(GPT, seq_length=264)
    assert not findings("fp8_ds", facts(odd, B200))
    assert findings("fp8_ds", facts(odd, H100))
    assert findings("fp8_ds", facts(odd, machine("rtx5090")))


def test_sizes_are_those_of_a_tensor_parallel_rank():
    run = facts(dataclasses.replace(GPT, ffn_hidden_size=2048 + 128), parallel=Parallel(world_size=8, tensor=8))
    assert ("mlp.linear_fc1", "out", 272, 32) in findings("mxfp8", run)
    assert ("mlp.linear_fc2", "in", 272, 32) in findings("mxfp8", run)
    found = next(f for f in lint(policy("mxfp8"), run) if f.module == "mlp.linear_fc1" and f.level == "required")
    assert "model.ffn_hidden_size" in found.cure
    assert "8 tensor-parallel ranks" in found.cure


# (side of the GEMM, ranks): only a side that is split speaks of ranks, and of experts' own number of them
@pytest.mark.parametrize(
    ("change", "module", "side", "parallel", "cure"),
    [
        ({"hidden_size": 528}, "mlp.linear_fc1", "in", {"tensor": 2}, "528 to 544"),
        ({"ffn_hidden_size": 4128}, "mlp.linear_fc1", "out", {"tensor": 2}, "2064 to 2080 on each of 2 tensor-parallel ranks"),
        ({"ffn_hidden_size": 4128}, "mlp.linear_fc2", "in", {"tensor": 2}, "2064 to 2080 on each of 2 tensor-parallel ranks"),
        ({"hidden_size": 528}, "mlp.linear_fc2", "out", {"tensor": 2}, "528 to 544"),
        ({"ffn_hidden_size": 2064}, "mlp.linear_fc2", "in", {}, "2064 to 2080"),
    ],
)  # fmt: skip
def test_a_cure_speaks_of_ranks_where_they_split_the_size(change, module, side, parallel, cure):
    run = facts(dataclasses.replace(GPT, **change), parallel=Parallel(world_size=8, **parallel))
    required = {(f.module, f.dimension): f for f in lint(policy("mxfp8"), run) if f.level == "required"}
    found = required[module, side]
    assert found.cure.split(": ", 1)[1].startswith(cure)
    assert ("ranks" in found.cure) == ("ranks" in cure)


def test_a_mixers_projections_name_their_own_sizes():
    assert "mamba_state_dim" in _field("mixer.in_proj", "out")
    assert "mamba_num_heads" in _field("mixer.out_proj", "in")
    assert _field("mixer.in_proj", "in") == _field("mixer.out_proj", "out") == "model.hidden_size"


def test_packed_sequences_with_sequence_parallelism_need_a_multiple_per_rank():
    """ms-swift#9723: MXFP8 with a shard of 7984 tokens."""
    run = facts(dataclasses.replace(GPT, seq_length=7984 * 4), parallel=Parallel(world_size=4, tensor=4, sequence=True))
    assert ("self_attention.linear_qkv", "tokens of a sequence shard", 7984, 32) in findings("mxfp8", run)
    assert token_multiple(policy("mxfp8"), run) == 128
    row = {f.module for f in lint(policy("mxfp8"), run) if f.level == "gatherable"}
    assert row == {"self_attention.linear_proj", "mlp.linear_fc2"}


def test_userbuffers_take_mxfp8_shards_in_whole_tiles():
    run = facts(dataclasses.replace(GPT, seq_length=192), parallel=Parallel(world_size=2, tensor=2, sequence=True))
    overlapped = dataclasses.replace(run, model={"tp_comm_overlap": True})
    wanted = ("self_attention.linear_qkv", "tokens of a sequence shard", 96, 128)
    assert wanted in findings("mxfp8", overlapped)
    assert token_multiple(policy("mxfp8"), overlapped) == 256
    assert not findings("mxfp8", run)
    assert not findings("nvfp4", overlapped)


def test_blockwise_shards_want_whole_blocks_of_both_sides():
    odd = dataclasses.replace(GPT, hidden_size=576, num_attention_heads=9, num_query_groups=9)
    run = facts(odd, H100, parallel=Parallel(world_size=3, tensor=3, sequence=True), micro_batch_size=3)
    assert ("mlp.linear_fc1", "in", 576, 128) in findings("fp8_sc", run)
    assert not findings("fp8_sc", facts(odd, H100))


def test_context_parallelism_divides_the_tokens():
    run = facts(dataclasses.replace(GPT, seq_length=288), parallel=Parallel(world_size=2, context=2))
    assert {g.tokens for g in gemms(policy("mxfp8"), run)} == {144}
    assert ("mlp.linear_fc1", "tokens", 144, 32) in findings("mxfp8", run)


def test_only_what_is_quantized_is_looked_at():
    odd = dataclasses.replace(GPT, ffn_hidden_size=2056)
    kept = resolve(recipes["fp8_sc"].make().derive(modules={"mlp.*": "bf16"}))
    assert not [f for f in lint(kept, facts(odd)) if f.level == "required"]
    edges = next(g for g in gemms(policy("fp8_cs"), facts()) if g.module == "mlp.linear_fc1")
    assert edges.layers == (1, 2)


def test_experts_tokens_are_a_kind_of_their_own():
    layers = (False, True, True, True)
    moe = dataclasses.replace(GPT, experts=8, expert_ffn_hidden_size=256, expert_layers=layers, expert_topk=2)
    for name, multiple in (("mxfp8", 32), ("fp8_cs", 16), ("nvfp4", 128)):
        found = [f for f in lint(policy(name), facts(moe)) if f.level == "experts"]
        assert [f.multiple for f in found] == [multiple]
        assert "moe_router_padding_for_quantization" in found[0].cure
    wrong = findings("mxfp8", facts(dataclasses.replace(moe, expert_ffn_hidden_size=240)))
    assert ("mlp.experts.local_experts.0.linear_fc1", "out", 240, 32) in wrong


def test_latent_attention_names_its_ranks():
    latent = {"q_lora_rank": 200, "kv_lora_rank": 512, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64}
    run = facts(dataclasses.replace(GPT, latent_attention=latent))
    found = [f for f in lint(policy("mxfp8"), run) if f.level == "required"]
    padded = {(f.module.removeprefix("self_attention."), f.dimension, f.pad) for f in found}
    assert padded == {("linear_q_down_proj", "out", 24), ("linear_q_up_proj", "in", 24)}
    assert all("q_lora_rank" in f.cure for f in found)


def test_fast_is_advice_and_says_how_much():
    run = facts(dataclasses.replace(GPT, ffn_hidden_size=2080, vocab_size=1000))
    advice = {(f.module, f.dimension, f.pad) for f in lint(policy("mxfp8"), run) if f.level == "fast"}
    assert ("mlp.linear_fc1", "out", 96) in advice
    assert ("output_layer", "vocabulary", 24) in advice
    assert vocabulary_multiple(facts(parallel=Parallel(world_size=4, tensor=4))) == 512


def test_small_gemms_are_pointed_at_where_fp8_does_not_pay():
    small = {f.module for f in lint(policy("fp8_ds"), facts(gpu=H100)) if f.dimension == "size"}
    assert small == {"self_attention.linear_proj", "mlp.linear_fc2"}


def test_spans_are_short():
    assert spans((0, 1, 2, 3, 7)) == "0-3, 7"
    assert spans(()) == ""


def test_every_scaling_has_a_need_with_its_source():
    assert {"delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4", "custom"} <= set(SCALINGS)
    engines = [row for row in SCALINGS.values() if row.hardware.library == "transformer_engine"]
    assert all("Transformer Engine 2.11" in row.sizes.source for row in engines)
