"""What a played GPU answers where torch's CPU build would answer otherwise: expected values are those of a machine with one GPU, by torch's documentation."""

import importlib
import inspect
import json
import logging
import os
import pickle
import time
from multiprocessing import spawn

import pytest
import torch
import transformer_engine_torch as tex
from torch.distributed import _symmetric_memory
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_engine.pytorch.attention.dot_product_attention.softmax import FusedScaleMaskSoftmax
from transformer_engine.pytorch.utils import attention_mask_func

from mpbridge.common.errors import Refused
from mpbridge.te_cpu.cuda_names import played_patches
from mpbridge.te_cpu.foreign import VARIABLE, foreign_code
from mpbridge.te_cpu.module import opaque
from mpbridge.te_cpu.played import now
from mpbridge.te_cpu.refusals import REFUSED
from scripts.generate.tables import REAL


def test_random_states_of_all_devices_are_kept_and_given_back() -> None:
    states = torch.cuda.get_rng_state_all()
    assert len(states) == torch.cuda.device_count() == len(torch.cuda.default_generators) == 1
    drawn = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
    torch.cuda.manual_seed_all(7)
    assert torch.cuda.initial_seed() == 7
    torch.cuda.seed_all()
    assert torch.cuda.initial_seed() != 7


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "decorator"])
def test_autocast_under_each_of_its_names_has_the_dtypes_of_a_gpu(name) -> None:
    """Source: `CUDA Ops that can autocast` of torch's page on amp."""
    half, full = torch.float16, torch.float32
    linear, x = torch.nn.Linear(8, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    functional = torch.nn.functional

    def compute() -> list[torch.dtype]:
        y = linear(x)
        cube = y.view(1, 1, 4, 4, 2)
        made = [y, functional.gelu(y), torch.mv(y, x[0])]
        made += [functional.avg_pool3d(cube, 2), functional.max_pool3d(cube, 2)]
        made += [y.softmax(-1), functional.layer_norm(y, (8,)), y.sum(), y**2]
        made += [y.norm(), y.norm(dim=0), y.exp(), torch.dot(y[0], x[0])]
        made += [y.sum(dtype=half), torch.cat([y, x]), functional.mse_loss(y, y)]
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            functional.binary_cross_entropy(y.sigmoid(), torch.ones_like(y))
        with torch.autocast("cuda", enabled=False):
            made.append(y.softmax(-1))
        made[5].sum().backward()
        return [one.dtype for one in made]

    contexts = {"torch.autocast": lambda: torch.autocast("cuda"), "torch.amp.autocast": lambda: torch.amp.autocast("cuda"), "torch.cuda.amp.autocast": torch.cuda.amp.autocast}  # fmt: skip
    if name == "decorator":
        found = torch.cuda.amp.autocast()(compute)()
    else:
        with contexts[name]():
            assert torch.is_autocast_enabled("cuda")
            found = compute()
    assert found == [*[half] * 5, *[full] * 8, half, full, full, half]
    assert linear.weight.grad.dtype is full
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")
    assert x.bfloat16().softmax(-1).dtype is torch.bfloat16


def test_autocast_reaches_into_no_kernel_and_into_the_inputs_of_a_function_of_the_scripts_own() -> None:
    class Seen(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            return x @ x

    with torch.autocast("cuda", torch.bfloat16):
        assert Seen.apply(torch.ones(2, 2, dtype=torch.bfloat16)).dtype is torch.float32
        assert opaque(torch.mm)(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_the_accelerator_is_the_played_gpu() -> None:
    found = torch.accelerator
    assert found.is_available()
    assert found.current_accelerator() == torch.device("cuda")
    assert (found.device_count(), found.current_device_index()) == (1, 0)
    found.set_device_index(0)
    found.synchronize()
    if hasattr(found, "device_index"):  # newer than torch 2.6
        with found.device_index(0):
            assert found.memory_allocated() == 0
    assert isinstance(found.current_stream(), torch.Stream)
    assert torch.Stream("cuda").device.type == "cuda"


def test_an_index_is_a_device_of_the_accelerator_and_torchs_class_stays_one(tmp_path) -> None:
    assert torch.device(0) == torch.device(type="cuda", index=0) == torch.device("cuda:0")
    assert torch.device("cpu", 0).type == "cpu"
    assert isinstance(torch.zeros(1).device, torch.device)
    assert not isinstance("cpu", torch.device)
    assert pickle.loads(pickle.dumps(torch.device(1))) == torch.device("cuda:1")
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta
    with torch.device("cuda"):
        assert torch.nn.Linear(2, 2).weight.is_cuda
    torch.save({"where": torch.device(0)}, tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt", weights_only=True)["where"] == torch.device("cuda:0")


def test_a_profile_of_the_gpu_has_the_kernels_of_the_cpu() -> None:
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as found:
        torch.ones(8, device="cuda") @ torch.ones(8, device="cuda")
    assert "aten::dot" in {event.key for event in found.key_averages()}


def test_pinned_memory_says_so_and_is_a_copy() -> None:
    plain = torch.zeros(4)
    pinned = plain.pin_memory()
    assert (plain.is_pinned(), pinned.is_pinned(), pinned[1:].is_pinned()) == (False, True, True)
    assert pinned.pin_memory() is pinned
    pinned += 1
    assert plain.sum() == 0
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.empty(3).is_pinned()


def test_a_copy_on_the_cpu_does_not_change_with_the_gpus() -> None:
    weight = torch.zeros(3, device="cuda")
    copies = [weight.cpu(), weight.to("cpu"), weight.to(device="cpu", dtype=torch.float64), weight.pin_memory()]
    back = [copies[0].cuda(), copies[0].to("cuda"), copies[0].to(weight.device), copies[0].to(weight), copies[3].cuda()]
    weight += 1
    assert [copy.sum().item() for copy in (*copies, *back)] == [0] * 9
    assert [copy.is_cuda for copy in (*copies, copies[0][1:], torch.zeros_like(copies[3]))] == [False] * 6
    assert [copy.is_cuda for copy in (weight, *back)] == [True] * 6
    assert (copies[0].get_device(), weight.get_device()) == (-1, 0)
    assert copies[0].cpu() is copies[0]
    assert weight.cuda() is weight
    assert weight.to("cuda", torch.float32) is weight


def test_what_is_moved_to_the_gpu_has_elements_of_its_own() -> None:
    row = torch.arange(4).expand(3, 4)
    for moved in (row.cuda(), row.to("cuda")):
        moved[0, 0] = 9
        assert moved[:, 0].tolist() == [9, 0, 0]


def test_what_has_no_memory_to_copy_moves_as_before() -> None:
    sparse = torch.eye(2).to_sparse()
    assert sparse.cuda().cpu().is_cuda
    assert sparse.to("cpu") is sparse
    assert torch.vmap(lambda row: row.cpu().cuda() * row.is_cuda)(torch.ones(2, 2)).sum() == 4


def test_a_module_moves_with_its_tensors() -> None:
    made = torch.nn.BatchNorm1d(2).cuda()
    made.buffers = []  # an attribute of that name, as megatron-core's DistributedDataParallel has it
    weight, place = made.weight, made.weight.data_ptr()
    kept = {name: value.cpu() for name, value in made.state_dict().items()}
    assert made.to("cuda").weight.data_ptr() == place
    made.weight.data += 1
    assert kept["weight"].tolist() == [1, 1]
    for to_host in (made.cpu, lambda: made.to("cpu")):
        to_host()
        assert not any(one.is_cuda for one in made.state_dict().values())
        for to_device in (made.cuda, lambda: made.to("cuda")):
            to_device()
            assert all(one.is_cuda for one in made.state_dict().values())
    assert made.weight is weight
    assert weight.tolist() == [2, 2]


def test_a_loader_with_workers_pins_its_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    batches = [batch for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)]
    assert [batch.is_pinned() for batch in batches] == [True, True]
    assert torch.cat(batches).tolist() == list(range(8))


def test_memory_statistics_have_torchs_keys() -> None:
    stats = torch.cuda.memory_stats()
    for key in (
        "allocated_bytes.all.current", "reserved_bytes.all.peak", "active.small_pool.freed", "inactive_split_bytes.large_pool.current",
        "segment.all.allocated", "requested_bytes.all.peak", "num_alloc_retries", "num_ooms", "oversize_segments.current",
    ):  # fmt: skip
        assert stats[key] == 0
    assert "Allocated memory" in torch.cuda.memory_summary()


def test_lists_that_hold_no_tensors_are_refused_as_the_extension_refuses_them() -> None:
    flag = torch.zeros(1, dtype=torch.int)
    for lists in ([[None]], None, [[torch.ones(2)], [1.0]]):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            tex.multi_tensor_l2norm(0, flag, lists, False)
    assert float(tex.multi_tensor_l2norm(0, flag, [[torch.full((4,), 2.0)]], False)[0]) == 4.0


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations.append(str(function))
        return function(*args, **(kwargs or {}))


def test_the_weight_gradients_gemm_adds_and_rounds_once() -> None:
    import fused_weight_gradient_mlp_cuda as apex

    torch.manual_seed(3)
    x, grad = (torch.randn(2, 8, n, dtype=torch.bfloat16) for n in (16, 24))
    exact = torch.einsum("abo,abi->oi", grad.double(), x.double())
    kinds = (apex.wgrad_gemm_accum_fp32, torch.float32), (apex.wgrad_gemm_accum_fp16, torch.bfloat16)
    for accumulate, dtype in kinds:
        main = torch.full((24, 16), 1000.0, dtype=dtype)
        with Seen() as seen:
            accumulate(x, grad, main)
        assert not seen.operations, "an audit sees no operation of a compiled extension"
        # one rounding of the sum: half a unit in the last place of BF16 at 1,000 is 2
        torch.testing.assert_close(main.double(), (exact + 1000).to(dtype).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saving", [False, True], ids=["keeps the input", "keeps the output"])
def test_apexs_layer_norm_is_within_its_roundings_of_fp64(dtype: torch.dtype, saving: bool) -> None:
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction as Norm

    torch.manual_seed(5)
    x = (torch.randn(3, 4, 64) * 2 + 1).to(dtype).requires_grad_()
    weight = (1 + torch.rand(64)).to(dtype).requires_grad_()
    bias = torch.randn(64).to(dtype).requires_grad_()
    grad = torch.randn(3, 4, 64).to(dtype)
    with Seen() as seen:
        y = Norm.apply(x, weight, bias, torch.Size([64]), 1e-5, saving)
        seen.operations.clear()  # autograd's own
        y.backward(grad)
    assert not [name for name in seen.operations if "sum" in name or "mul" in name], "one kernel"
    assert y.dtype == dtype
    leaves = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    exact = torch.nn.functional.layer_norm(leaves[0], (64,), leaves[1], leaves[2], 1e-5)
    exact.backward(grad.double())
    half = torch.finfo(dtype).eps / 2
    fp32 = 64 * torch.finfo(torch.float32).eps
    """Of sums over 64 values and their factors, relative to the values' size."""
    scaled = (exact - leaves[2]).abs()
    # the normalized value, its product with the weight and the sum are each rounded to half a unit in the last place
    bound = half * (2 * scaled + exact.abs()) * (1 + 4 * half) + fp32 * (scaled + leaves[2].abs())
    assert ((y.double() - exact).abs() <= bound).all()
    # what comes back of the output is the normalized value times the weight, less the rounding of three operations
    hat = scaled / leaves[1]
    off = bound / leaves[1] if saving else torch.zeros_like(hat)
    g, size = grad.double().abs(), leaves[1].detach()
    inverse = torch.rsqrt(x.double().var(-1, correction=0, keepdim=True) + 1e-5)
    whole = inverse * (g * size + (g * size).mean(-1, keepdim=True) + hat * (g * size * hat).mean(-1, keepdim=True))
    moved = inverse * (off * (g * size * hat).mean(-1, keepdim=True) + (hat + off) * (g * size * off).mean(-1, keepdim=True))  # fmt: skip
    rows = (0, 1)
    limits = (
        (x, leaves[0], moved, whole),
        (weight, leaves[1], (g * off).sum(rows), (g * hat).sum(rows)),
        (bias, leaves[2], 0 * size, g.sum(rows)),
    )
    for found, wanted, shifted, total in limits:
        assert found.grad is not None
        assert found.grad.dtype == dtype
        assert wanted.grad is not None
        allowed = shifted + fp32 * total + half * (wanted.grad.abs() + shifted + fp32 * total)
        assert ((found.grad.double() - wanted.grad).abs() <= allowed).all()


def test_apexs_layer_norm_keeps_a_weight_away_from_zero_as_its_kernel_does() -> None:
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction as Norm

    def gradient(first: float, saving: bool) -> torch.Tensor:
        weight = torch.tensor([first, 1.0, 1.0, 1.0], requires_grad=True)
        x = torch.tensor([[1.0, 2.0, 4.0, 9.0]])
        Norm.apply(x, weight, torch.zeros(4), (4,), 0.1, saving).sum().backward()
        assert weight.grad is not None
        return weight.grad

    assert gradient(0.0, False)[0] != 0
    assert gradient(0.0, True)[0] == 0, "nothing of the input is left in the output"
    # 0.1 in place of 0.05: half of it comes back
    torch.testing.assert_close(gradient(0.05, True)[0], gradient(0.05, False)[0] / 2)
    with pytest.raises(RuntimeError, match=r"found torch.bfloat16, .*torch.float32, 4.*: cast them"):
        Norm.apply(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4), torch.ones(4), (4,), 1e-5)
    with pytest.raises(RuntimeError, match=r"\[8\]"):
        Norm.apply(torch.ones(2, 4), torch.ones(8), torch.ones(8), (8,), 1e-5)


def test_apexs_layer_norm_rounds_three_times() -> None:
    """By hand: the variance is 5, so the normalized values are 1.2 and 0.4, and the last bits are 1/128 and 1/512, of the sums 2/128 and 2/512.

    154/128 (of 153.6) x 131/128 = 157.6/128, so 158/128 + 101/128 = 259/128, even is 260/128; rounded once it is 258.2/128, so 258/128.
    205/512 (of 204.8) x 129/128 = 206.6/512, so 207/512 + 52/512 = 259/512, even is 260/512; rounded once it is 258.4/512, so 258/512.
    """
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction as Norm

    x, weight, bias, wanted = (
        torch.tensor([row], dtype=torch.bfloat16)
        for row in (
            [-3.0, -1.0, 1.0, 3.0],
            [131 / 128, 129 / 128, 129 / 128, 131 / 128],
            [-101 / 128, -52 / 512, 52 / 512, 101 / 128],
            [-260 / 128, -260 / 512, 260 / 512, 260 / 128],
        )
    )
    assert torch.equal(Norm.apply(x, weight[0], bias[0], (4,), 1.25), wanted)


@pytest.mark.parametrize("saving", [False, True], ids=["keeps the input", "keeps the output"])
def test_apexs_layer_norms_gradient_by_weights_near_zero_is_its_kernels(saving: bool) -> None:
    """`clamp_by_magnitude` stands in the first term, and where the normalized value is had from the output; the two sums have the weight itself."""
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction as Norm

    eps, n = 0.1, 5
    x, weight, bias, grad = [1.0, 2.0, 4.0, 9.0, -3.0], [0.0, -0.05, 0.05, -2.0, 1.0], [0.5, -0.25, 1.0, 0.75, -0.5], [1.0, -2.0, 3.0, 0.5, -1.5]  # fmt: skip
    mean = sum(x) / n
    inverse = (sum((one - mean) ** 2 for one in x) / n + eps) ** -0.5
    hat = [(one - mean) * inverse for one in x]
    clamped = [0.1, -0.1, 0.1, -2.0, 1.0]
    if saving:
        hat = [one * w / away for one, w, away in zip(hat, weight, clamped, strict=True)]
        second = sum(g * one * away for g, one, away in zip(grad, hat, clamped, strict=True))
    else:
        second = sum(g * one * w for g, one, w in zip(grad, hat, weight, strict=True))
    first = sum(g * w for g, w in zip(grad, weight, strict=True))
    wanted = [
        inverse / n * (n * g * away - first - one * second) for g, away, one in zip(grad, clamped, hat, strict=True)
    ]
    leaf = torch.tensor([x], requires_grad=True)
    Norm.apply(leaf, torch.tensor(weight), torch.tensor(bias), (n,), eps, saving).backward(torch.tensor([grad]))
    torch.testing.assert_close(leaf.grad, torch.tensor([wanted]), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("saving", [False, True], ids=["keeps the input", "keeps the output"])
def test_apexs_layer_norm_over_two_axes_is_torchs(saving: bool) -> None:
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction as Norm

    torch.manual_seed(6)
    shape = (3, 4)
    given = torch.randn(2, 5, *shape), 1 + torch.rand(shape), torch.randn(shape)
    grad = torch.randn(2, 5, *shape)
    ours, exact = (
        [one.detach().to(dtype).requires_grad_() for one in given] for dtype in (torch.float32, torch.float64)
    )
    y = Norm.apply(*ours, shape, 1e-5, saving)
    wanted = torch.nn.functional.layer_norm(exact[0], shape, exact[1], exact[2], 1e-5)
    y.backward(grad)
    wanted.backward(grad.double())
    for found, right in zip((y, *(one.grad for one in ours)), (wanted, *(one.grad for one in exact)), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["optimizers", "multi_tensor_apply", "contrib.layer_norm.layer_norm", "amp"])
def test_the_rest_of_apex_is_not_installed(part: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"No module named 'apex.{part.split('.')[0]}'"):
        importlib.import_module(f"apex.{part}")
    with pytest.raises(ModuleNotFoundError, match="amp_C"):
        importlib.import_module("amp_C")
    with pytest.raises(ImportError, match="FusedRMSNorm"):
        from apex.normalization.fused_layer_norm import FusedRMSNormAffineFunction  # noqa: F401


def test_apexs_layer_norm_lets_megatron_cores_local_layers_split_the_sequence() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import LNImpl
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "persist_layer_norm": True}
    norm = LNImpl(TransformerConfig(**sizes, **split, memory_efficient_layer_norm=True), 32)
    assert norm.weight.sequence_parallel
    assert not norm.persist_layer_norm, "Apex's other kernel is not installed"
    x = torch.randn(6, 2, 32)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (32,)))


def test_an_attention_row_without_a_key_is_zero_in_the_kernel_and_the_mean_beside_it() -> None:
    """As on a GPU: scaled_masked_softmax.cu multiplies a row whose maximum is -10000 by zero; Transformer Engine's path in plain torch does not."""
    scores = torch.randn(2, 2, 32, 32).to(torch.bfloat16)
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    mask[..., 5, :] = True
    soft = FusedScaleMaskSoftmax(attention_mask_func, softmax_in_fp32=True)
    results = []
    for soft.scaled_masked_softmax_fusion_type in (True, False):
        results.append(soft(scores.clone(), mask, "arbitrary", 1.0))
    fused, plain = results
    assert torch.equal(fused[..., :5, :], plain[..., :5, :])
    assert not fused[..., 5, :].any()
    assert torch.equal(plain[..., 5, :], torch.full_like(plain[..., 5, :], 1 / 32))


def test_the_first_torch_compile_says_that_nothing_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [torch.compile(lambda x: x + 1, fullgraph=True)(1) for _ in range(2)] == [2, 2]
    said = [record.getMessage() for record in caplog.records if "compiles nothing" in record.getMessage()]
    assert len(said) == 1
    assert __name__ in said[0]


PUBLIC = [f"cuda.{name}" for name in torch.cuda.__all__] + [f"accelerator.{name}" for name in torch.accelerator.__all__]


@pytest.mark.parametrize("place", ["cuda", "accelerator"])
def test_every_public_name_of_this_torch_is_real_played_or_refused(place: str) -> None:
    owner = getattr(torch, place)
    played = {f"{place}.{name}" for at, name, _ in played_patches(now()) if at is owner}
    names = {name for name in PUBLIC if name.startswith(f"{place}.")} - REFUSED.keys()
    assert not [name for name in names if (name in REAL) is (name in played)]


def _takes_nothing(value: object) -> bool:
    try:
        parameters = inspect.signature(value).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_answers_or_refuses_by_name(name: str) -> None:
    """What is not refused and needs no argument can be called: nothing says that torch was not compiled with CUDA."""
    place, attribute = name.split(".")
    value = getattr(getattr(torch, place), attribute)
    if name in REFUSED:
        call = value._create_jit_fn if attribute == "jiterator" else value
        with pytest.raises(Refused, match=rf"torch\.{name}.* runs on a GPU only"):
            call()
    elif callable(value) and not isinstance(value, type) and _takes_nothing(value):
        value()


def test_a_process_that_a_world_inside_a_played_test_run_starts_has_the_main_module_of_the_run() -> None:
    with foreign_code():
        spawn.get_preparation_data("")
        assert json.loads(os.environ[VARIABLE]).get("init_main_from_name") in ("pytest.__main__", None)


def test_what_scripts_ask_of_a_gpu_is_answered(tmp_path) -> None:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "w.pt")
    for place in ("cuda", "cuda:0", torch.device("cuda", 0), {"cuda:0": "cuda:0"}, None):
        assert torch.load(tmp_path / "w.pt", map_location=place)["w"].tolist() == [0, 1, 2]
    assert torch.cuda.Stream().priority == 0
    assert torch.cuda.nccl.version() >= (2, 0)
    assert torch.cuda.can_device_access_peer(0, 1) is False
    assert isinstance(torch.ones(2), torch.cuda.FloatTensor)
    assert torch.cuda.get_arch_list() == [f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}"]
    torch.cuda.memory._record_memory_history()
    torch._C._cuda_attach_out_of_memory_observer(pytest.fail)  # Megatron-LM's --record-memory-history
    torch.cuda.memory._dump_snapshot(str(tmp_path / "memory.pickle"))
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes())["segments"] == []
    assert torch.ones(2).untyped_storage().cuda().nbytes() == 8
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight], lr=0.1, capturable=True).step()
    assert weight.tolist() == pytest.approx([0.899, 0.899])
    assert torch.cuda.cudart().cudaProfilerStart() == 0
    with pytest.raises(Refused, match=r"cudaMemGetInfo runs on a GPU only"):
        torch.cuda.cudart().cudaMemGetInfo(0)


def test_events_have_the_times_of_the_host_and_are_as_strict_as_a_gpus() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    time.sleep(0.02)
    end.record()
    assert 20 <= start.elapsed_time(end) == -end.elapsed_time(start)
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.cuda.current_stream().record_event().elapsed_time(end)
    assert torch.Event("cuda", enable_timing=True).timed


def test_a_backend_of_symmetric_memory_is_chosen_and_no_tensor_lies_in_it() -> None:
    """As where GPUs are not linked: Megatron-FSDP chooses NCCL's before it asks whether tensors lie there."""
    if hasattr(_symmetric_memory, "set_backend"):  # torch's later releases
        _symmetric_memory.set_backend("NCCL")
    if hasattr(_symmetric_memory, "is_symm_mem_tensor"):
        assert not _symmetric_memory.is_symm_mem_tensor(torch.ones(2, device="cuda"))
    with pytest.raises(RuntimeError, match="no NVLink"):
        _symmetric_memory.empty(2)
