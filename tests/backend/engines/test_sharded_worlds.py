"""FSDP2 and Megatron-FSDP at two processes, the wire and the ranks' agreement: one launch, many questions (two_ranks.py)."""

import pathlib
from typing import Any

import pytest

from mpbridge.common.probe import installed
from mpbridge.precision.megatron_spec.versions import BEFORE_017
from tests.backend.engines import two_ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> Any:
    return two_ranks.observed(pathlib.Path(tmp_path_factory.mktemp("two")))


def test_every_engine_trains_what_ddp_trains(two: Any) -> None:
    for rank in two["losses"]:
        for engine in ("fsdp2", "megatron_fsdp", "optim", "optim_grads"):
            for ours, reference in zip(rank[engine], rank["mcore"], strict=True):
                # one reduction order apart: the last digits of FP32
                assert ours == pytest.approx(reference, rel=1e-6)


def test_gradients_without_an_update_are_the_next_steps_and_each_element_is_counted_on_one_rank(two: Any) -> None:
    for rank in two["losses"]:
        for first, again, step, _ in rank.values():
            assert first == pytest.approx(step, rel=1e-6)
            assert again == pytest.approx(step, rel=1e-6)


def test_a1_storage_and_compute_are_set_apart_whatever_is_reduced(two: Any) -> None:
    for rank in two["compute_and_wire"]:
        for seen in rank.values():
            assert {seen["weight"], seen["input"], seen["output"]} == {"torch.bfloat16"}
            assert {seen["storage"], seen["grad"], seen["moment"]} == {"torch.float32"}
            assert seen["rows"] == "128", "half of the 256 rows on each rank"


def test_a2_reduction_is_fp32_by_default_and_bf16_on_request_as_seen_in_the_reduce_scatter(two: Any) -> None:
    for rank in two["compute_and_wire"]:
        assert rank["fp32"]["reduced"] == ["fp32"]
        assert rank["bf16"]["reduced"] == ["bf16"]
        assert rank["fp32"]["loss"] != rank["bf16"]["loss"], "and it changes numbers"


TABLE = {  # memory_table.md: row -> params, grads, main, m, v summed over both ranks
    "fsdp2/fp32": (4, 4, 0, 4, 4),
    "fsdp2/fp32_params_bf16_compute": (4, 4, 0, 4, 4),  # 13, pattern B
    "fsdp2/bf16_params_fp32_states": (2, 2, 2, 4, 4),  # 14, pattern A
    "fsdp2/bf16_mixed": (2, 2, 4, 4, 4),  # 15
    "fsdp2/full_bf16": (2, 2, 0, 2, 2),  # 17
    "megatron_fsdp/bf16_megatron_fsdp": (2, 4, 4, 4, 4),  # 20
    "megatron_fsdp/bf16_mixed": (2, 4, 4, 4, 4),
}


@pytest.mark.parametrize("row", TABLE)
def test_bytes_a_parameter_over_both_ranks(two: Any, row: str) -> None:
    for rank in two["bytes_a_parameter"]:
        # padding of uneven shards is not counted: Live tensors are the parameters' own rows
        assert tuple(rank[row].values()) == pytest.approx(TABLE[row])


@pytest.mark.parametrize("kind", ["bf16_params_fp32_states", "fp32_params_bf16_compute", "bf16_megatron_fsdp"])
def test_g6_a_resumed_run_equals_the_straight_one_to_the_bit(two: Any, kind: str) -> None:
    for rank in two["resumed"]:
        assert rank[kind]["same"] == [True, True]


def test_muon_on_two_ranks_is_torchs_on_whole_matrices(two: Any) -> None:
    for apart, matrices, audited in two["muon"]:
        assert matrices == 8
        assert audited == {"trained by": ["16 by Muon, 22 by Adam", True], "newton-schulz": ["bf16", True]}
        assert apart < 1e-5  # FP32 additions; Newton-Schulz in FP32, or of each rank's rows, is 1e-2 and more away


def test_g6_pattern_a_writes_bf16_weights_and_pattern_b_fp32(two: Any) -> None:
    for rank in two["resumed"]:
        assert rank["bf16_params_fp32_states"]["model"] == ["torch.bfloat16"]
        assert rank["fp32_params_bf16_compute"]["model"] == ["torch.float32"]


def test_rank_with_another_policy_is_named_on_every_rank(two: Any) -> None:
    for rank in two["disagreement"]:
        assert rank["same"], "equal policies agree"
        assert "rank 1" in rank["text"]
        assert "reduce: 'bf16' instead of 'fp32'" in rank["text"]


def test_fault_on_one_rank_stops_all_of_them(two: Any) -> None:
    for rank in two["broken_on_one_rank"]:
        assert not rank["ok"]
        assert rank["found"] == "bf16/fp32"
        assert len(rank["offenders"]) == 1


def test_audit_sees_the_dtype_that_a_reduce_scatter_really_carries(two: Any) -> None:
    for rank in two["wire_audited"]:
        # and the gradients that the optimizer reads are BF16 numbers where FP32 was promised
        assert rank["narrow"] == ["fp32", "bf16", ["wire: gradients", "gradients"]]


def test_activations_that_experts_reduce_are_not_taken_for_gradients(two: Any) -> None:
    for rank in two["wire_audited"]:
        assert rank["experts"] == ["fp32", "fp32", []]


@pytest.mark.parametrize("engine", ["fsdp2", "megatron_fsdp"])
def test_m5_norm_and_clipping_are_of_the_gradient_that_the_optimizer_reads(two: Any, engine: str) -> None:
    for rank in two["norms"]:
        assert rank[engine]["reported"] > 1.0
        # clipped by hand from the shards' gradients as they stand after the step; BF16 ones to their three digits
        assert rank[engine]["clipped"] == pytest.approx(0.5, rel=1e-3)


def test_unsharded_megatron_fsdp_is_refused_because_its_reduction_skips_every_buffer(two: Any) -> None:
    skipped, reduced = [[0.0] * 4, [1.0] * 4], [[1.0] * 4] * 2
    # 0.20 reduces, and counts every replica in the norm: the rule's second reason
    assert two["unsharded_modes"] == (skipped if BEFORE_017.holds(installed().megatron_core) else reduced)
