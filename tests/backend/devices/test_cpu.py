"""The CPU layer redirects while it is active, and leaves nothing behind."""

import logging
import sys
import threading
from typing import Any

import pytest
import torch
from torch._dynamo import trace_rules
from torch.utils._python_dispatch import TorchDispatchMode

from mpbridge.backend.devices import device_layer
from mpbridge.backend.devices.cpu import cpu_device, is_active
from mpbridge.backend.devices.redirect import names_cuda
from mpbridge.backend.megatron.process import advice
from mpbridge.common.errors import BadValue
from mpbridge.common.upstream import replaced

STUB = "transformer_engine.pytorch.optimizers"


class Adam(torch.optim.AdamW):
    """Stands for FusedAdam: OptimizerConfig looks at its signature."""

    def __init__(
        self, params: Any, master_weight_dtype=None, exp_avg_dtype=None, exp_avg_sq_dtype=None, use_decoupled_grad=None, **options: Any
    ) -> None:  # fmt: skip
        super().__init__(params, **options)


def owners() -> list[Any]:
    """Everything that could have been touched: torch's modules and classes, and megatron-core's with their classes."""
    found: list[Any] = [torch, torch.cuda, torch.cuda.random, torch.random, torch.Tensor]
    found += [torch.nn.Module, torch.nn.functional, torch.autograd, torch.distributed]
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module is not None:
            found += [module, *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name)]
    return found


def snapshot() -> dict[tuple[int, str], tuple[str, int]]:
    """Which object every attribute of every owner is."""
    return {
        (id(owner), name): (repr(owner)[:60] + "." + name, id(value))
        for owner in owners()
        for name, value in list(vars(owner).items())
        if name != "__warningregistry__"
    }


def flags() -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    disabled = logging.getLogger("megatron.core.tensor_parallel.random").disabled
    modes = len(torch.overrides._get_current_function_mode_stack())
    return matmul, torch.get_default_dtype(), disabled, STUB in sys.modules, modes


@pytest.fixture(scope="module", autouse=True)
def _megatron_imported() -> None:
    """The first use imports megatron-core, which adds attributes of its own."""
    with cpu_device(fused_adam=Adam):
        from megatron.core.transformer.moe import token_dispatcher  # noqa: F401  brings modules along that depend on megatron-core's version


def disturb() -> None:
    """What megatron-core does to the process while it is used."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    narrow = {"bf16": True, "params_dtype": torch.bfloat16, "disable_bf16_reduced_precision_matmul": True}
    TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **narrow)
    torch.set_default_dtype(torch.bfloat16)
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = torch.cuda.Stream()


@pytest.mark.parametrize("failing", [False, True], ids=["normal exit", "exception"])
def test_nothing_is_left_behind(failing: bool) -> None:
    before, state = snapshot(), flags()
    with pytest.raises(KeyError) if failing else device_layer(False), cpu_device(fused_adam=Adam):
        disturb()
        assert flags() != state
        if failing:
            raise KeyError
    after = snapshot()
    assert [name for key, (name, value) in after.items() if before.get(key, ("", 0))[1] != value] == []
    assert [before[key][0] for key in before.keys() - after.keys()] == []
    assert flags() == state
    assert not is_active()


def test_inside_everything_that_asks_for_cuda_gets_the_cpu() -> None:
    with cpu_device():
        assert torch.cuda.current_device() == torch.device("cpu")
        one = torch.zeros(1)
        made = [torch.zeros(2, device="cuda"), torch.tensor([1.0], device="cuda:0")]
        made += [torch.ones_like(one, device=torch.device("cuda", 0)), torch.empty(2, pin_memory=True, device="cuda")]
        made += [one.cuda(), one.to("cuda"), one.to(device="cuda")]
        assert {str(tensor.device) for tensor in made} == {"cpu"}
        assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
        assert torch.nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype is torch.float16
        assert not torch.cuda.is_available()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_autocast_of_cuda_is_autocast_here() -> None:
    a = torch.ones(2, 2)
    with device_layer(False), torch.autocast("cuda", dtype=torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_nested_layers_are_one_layer_that_ends_with_the_last() -> None:
    with cpu_device():
        with cpu_device(fused_adam=Adam), cpu_device(fused_adam=Adam):
            assert torch.zeros(1).type() == "torch.cuda.FloatTensor", "must not become torch.cuda.cuda.FloatTensor"
            from megatron.core.optimizer import distrib_optimizer

            assert distrib_optimizer.Adam is Adam
        assert distrib_optimizer.Adam is not Adam
        assert is_active()
    assert not is_active()


def test_two_stand_ins_at_once_are_refused_and_change_nothing() -> None:
    with cpu_device(fused_adam=Adam):
        with pytest.raises(BadValue, match="as FusedAdam"), cpu_device(fused_adam=torch.optim.SGD):
            pass
        assert is_active()
    assert not is_active()


def test_a_thread_started_inside_sees_the_layer() -> None:
    found = []
    with cpu_device():
        thread = threading.Thread(target=lambda: found.append(torch.zeros(1, device="cuda").device.type))
        thread.start()
        thread.join()
    assert found == ["cpu"]


def test_layers_of_two_threads_end_with_the_later_one() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with cpu_device():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with cpu_device():
        thread.start()
        entered.wait(10)
    assert is_active()
    leave.set()
    thread.join()
    assert not is_active()


def test_on_cuda_nothing_is_redirected() -> None:
    before = snapshot()
    with device_layer(True, fused_adam=Adam):
        assert not is_active()
        after = snapshot()
        assert all(after[key] == before[key] for key in before)
        assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_precision_aware_config_can_be_built_without_transformer_engine() -> None:
    from megatron.core.optimizer import OptimizerConfig

    aware = dict.fromkeys(("use_precision_aware_optimizer", "use_distributed_optimizer"), True)
    aware |= {"lr": 1e-3, "exp_avg_dtype": torch.bfloat16}
    with cpu_device(), pytest.raises((TypeError, RuntimeError)):  # as megatron-core 0.16 and 0.20 end
        OptimizerConfig(**aware)
    with cpu_device(fused_adam=Adam):
        config = OptimizerConfig(**aware)
        assert config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        assert config.store_param_remainders
        with pytest.raises(ImportError):
            import transformer_engine  # noqa: F401


PRODUCTS: dict[str, Any] = {
    "matmul": lambda a, b: torch.matmul(a, b),
    "operator": lambda a, b: a @ b,
    "mm": lambda a, b: a.mm(b),
    "linear": lambda a, b: torch.nn.functional.linear(a, b.t()),
    "addmm": lambda a, b: torch.addmm(torch.zeros(8, 8, dtype=a.dtype), a, b),
    "einsum": lambda a, b: torch.einsum("ik,kj->ij", a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0],
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_float16_products_are_multiplied_in_float32_and_rounded_once(product: Any) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 4096), torch.randn(4096, 8)
    half_a, half_b = a.half().requires_grad_(), b.half()
    seen = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mm" in func.__name__:
                seen.update(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with cpu_device(), Products():
        out = product(half_a, half_b)
        out.sum().backward()
    assert seen == {torch.float32}, "forward and backward"
    assert out.dtype is torch.float16
    assert torch.equal(out, product(half_a.detach().float(), half_b.float()).half())
    assert half_a.grad is not None
    assert half_a.grad.dtype is torch.float16


def test_seeding_cuda_seeds_the_generator_that_is_used() -> None:
    with cpu_device():
        torch.cuda.manual_seed(7)
        first = torch.rand(3)
        state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(7)
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.parametrize(
    ("device", "cuda"),
    [("cuda", True), ("cuda:1", True), (torch.device("cuda", 0), True), (0, True), ("cpu", False), (None, False), (True, False)],
)  # fmt: skip
def test_which_spellings_mean_cuda(device: Any, cuda: bool) -> None:
    assert names_cuda(device) is cuda


def test_kernels_of_an_installed_transformer_engine_are_not_called_on_a_cpu(monkeypatch):
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.moe import moe_utils

    def kernel(*args, **kwargs):
        raise AssertionError("a CUDA kernel was called")

    # as where Transformer Engine is installed and no GPU is there
    for name in ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl"):
        monkeypatch.setattr(clip_grads, name, kernel)
    monkeypatch.setattr(moe_utils, "te_general_gemm", kernel, raising=False)
    with cpu_device():
        assert clip_grads.multi_tensor_applier is not kernel
        assert moe_utils.te_general_gemm is None
        lists, overflow = [[torch.full((3,), 2.0)]], torch.zeros(1, dtype=torch.int)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, lists, False)
        assert float(norm) == pytest.approx(12**0.5)
    assert clip_grads.multi_tensor_applier is kernel


def test_torch_compile_knows_torchs_functions_and_not_what_stands_for_them() -> None:
    """It lists them once, by identity: a list of one layer's substitutes would break every kernel of the next layer into pieces."""
    trace_rules.get_torch_obj_rule_map.cache_clear()
    real = torch.zeros_like
    with cpu_device():
        substitute, known = torch.zeros_like, trace_rules.get_torch_obj_rule_map()
    assert substitute is not real
    assert real in known
    assert substitute not in known


def test_advice_to_whoever_builds_a_model_is_kept_back_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron.core.distributed.distributed_data_parallel")
    with caplog.at_level(logging.INFO), replaced(*advice()):
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "said")
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR"]
