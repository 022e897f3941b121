"""Products of 16-bit matrices on a CPU without BF16 instructions: FP32 sums rounded once, in both directions, in the device layer alone."""

import time
import warnings

import pytest
import torch

from mpbridge.backend.devices import products as devices
from mpbridge.backend.devices.cpu import cpu_device

KINDS = [torch.bfloat16, torch.float16]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU, as one that does not multiply BF16."""
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: False)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def products(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Each product with its gradients, of operands that are `dtype`'s numbers in the tensors' own dtype."""
    x, w, b = (drawn(*shape).to(dtype) for shape in ((3, 40, 24), (16, 24), (16,)))
    return {"x": x, "w": w, "b": b, "batch": drawn(3, 24, 8).to(dtype), "add": drawn(3, 40, 8).to(dtype)}


def results(operands: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    x, w, b, batch, add = (operands[name].clone().requires_grad_() for name in ("x", "w", "b", "batch", "add"))
    outs = [
        torch.nn.functional.linear(x, w, b),
        x @ w.t(),
        torch.bmm(x, batch),
        torch.baddbmm(add, x, batch, beta=0.5, alpha=0.25),
        torch.addmm(b, x[0], w.t(), beta=0.0, alpha=2.0),
        torch.einsum("bij,bjk->bik", x, batch),
        torch.zeros(40, 16, dtype=x.dtype).addmm_(x[0], w.t()),
    ]
    grads = [g for out in outs for g in torch.autograd.grad(out.sum(), (x,), retain_graph=True)]
    return [*outs, *grads]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.usefixtures("without")
def test_a_product_is_the_exact_one_rounded_once(dtype: torch.dtype) -> None:
    operands = products(dtype)
    exact = results({name: value.double() for name, value in operands.items()})
    with cpu_device():
        found = results(operands)
    for ours, true in zip(found, exact, strict=True):
        assert ours.dtype is dtype
        # half a unit of the 16-bit result, and the FP32 sum's own error (at most 40 terms of sizes around 1)
        half = torch.finfo(dtype).eps / 2
        assert ((ours.double() - true).abs() <= half * true.abs() * 1.01 + 2**-17).all()


@pytest.mark.usefixtures("without")
def test_what_autograd_saves_stays_as_it_was() -> None:
    saved: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.dtype)
        return tensor

    x, w = (drawn(8, 8).bfloat16().requires_grad_() for _ in range(2))
    with cpu_device(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.nn.functional.linear(x, w).sum().backward()
    assert set(saved) == {torch.bfloat16}


@pytest.mark.usefixtures("without")
def test_other_dtypes_and_mixtures_are_torchs_own() -> None:
    a, b = drawn(5, 7), drawn(7, 3)
    own = [a @ b, a.double() @ b.double()]
    with cpu_device():
        assert all(torch.equal(x, y) for x, y in zip(own, [a @ b, a.double() @ b.double()], strict=True))
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(a.bfloat16(), b)


@pytest.mark.usefixtures("without")
def test_the_kernels_go_with_the_last_layer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with cpu_device():
            with cpu_device():
                pass
            assert "mm" in vars(devices.KERNELS)
    assert not vars(devices.KERNELS)


def test_a_torch_with_onednn_switched_off_multiplies_by_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    assert not devices.multiplies_bf16()


def test_a_cpu_that_multiplies_bf16_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: True)
    with cpu_device():
        assert not vars(devices.KERNELS)


def test_bf16_is_not_far_slower_than_fp32_on_this_cpu() -> None:
    def seconds(a: torch.Tensor) -> float:
        began = time.process_time()  # of the CPU: what else runs on the machine does not count
        torch.mm(a, a)
        return time.process_time() - began

    wide = drawn(512, 512)
    narrow = wide.bfloat16()
    with cpu_device():
        half, single = map(min, zip(*[(seconds(narrow), seconds(wide)) for _ in range(9)], strict=True))
    assert half < 10 * single  # 20 to 120 times, of torch's own without BF16 instructions
