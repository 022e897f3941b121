"""What holds on every machine."""

import math
import os
import sys
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch.distributed import distributed_c10d
from transformer_engine.common import recipe
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

from mpbridge.common.errors import Refused
from mpbridge.te_cpu import attention
from mpbridge.te_cpu.operands import codes_at_limit
from mpbridge.te_cpu.played import now
from mpbridge.training.process import process_group

BLACKWELL = now().capability >= (10, 0)
E4M3 = tex.DType.kFloat8E4M3
RECIPES = {
    "delayed": (recipe.DelayedScaling, 0.08),
    "current": (recipe.Float8CurrentScaling, 0.08),
    "blockwise": (recipe.Float8BlockScaling, 0.05),
    **({"mxfp8": (recipe.MXFP8BlockScaling, 0.05), "nvfp4": (recipe.NVFP4BlockScaling, 0.25)} if BLACKWELL else {}),
}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_layer_and_its_gradients_are_near_those_in_fp32(name: str) -> None:
    made, bound = RECIPES[name]
    torch.manual_seed(0)
    layer = te.Linear(256, 128, bias=True, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(64, 128, dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=made()):
        y = layer(x)
    y.backward(dy)
    x32 = x.detach().float().requires_grad_()
    w32, b32 = layer.weight.detach().float().requires_grad_(), layer.bias.detach().float().requires_grad_()
    y32 = torch.nn.functional.linear(x32, w32, b32)
    y32.backward(dy.float())
    for found, expected in ((y, y32), (x.grad, x32.grad), (layer.weight.grad, w32.grad)):
        # quantized, and so not equal, but no further away than its formats allow (E5M2 gradients: 2 bits of mantissa)
        assert 1e-4 < relative(found, expected) < bound
    assert relative(layer.bias.grad, b32.grad) < 0.01


def test_bf16_layers_equal_torchs() -> None:
    torch.manual_seed(0)
    how = {"activation": "swiglu", "normalization": "RMSNorm", "params_dtype": torch.float32, "device": "cuda"}
    layer = te.LayerNormMLP(128, 256, **how)
    x = torch.randn(16, 128)
    normal = torch.nn.functional.rms_norm(x, [128], layer.layer_norm_weight, layer.eps)
    hidden = torch.nn.functional.linear(normal, layer.fc1_weight, layer.fc1_bias)
    gate, up = hidden.chunk(2, -1)
    expected = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, layer.fc2_weight, layer.fc2_bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_codes_are_those_of_torchs_own_cast() -> None:
    x = torch.randn(48, 64, dtype=torch.bfloat16) * 3
    quantizer = Float8Quantizer(scale=torch.tensor([2.0]), amax=torch.zeros(1), fp8_dtype=tex.DType.kFloat8E4M3)
    made = quantizer(x)
    expected = (x.float() * 2.0).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(made._data, expected)
    assert float(quantizer.amax) == float(x.abs().max())
    assert torch.equal(made.dequantize(), (expected.view(torch.float8_e4m3fn).float() / 2).bfloat16())


def test_transposes_are_stored_where_the_machine_needs_them() -> None:
    quantizer = Float8CurrentScalingQuantizer(
        fp8_dtype=E4M3, device=torch.device("cuda"), rowwise=True, columnwise=True
    )
    made = quantizer(torch.randn(32, 64, dtype=torch.bfloat16))
    if BLACKWELL:
        assert made._transpose is None
    else:
        assert torch.equal(made._transpose, made._data.t())


def test_a_missing_function_names_itself_and_its_caller() -> None:
    with pytest.raises(Refused, match=r"transformer_engine_torch\.no_such_kernel .*kernels\.py, line \d+"):
        tex.no_such_kernel(1)
    with pytest.raises(Refused, match=r"fused_attn_fwd runs on a GPU only: .*unfused"):
        tex.fused_attn_fwd()


def test_a_caller_in_another_folder_by_our_name_is_named() -> None:
    code = compile("tex.no_such_kernel(1)", "/home/user/mpbridge/mine/train.py", "exec")
    with pytest.raises(Refused, match=r"called from /home/user/mpbridge/mine/train\.py, line 1\)"):
        exec(code, {"tex": tex})


@pytest.mark.parametrize(
    "made", [lambda **kwargs: te.Linear(16, 16, **kwargs), lambda **kwargs: te.GroupedLinear(2, 16, 16, **kwargs)]
)
def test_a_device_given_by_its_index_is_the_played_one(made) -> None:
    layer = made(device=torch.cuda.current_device())
    assert {str(weight.device) for weight in layer.parameters()} == {"cpu"}


def test_userbuffers_are_refused_when_they_are_made() -> None:
    assert isinstance(tex.CommOverlap, type)
    with pytest.raises(Refused, match="tp_comm_overlap"):
        tex.CommOverlap([1], torch.uint8)


@pytest.mark.parametrize("code", ["kFloat8E4M3", "kFloat8E5M2"])
def test_codes_at_the_formats_limit_are_found_and_e5m2_is_not_multiplied_by_itself(code) -> None:
    kind = getattr(te.DType if hasattr(te, "DType") else tex.DType, code)
    quantizer = Float8CurrentScalingQuantizer(fp8_dtype=kind, device=torch.device("cuda"))
    x = torch.full((16, 16), 0.25, dtype=torch.bfloat16)
    x[3, 5] = -2.0
    made = quantizer(x)
    top = codes_at_limit(made, x.shape, column=False)
    assert top is not None
    assert top.nonzero().tolist() == [[3, 5]]
    product = te.cpp_extensions.general_gemm
    if code == "kFloat8E4M3":
        assert product(made, made, out_dtype=torch.bfloat16)[0][0, 0] == 1.0
    else:
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_SUPPORTED"):
            product(made, made, out_dtype=torch.bfloat16)


def test_cuda_graphs_are_refused_where_they_are_made() -> None:
    assert isinstance(torch.cuda.CUDAGraph, type)
    for name in ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle"):
        with pytest.raises(Refused, match=rf"torch\.cuda\.{name} runs on a GPU only: .*kernels\.py, line \d+"):
            getattr(torch.cuda, name)()


def test_a_refused_recording_leaves_nothing_behind() -> None:
    """Before it makes a graph, Transformer Engine says that it records and puts its modules' calls into an autocast of their own."""
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
    graph = sys.modules["transformer_engine.pytorch.graph"]
    with pytest.raises(Refused, match="make_graphed_callables"):
        te.make_graphed_callables(layer, (torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True),))
    assert te.Linear.__call__ is torch.nn.Module.__call__
    graph.set_capture_start()  # as megatron-core does before it makes a graph
    with pytest.raises(Refused, match="CUDAGraph"):
        torch.cuda.CUDAGraph()
    assert not graph.is_graph_capturing()


def test_the_machine_answers() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_capability() == now().capability
    assert torch.cuda.get_device_properties(0).total_memory == now().machine.memory_bytes
    assert torch.zeros(1, device="cuda").is_cuda
    for ask in (torch.cuda.mem_get_info, torch.cuda.memory.mem_get_info):
        free, total = ask()
        # what is free is this machine's: torch's test helpers would else start a test of 60 GB
        assert total == now().machine.memory_bytes
        assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_sgd_in_fp16_rounds_as_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.rand(4096, dtype=torch.float16)) for _ in range(2))
    theirs.data.copy_(ours.data)
    fused = te.optimizers.FusedSGD([ours], lr=0.25, momentum=0.125)
    reference = torch.optim.SGD([theirs], lr=0.25, momentum=0.125)  # powers of two: its extra roundings are exact
    for _ in range(5):
        ours.grad = torch.rand_like(ours)
        theirs.grad = ours.grad.clone()
        fused.step()
        reference.step()
        assert torch.equal(ours, theirs)


def test_adam_with_sixteen_bit_remainders_is_adam_in_fp32() -> None:
    torch.manual_seed(0)
    start = torch.randn(512)
    plain, split = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.bfloat16())
    how = {"lr": 1e-2, "weight_decay": 0.1}
    reference = torch.optim.AdamW([plain], **how)
    fused = te.optimizers.FusedAdam([split], **how, master_weights=True, store_param_remainders=True)
    plain.data.copy_(split.data.float())
    for _ in range(5):
        plain.grad = torch.randn(512)
        split.grad = plain.grad.bfloat16()
        plain.grad.copy_(split.grad.float())
        reference.step()
        fused.step()
    whole = fused.get_unscaled_state(split, "master_param")
    if whole.dtype == torch.int16:
        low, high = whole.int(), split.data.view(torch.int16).int()
        whole = ((high - (low < 0).int()) << 16 | (low & 0xFFFF)).view(torch.float32)
    torch.testing.assert_close(whole, plain.data, rtol=2e-6, atol=2e-7)


def test_the_update_of_fp8_weights_takes_no_remainders_for_main_weights() -> None:
    quantizer = Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3)
    weight = torch.nn.Parameter(quantizer(torch.ones(16, 16, dtype=torch.bfloat16)))
    weight.decoupled_grad = torch.ones(16, 16)
    how = {"master_weights": True, "use_decoupled_grad": True}
    te.optimizers.FusedAdam([weight], **how, store_param_remainders=False).step()
    with pytest.raises(RuntimeError, match=r"main weight has dtype torch.int16"):
        te.optimizers.FusedAdam([weight], **how, store_param_remainders=True).step()


def test_cross_entropy_and_its_gradient_are_torchs() -> None:
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    torch.manual_seed(0)
    logits = torch.randn(2, 3, 50, requires_grad=True)
    target = torch.randint(0, 50, (2, 3))
    target[0, 0] = -100
    how = {"reduction": "none", "ignore_index": -100, "label_smoothing": 0.1}
    expected = torch.nn.functional.cross_entropy(logits.view(-1, 50), target.view(-1), **how)
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    own = logits.detach().clone().requires_grad_()
    found = parallel_cross_entropy(own, target, 0.1)
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), own)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.since((2, 20))
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_routing_map_in_bits_says_what_the_one_in_bytes_does(function) -> None:
    from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss, fused_topk_with_score_function

    torch.manual_seed(0)
    start, weight = torch.randn(2, 7, 13), torch.randn(2, 7, 13)
    maps, gradients = [], []
    for layout in ("bytemap", "bitmap_u8"):
        logits = start.clone().requires_grad_()
        how = (logits, 3, False, None, None, 1.5, function, None)
        probs, routed = fused_topk_with_score_function(*how, routing_map_format=layout)
        (gradient,) = torch.autograd.grad((probs * weight).sum(), logits)
        scored, _ = fused_compute_score_for_moe_aux_loss(logits, 3, function, routing_map_format=layout)
        maps.append((routed, scored))
        gradients.append(gradient)
    for in_bytes, in_bits in zip(*maps, strict=True):
        assert in_bytes.shape == (2, 7, 13)
        assert int(in_bytes.sum()) == 2 * 7 * 3
        assert numpy.packbits(in_bytes.numpy(), axis=-1, bitorder="little").tolist() == in_bits.tolist()
    assert gradients[0].count_nonzero()
    assert torch.equal(*gradients)


@pytest.mark.since((2, 20))
@pytest.mark.parametrize("way", ["two_kernel", "fused_atomic"])
def test_balancing_by_quantiles_counts_the_bias_that_each_expert_lacks(way) -> None:
    from transformer_engine.pytorch.router import fused_topk_with_score_function

    torch.manual_seed(0)
    logits = torch.randn(2, 5, 8).round()  # equal scores among them: the lower number is chosen
    bias, bounds = torch.tensor([0.0, 0.125]).repeat_interleave(4), torch.tensor([-0.25, 0.25])
    counted, expected = torch.zeros(8, 4, dtype=torch.int32), numpy.zeros((8, 4), dtype=int)
    how = {"qb_histogram": counted, "qb_bin_bounds": bounds, "qb_histogram_mode": way}
    for _ in range(2):  # the counts of two micro-batches
        probs, routed = fused_topk_with_score_function(logits, 3, False, None, None, 2.0, "sigmoid", bias, **how)
    for score, prob, map_ in zip(torch.sigmoid(logits).view(10, 8), probs.view(10, 8), routed.view(10, 8), strict=True):
        order = sorted(range(8), key=lambda expert: (-float(score[expert] + bias[expert]), expert))
        chosen, cutoff = sorted(order[:3]), score[order[3]] + bias[order[3]]
        assert map_.nonzero().flatten().tolist() == chosen
        torch.testing.assert_close(prob[chosen], 2 * score[chosen] / score[chosen].sum())
        for expert in range(8):
            expected[expert, min(max(math.floor((cutoff - score[expert] + 0.25) * 8), 0), 3)] += 2
    assert counted.tolist() == expected.tolist()
    equal = torch.tensor([1.0, 1.0]), tex.NVTEQBHistogramMode.TWO_KERNEL
    with pytest.raises(RuntimeError, match="finite with lower < upper"):
        tex.fused_topk_with_score_function_qb_fwd(logits, 3, None, bias, 0, None, counted, *equal)


@pytest.mark.parametrize(
    ("lengths", "ranks", "rank", "tokens"),
    [
        ([0, 4, 12], 2, 0, [0, 3, 4, 5, 10, 11]),
        ([0, 4, 12], 2, 1, [1, 2, 6, 7, 8, 9]),
        # by hand from the kernel's whole numbers: the halves of 3 and of 5 tokens per rank are 1 and 2
        ([0, 6, 16], 2, 0, [0, 3, 4, 6, 7, 12, 13, 14]),
        ([0, 6, 16], 2, 1, [1, 2, 3, 8, 9, 10, 11, 12]),
        ([0, 0, 4], 2, 0, [0, 3]),
        ([0, 8, 24], 4, 1, [1, 6, 10, 11, 20, 21]),
        # 3 and 1 tokens per rank, whose halves are 1 and 0
        ([0, 12, 16], 4, 2, [2, 5, 6, 12]),
        ([0, 12, 16], 4, 3, [3, 4, 5, 12]),
    ],
    ids=str,
)
def test_a_context_parallel_rank_gets_its_share_of_packed_tokens(
    lengths: list[int], ranks: int, rank: int, tokens: list[int]
) -> None:
    bounds = torch.tensor(lengths, dtype=torch.int32)
    found = tex.thd_get_partitioned_indices(bounds, lengths[-1], ranks, rank)
    assert (found.dtype, found.tolist()) == (torch.int32, tokens)
    # what is beyond the last sequence is counted to it
    beyond = tex.thd_get_partitioned_indices(bounds, lengths[-1] + 2 * ranks, ranks, rank)
    assert (len(beyond), beyond.tolist()[: len(tokens)]) == (len(tokens) + 2, tokens)
    for total, of, which in ((lengths[-1] + ranks, ranks, rank), (0, ranks, rank), (lengths[-1], ranks, ranks)):
        with pytest.raises(RuntimeError, match="multiple of twice the ranks"):
            tex.thd_get_partitioned_indices(bounds, total, of, which)


@pytest.mark.parametrize(
    ("bounds", "ranks", "rank"),
    [([0], 2, 0), ([[0, 4], [0, 4]], 2, 0), (4, 2, 0), ([0, 4], 0, 0), ([0, 4], 2, -1)],
    ids=["one bound", "two axes", "none", "no rank", "negative rank"],
)
def test_bounds_and_ranks_that_the_extension_refuses_are_refused(bounds: Any, ranks: int, rank: int) -> None:
    with pytest.raises(RuntimeError, match="Assertion failed"):
        tex.thd_get_partitioned_indices(torch.tensor(bounds, dtype=torch.int32), 4, ranks, rank)


def test_bounds_of_64_bits_are_refused_as_by_the_extension() -> None:
    with pytest.raises(RuntimeError, match="int64 bounds"):
        tex.thd_get_partitioned_indices(torch.tensor([0, 4]), 4, 2, 0)


@pytest.mark.parametrize("at_once", [64, attention.CHUNK])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_rotated_positions_are_those_of_the_unfused_function(
    form: str, interleaved: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CHUNK", at_once)
    torch.manual_seed(0)
    lengths = torch.tensor([0, 6, 16, 30], dtype=torch.int32) if form == "thd" else None
    shape = {"sbhd": (14, 2, 3, 32), "bshd": (2, 14, 3, 32), "thd": (30, 3, 32)}[form]
    # the two elements of a pair have different angles; eight elements of 32 are not turned
    angles = torch.randn(40, 1, 1, 24)
    how = {"tensor_format": form, "interleaved": interleaved, "cu_seqlens": lengths}
    x = torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2).requires_grad_()
    weight = torch.randn(shape)
    starts = torch.tensor([3, 0, 5][: 3 if form == "thd" else 2], dtype=torch.int32)
    for start in (None, starts):
        results = []
        for fused in (True, False):
            y = apply_rotary_pos_emb(x, angles, fused=fused, start_positions=start, **how)
            results.append((y.detach(), *torch.autograd.grad((y * weight).sum(), x)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_a_packed_qkv_tensor_is_rotated_as_its_parts(form: str) -> None:
    torch.manual_seed(0)
    packed = torch.randn(10, 2, 3, 6 * 16, dtype=torch.bfloat16).requires_grad_()
    angles = [torch.randn(10, 1, 1, 16), torch.randn(10, 1, 1, 16)]
    if form == "bshd":
        packed = packed.detach().transpose(0, 1).contiguous().requires_grad_()
    parts = apply_fused_qkv_rotary_pos_emb(packed, *angles, tensor_format=form, qkv_split_arg_list=[4 * 16, 16, 16])
    q, k, v = torch.split(packed.float(), [4 * 16, 16, 16], -1)
    q = q.reshape(*q.shape[:2], -1, 16)
    q, k = (apply_rotary_pos_emb(x, by, tensor_format=form) for x, by in zip((q, k), angles, strict=True))
    expected = [x.bfloat16() for x in (q, k, v)]
    weights = [torch.randn(x.shape).bfloat16() for x in expected]
    results = []
    for xs in (parts, expected):
        total = sum((x * w).float().sum() for x, w in zip(xs, weights, strict=True))
        results.append([*xs, torch.autograd.grad(total, packed)[0]])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("at_once", [5, 4096])
def test_experts_rows_go_out_and_come_back_as_a_dense_sum_says(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpbridge.te_cpu.triton_parts._PAIRS_AT_ONCE", at_once)
    torch.manual_seed(0)
    tokens, experts, hidden = 13, 4, 8
    routed = torch.rand(tokens, experts).argsort(1) < 2
    routed[3] = False  # no expert at all
    x, probs = torch.randn(tokens, hidden), torch.rand(tokens, experts) * routed
    x.requires_grad_()
    probs.requires_grad_()
    rows, weights, places = te.moe_permute_with_probs(x, probs, routed, int(routed.sum()))
    expert, token = routed.t().nonzero(as_tuple=True)
    assert torch.equal(rows, x[token])
    assert torch.equal(weights, probs[token, expert])
    again = te.moe_unpermute(2 * rows, places, merging_probs=probs, restore_shape=x.shape)
    dy = torch.randn_like(again)
    again.backward(dy)
    x2, probs2 = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
    dense = 2 * x2 * (probs2 * routed).sum(1, keepdim=True)
    dense.backward(dy)
    for found, expected in ((again, dense), (x.grad, x2.grad), (probs.grad, probs2.grad)):
        torch.testing.assert_close(found, expected)


@pytest.mark.since((2, 20))
def test_offsets_of_splits_are_their_running_sums() -> None:
    splits = torch.tensor([3, 0, 5], dtype=torch.int32)
    sizes, (ends, begins) = tex.splits_to_offsets_multi(
        splits, "cuda", strides=[1, 7], include_leading_zero=[False, True], dtypes=[torch.int32, torch.int64]
    )
    assert (sizes.tolist(), sizes.dtype) == ([3, 0, 5], torch.int64)
    assert (ends.tolist(), ends.dtype) == ([3, 3, 8], torch.int32)
    assert (begins.tolist(), begins.dtype) == ([0, 21, 21, 56], torch.int64)
    assert tex.splits_to_offsets(sizes, 7).tolist() == [0, 21, 21, 56]


def test_a_premultiplied_sum_multiplies_what_is_sent() -> None:
    """NCCL's PREMUL_SUM, with which Megatron-FSDP reduces gradients: gloo refuses it."""
    with process_group(False):
        half = dist._make_nccl_premul_sum(0.5)
        whole, gradients, shard = torch.full((4,), 6.0), torch.full((4,), 3.0), torch.zeros(4)
        dist.all_reduce(whole, half)
        dist.reduce_scatter_tensor(shard, gradients, op=half)
        assert (whole.tolist(), shard.tolist(), gradients.tolist()) == ([3.0] * 4, [1.5] * 4, [3.0] * 4)
        with distributed_c10d._coalescing_manager(dist.group.WORLD):
            dist.reduce_scatter_tensor(output=shard, input=whole, op=half)
        assert shard.tolist() == [1.5] * 4
