"""The nn.Linear front end and the GEMMs: against a plain computation, torchao's MXFP8, and its own promises."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

from mpbridge.common.errors import BadValue
from mpbridge.numerics import Emulation, emulate_linears, kernels
from mpbridge.numerics.gemm import product
from mpbridge.numerics.operands import Operand
from mpbridge.precision.policy import Gemms, PrecisionPolicy, Region
from tests.numerics.conftest import policy_of, quant_of, scale_of

ALL = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")


def policy(scaling: str, *, format: str = "e4m3", regions: tuple[Region, ...] = (), **fields: Any) -> PrecisionPolicy:
    return policy_of(*regions, Region(quant=quant_of(scaling, format, **fields)))


def model(dtype: torch.dtype = torch.bfloat16, width: int = 128) -> torch.nn.Sequential:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
    return torch.nn.Sequential(first, torch.nn.GELU(), second).to(dtype)


def data(dtype: torch.dtype = torch.bfloat16, width: int = 128) -> torch.Tensor:
    return torch.randn(2, 64, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(net: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    out = net(leaf)
    out.float().pow(2).mean().backward()
    assert leaf.grad is not None
    return [out.detach(), leaf.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


# --- GEMMs --------------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_product_applies_factor_and_bias_before_the_only_rounding(dtype: torch.dtype) -> None:
    # small integers: every order of summation gives the same exact sum, so the expected value is exact as well
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, shape, generator=generator).bfloat16() for shape in ((32, 64), (64, 48)))
    bias = torch.randint(-8, 9, (48,), generator=generator).to(dtype)
    alpha, beta = torch.tensor(0.3712345), torch.tensor(1.7)
    exact = (a.double() @ b.double()) * float(alpha * beta)
    assert torch.equal(product(Operand(a, alpha), Operand(b, beta), dtype), exact.float().to(dtype))
    with_bias = product(Operand(a, alpha), Operand(b, beta), dtype, bias)
    # half a unit of the last place in 16 bits; fp32 output rounds once more, at the product's size
    atol = 0 if dtype != torch.float32 else 2.0**-24 * float(exact.abs().max())
    assert torch.allclose(with_bias.double(), exact + bias.double(), rtol=torch.finfo(dtype).eps, atol=atol)


def test_nvfp4s_factor_is_computed_in_the_order_of_its_kernel() -> None:
    # compute_nvfp4_per_tensor_scale_kernel in common/recipe/nvfp4.cu: alpha_in * amax_A * amax_B * factor_inv in fp32
    generator = numpy.random.default_rng(0)
    constant = numpy.float32(1.0 / (6.0 * 6.0 * 448.0 * 448.0))
    one, others = torch.eye(16, dtype=torch.bfloat16), 0
    for a, b in generator.uniform(0.5, 50, (200, 2)).astype(numpy.float32):
        left, right = (Operand(one, torch.tensor(amax), 6.0 * 448.0) for amax in (a, b))
        assert product(left, right, torch.float32)[0, 0].item() == a * b * constant
        assert left.alpha is not None
        assert right.alpha is not None
        others += (left.alpha * right.alpha).item() != a * b * constant
    assert others > 20  # a product of quotients is another number


@pytest.mark.parametrize("scaling", ALL)
def test_the_three_gemms_see_the_operands_that_the_table_names(scaling: str) -> None:
    net = model()
    emulation = emulate_linears(net, policy(scaling, format="hybrid"), compiled=False)
    seen: dict[tuple[str, str, str], Operand] = {}

    def see(slot: str, gemm: Any, side: Any, high: torch.Tensor, operand: Operand, quantizer: Any) -> None:
        seen[slot, gemm, side] = operand

    emulation.observer = SimpleNamespace(see=see)
    out, dx, *grads = gradients(net, data())
    emulation.observer = None
    w0 = grads[0]

    def find(gemm: str, side: str) -> Operand:
        # an operand that serves two GEMMs is seen once
        others = (op for (slot, g, s), op in seen.items() if slot == "0" and s == side and g != gemm)
        return seen.get(("0", gemm, side)) or next(others)

    x, w, dy_row, dy_col = find("fprop", "x"), find("dgrad", "w"), find("dgrad", "dy"), find("wgrad", "dy")
    x_col = find("wgrad", "x")
    hidden = net[0](data())  # another forward: the fprop operands are those of the recorded run
    expected = x.dequantized() @ seen["0", "fprop", "w"].dequantized().t() + net[0].bias.float()
    assert torch.allclose(hidden.float().view(128, -1), expected, rtol=1e-2, atol=1e-2) or scaling == "delayed"
    assert torch.allclose(dx.float().view(128, -1), dy_row.dequantized() @ w.dequantized(), rtol=1e-2, atol=1e-6)
    assert torch.allclose(w0.float(), dy_col.dequantized().t() @ x_col.dequantized(), rtol=1e-2, atol=1e-5)
    assert out.isfinite().all()


def one_gemm_at_a_time(regions: tuple[Region, ...]) -> list[torch.Tensor]:
    """y, dx and dw of one linear for a given gradient."""
    torch.manual_seed(0)
    net = torch.nn.ModuleList([torch.nn.Linear(128, 128, bias=False)]).bfloat16()
    mixed = dataclasses.replace(policy("mxfp8"), regions=(*regions, Region()))
    emulation = emulate_linears(net, mixed, compiled=False)
    x = data().clone().requires_grad_()
    y = net[0](x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
    emulation.detach()
    return [y.detach(), x.grad, net[0].weight.grad]  # type: ignore[list-item]


def test_a_rule_for_each_gemm_is_that_of_linears_with_one_rule() -> None:
    rules = {"nvfp4": "e2m1", "mxfp8": "e4m3", "blockwise": "hybrid"}
    quants: dict[str, Any] = {name: quant_of(name, format) for name, format in rules.items()} | {"bf16": None}
    whole = {name: one_gemm_at_a_time((Region(quant=quant),)) for name, quant in quants.items()}
    mixed = "nvfp4 mxfp8 bf16", "bf16 blockwise nvfp4", "mxfp8 bf16 mxfp8", "bf16 bf16 blockwise"
    for names in map(str.split, mixed):
        gemms = Gemms(**dict(zip(("fprop", "dgrad", "wgrad"), (quants[name] for name in names), strict=True)))
        found = one_gemm_at_a_time((Region(quant=gemms.distinct[0], gemms=gemms),))
        for i, name in enumerate(names):
            assert torch.equal(found[i], whole[name][i]), (names, name)


# --- oracles and equivalences -------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("torchaos_own")
def test_three_steps_of_torchaos_emulated_mxfp8_linear_and_ours_give_identical_losses() -> None:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    # without bias: torchao adds it after the rounding, Transformer Engine and we before
    first, second = torch.nn.Linear(128, 256, bias=False), torch.nn.Linear(256, 128, bias=False)
    plain = torch.nn.Sequential(first, torch.nn.GELU(), second).bfloat16()
    with torch.no_grad():  # rows of every size: as they are made, a weight has the same codes in both of its copies
        for parameter in plain.parameters():
            sizes = torch.rand(len(parameter), 1, generator=torch.Generator().manual_seed(2))
            parameter *= torch.exp2(-14 * sizes).bfloat16()
    theirs, how = copy.deepcopy(plain), {"bias": False, "kernel_preference": KernelPreference.EMULATED}
    for i in (0, 2):
        old = theirs[i]
        theirs[i] = MXFP8Linear(old.in_features, old.out_features, **how).to(torch.bfloat16)
        theirs[i].load_state_dict(old.state_dict())
    emulation = emulate_linears(plain, policy("mxfp8"), compiled=False)
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}
    grads: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
    for name, net in (("ours", plain), ("theirs", theirs)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            emulation.step_begin()
            optimizer.zero_grad()
            loss = F.mse_loss(net(data()).float(), data().float().roll(1, -1))
            loss.backward()
            grads[name] += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
            losses[name].append(float(loss))
    assert losses["ours"][0] == pytest.approx(losses["theirs"][0], rel=2**-8)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert losses["ours"] == losses["theirs"]
        # a loss forgives much in three steps
        assert all(torch.equal(a, b) for a, b in zip(*grads.values(), strict=True))
    else:
        # without vector instructions torch sums a BF16 product in another order than an FP32 one: an element may round to its neighbour, 2^-8 of it, in
        # each of the two products on its way, and later steps begin from other weights
        for a, b in zip(grads["ours"][:2], grads["theirs"][:2], strict=True):
            assert (a.float() - b.float()).norm() <= 2**-7 * b.float().norm()
    assert len(grads["ours"]) == 6
    assert losses["ours"][0] != losses["ours"][-1]


@pytest.mark.parametrize("scaling", ALL)
def test_detaching_gives_back_the_module_as_it_was(scaling: str) -> None:
    net = model()
    before, keys = gradients(net, data()), list(net.state_dict())
    emulation = emulate_linears(net, policy(scaling), compiled=False)
    emulation.step_begin()
    during = gradients(net, data())
    assert list(net.state_dict()) == keys
    assert not torch.equal(before[0], during[0])
    with emulation.paused():
        assert all(torch.equal(a, b) for a, b in zip(before, gradients(net, data()), strict=True))
    emulation.detach()
    assert type(net[0]) is torch.nn.Linear
    assert not net._forward_hooks
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(net, data()), strict=True))


# --- step structure -----------------------------------------------------------------------------------------------------------------------
class Counter:
    """Counts operands by (gemm, side)."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, str], int] = {}

    def see(self, slot: str, gemm: Any, side: Any, high: torch.Tensor, operand: Operand, quantizer: Any) -> None:
        self.made[gemm, side] = self.made.get((gemm, side), 0) + 1


@pytest.mark.parametrize("scaling", ALL)
def test_weights_are_quantized_once_a_step_whatever_the_number_of_micro_batches(scaling: str) -> None:
    net = model()
    emulation = emulate_linears(net, policy(scaling), compiled=False)
    emulation.observer = counter = Counter()
    emulation.step_begin()
    for _ in range(3):
        gradients(net, data())
    assert counter.made["fprop", "w"] == 2
    assert counter.made["fprop", "x"] == 6
    with torch.no_grad():
        net[0].weight.mul_(3)
    stale = net[0](data())
    emulation.step_begin()
    assert not torch.equal(stale, net[0](data()))


def test_delayed_forward_scales_move_after_every_forward_with_gradients_and_never_in_evaluation() -> None:
    net = model()
    emulation = emulate_linears(net, policy("delayed"), compiled=False)
    quantizer = next(iter(emulation.quantizers.values()))
    emulation.step_begin()
    with torch.no_grad():
        net(data())
    assert scale_of(quantizer, "0", "x") == 1.0
    emulation.step_begin()
    net(data())
    first = scale_of(quantizer, "0", "x")
    net(2 * data())
    assert scale_of(quantizer, "0", "x") == pytest.approx(first / 2)
    assert scale_of(quantizer, "0", "dy") == 1.0
    gradients(net, data())
    # under the scale of the start the last layer's gradient rounds to zero, so the layer before sees nothing until the step after
    assert scale_of(quantizer, "2", "dy") != 1.0
    assert scale_of(quantizer, "0", "dy") == 1.0
    gradients(net, data())
    assert scale_of(quantizer, "0", "dy") != 1.0


# --- choice of layers, bad input ----------------------------------------------------------------------------------------------------------
class Layered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"fc1": torch.nn.Linear(32, 32), "fc2": torch.nn.Linear(32, 32)}) for _ in range(4)
        )
        self.head = torch.nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["fc2"](layer["fc1"](x))
        return self.head(x)  # type: ignore[no-any-return]


def test_regions_choose_layers_and_modules_and_the_head_stays_high() -> None:
    net = Layered().bfloat16()
    rules = (Region(first=1, last=1), Region(modules="fc1"))
    emulation = emulate_linears(net, policy("mxfp8", regions=rules), compiled=False)
    assert sorted(emulation.plugs) == ["layers.1.fc2", "layers.2.fc2"]
    assert "layers.0.fc1" in emulation.high
    assert type(net.head) is torch.nn.Linear
    assert net(torch.randn(32, 32).bfloat16()).shape == (32, 7)
    assert "2 linears quantized, 6 kept in high precision" in emulation.notes()[0]


def test_a_bare_list_of_layers_is_its_own_container() -> None:
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(32, 32)) for _ in range(3)).bfloat16()
    emulation = emulate_linears(layers, policy("delayed", regions=(Region(first=1),)), compiled=False)
    assert sorted(emulation.plugs) == ["1.0", "2.0"]
    quantizer = next(iter(emulation.quantizers.values()))
    layers[1](torch.ones(32, 32).bfloat16()).sum().backward()
    assert scale_of(quantizer, "1.0", "x") == 448.0
    assert scale_of(quantizer, "1.0", "dy") == 448.0


def test_a_region_that_names_nothing_is_an_error() -> None:
    with pytest.raises(BadValue, match=r"model matches mlp\.\*.*fc1, fc2"):
        emulate_linears(Layered(), policy("mxfp8", regions=(Region(modules="mlp.*"),)))


@pytest.mark.parametrize(
    ("scaling", "tokens", "features", "out", "message"),
    [
        pytest.param("mxfp8", 64, 48, 32, "input features 48", id="mxfp8"),
        pytest.param("mxfp8", 40, 64, 80, r"tokens 40 .*32.*output features 80", id="all-faults-at-once"),
        pytest.param("nvfp4", 24, 64, 64, "tokens 24", id="nvfp4"),
        pytest.param("tensorwise", 12, 64, 64, "tokens 12", id="tensorwise"),
        pytest.param("blockwise", 64, 24, 64, "input features 24", id="blockwise"),
    ],
)
def test_sizes_that_transformer_engine_refuses_are_refused(
    scaling: str, tokens: int, features: int, out: int, message: str
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(features, out)).bfloat16()
    emulate_linears(net, policy(scaling), compiled=False)
    with pytest.raises(BadValue, match=message):
        net(torch.randn(tokens, features).bfloat16())


def test_empty_input_gives_empty_output_and_counts_nothing() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64)).bfloat16()
    emulation = emulate_linears(net, policy("delayed"), compiled=False)
    x = torch.zeros(0, 32, dtype=torch.bfloat16, requires_grad=True)
    net(x).sum().backward()
    assert not net[0].weight.grad.any()
    assert scale_of(next(iter(emulation.quantizers.values())), "0", "x") == 1.0


def test_frozen_weights_and_inputs_without_gradients_need_no_operands() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    emulation = emulate_linears(net, policy("mxfp8"), compiled=False)
    emulation.observer = counter = Counter()
    emulation.step_begin()
    net(data()).float().sum().backward()
    assert net[0].weight.grad is None
    assert net[2].weight.grad is not None
    assert counter.made["wgrad", "x"] == 1


def test_a_frozen_first_linear_does_not_keep_gradient_scales_from_moving() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))).bfloat16()
    net[0].requires_grad_(False)
    emulation = emulate_linears(net, policy("delayed"), compiled=False)
    quantizer = next(iter(emulation.quantizers.values()))
    net(data(width=32)).float().sum().backward()
    assert scale_of(quantizer, "2", "dy") == 448.0


def test_notes_say_what_is_not_emulated() -> None:
    quiet = Emulation(policy("tensorwise")).notes()
    assert any("accumulation order" in note for note in quiet)
    assert not any("attention" in note for note in quiet)
    loud = "\n".join(Emulation(policy("delayed", attention="dot_product", stored=True, wgrad=False)).notes())
    for word in ("FP8 attention", "stored in low precision", "fp8_wgrad=False", "Transformer Engine 2.11"):
        assert word in loud
    assert any("random bits" in note for note in Emulation(policy("nvfp4")).notes())


@pytest.mark.parametrize("lacks", ["no C++ compiler", "ATEN_CPU_CAPABILITY is set"])
def test_without_a_compiler_it_runs_uncompiled_and_says_so(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "ATEN" in lacks:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    else:
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    kernels.compiler.cache_clear()
    kernels.kernel.cache_clear()
    try:
        net = model()
        emulation = emulate_linears(net, policy("mxfp8"))
        assert net(data()).isfinite().all()
        assert any(lacks in note for note in emulation.notes())
    finally:
        kernels.compiler.cache_clear()
        kernels.kernel.cache_clear()
