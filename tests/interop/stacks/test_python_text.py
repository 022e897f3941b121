"""Python configurations as text: what is read, what is not known, and that nothing of them runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from mpbridge.common.errors import BadValue, DataError, MpbridgeError, UnknownName
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_file, read_text
from tests.interop.stacks.test_readings import holds

TITAN = """
from torchtitan.components.quantization import Float8LinearConverter, MXFP8LinearConverter, NVFP4LinearConverter
from torchtitan.config import TrainingConfig
from torchtitan.trainer import Trainer
from . import model_registry

def base() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(model_spec=spec, training=TrainingConfig(steps=8 * 10))

def plain16() -> Trainer.Config:
    config = base()
    config.training.dtype = "bfloat16"
    return config

def quantized() -> Trainer.Config:
    config = base()
    compiled = config.compile.enable and "model" in config.compile.components
    config.model_spec = model_registry("8B", converters=[MXFP8LinearConverter.Config(model_compile_enabled=compiled)])
    return config

def rowwise() -> Trainer.Config:
    config = base()
    config.model_spec = model_registry(
        "8B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head", "gate"], recipe_name="rowwise_with_gw_hp", emulate=True)]
    )
    return config

def tail() -> Trainer.Config:
    config = base()
    layers = nvfp4_bf16_tail_fqns(len(config.model_spec.layers), 0.15)
    config.model_spec = model_registry("8B", converters=[NVFP4LinearConverter.Config(fqns=layers)])
    return config
"""

BRIDGE = """
import torch
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.mixed_precision import bf16_mixed, get_mixed_precision_config

def _perf(kind: str, wide=True):
    if kind == "bf16":
        policy = bf16_mixed()
    else:
        raise ValueError(kind)
    policy.grad_reduce_in_fp32 = not wide
    return policy

def named():
    cfg = _pretrain_common()
    cfg.ddp.grad_reduce_in_fp32 = False
    return cfg

def performance():
    cfg = _pretrain_common()
    cfg.mixed_precision = _perf("bf16")
    cfg.optimizer.use_precision_aware_optimizer = True
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    cfg.optimizer.exp_avg_sq_dtype = torch.bfloat16
    return cfg

def by_name():
    cfg = _pretrain_common()
    cfg.mixed_precision = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    cfg.mixed_precision.fp8_param_gather = cfg.mixed_precision.reuse_grad_buf_for_mxfp8_param_ag = False
    return cfg

def adapters():
    cfg = _pretrain_common()
    cfg.peft = LoRA(dim=8)
    return cfg

def base_elsewhere():
    cfg = _common_of_another_checkout()
    cfg.mixed_precision = bf16_mixed()
    return cfg

def elsewhere():
    cfg = _pretrain_common()
    cfg.optimizer, cfg.scheduler = muon_of_another_checkout(lr=1e-4)
    return cfg

def rules():
    cfg = _pretrain_common()
    cfg.model = Provider()
    cfg.model.quant_recipe = RecipeConfig.from_config_dict({"configs": {}})
    return cfg

def nemotronh_56b_pretrain_8gpu_h100_bf16_config():
    cfg = _pretrain_common()
    cfg.mixed_precision = "nemotron_h_bf16_with_fp8_current_scaling_mixed"
    return cfg

def nemotronh_8b_pretrain_2gpu_h100_bf16_config():
    return _pretrain_common()

def depends():
    cfg = _pretrain_common()
    if torch.cuda.is_available():
        cfg.mixed_precision = "bf16_with_mxfp8_mixed"
    return cfg

def one_field_depends(flag=torch.cuda.is_available()):
    cfg = _pretrain_common()
    cfg.mixed_precision = bf16_mixed()
    if flag:
        cfg.mixed_precision.grad_reduce_in_fp32 = False
    return cfg
"""

COMMON = """
def _pretrain_common():
    opt, scheduler = adam(lr=1e-4)
    return ConfigContainer(model=None, optimizer=opt, ddp=DistributedDataParallelConfig(), mixed_precision="bf16_mixed")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package = tmp_path / "megatron" / "bridge" / "recipes"
    package.mkdir(parents=True)
    (package / "common.py").write_text(COMMON)
    (package / "mine.py").write_text(BRIDGE)
    (tmp_path / "config_registry.py").write_text(TITAN)
    return tmp_path


def bridge(checkout: Path, function: str) -> Imported:
    return read_file(checkout / f"megatron/bridge/recipes/mine.py:{function}")


def titan(checkout: Path, function: str) -> Imported:
    return read_file(checkout / f"config_registry.py:{function}")


FUNCTIONS: dict[str, tuple[str, ...]] = {
    # function -> what must hold (as in test_readings)
    "base": ("recipe=fp32_params_bf16_compute",),
    "plain16": ("storage=bf16",),
    "quantized": ("quantization~mxfp8", "cannot_express: lm_head"),
    "rowwise": ("recipe=bf16_with_fp8_rowwise_gw_hp", "cannot_express: tensorwise", "cannot_express: gate", "!cannot_express: output layer"),
    "tail": ("cannot_express: fraction of the last layers",),
    "named": ("recipe=bf16_mixed", "inert: takes precedence"),
    "performance": ("wire=bf16", "exp_avg=bf16"),
    "by_name": ("recipe=bf16_with_mxfp8_mixed, fp8_param_gather=false, reuse_grad_buf_for_mxfp8_param_ag=false",),
    "rules": ("cannot_express: model.quant_recipe: rules by module",),
    "one_field_depends": ("undecided: mixed_precision.grad_reduce_in_fp32",),
    "elsewhere": ("undecided: optimizer = ",),
    "base_elsewhere": ("undecided: not in this checkout",),
    "adapters": ("cannot_express: peft: only adapters are trained",),
    "nemotronh_56b_pretrain_8gpu_h100_bf16_config": ("contradicts: says BF16, and its GEMMs are quantized: linears of the first 2",),
    "nemotronh_8b_pretrain_2gpu_h100_bf16_config": ("!contradicts",),
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_functions_text_means_what_the_function_makes(checkout: Path, function: str) -> None:
    stack, read = ("torchtitan", titan) if f"def {function}(" in TITAN else ("megatron-bridge", bridge)
    found = read(checkout, function)
    assert [claim for claim in FUNCTIONS[function] if not holds(found, stack, claim)] == [], found


def test_what_cannot_be_read_is_refused_by_name(checkout: Path) -> None:
    with pytest.raises(DataError, match=r"depends: mixed_precision = .*under `if torch\.cuda\.is_available"):
        bridge(checkout, "depends")
    with pytest.raises(DataError, match=r"has 5 functions: name one, config_registry\.py:FUNCTION \(base"):
        read_file(checkout / "config_registry.py")
    with pytest.raises(UnknownName, match="nearest: quantized"):
        titan(checkout, "quantised")
    with pytest.raises(DataError, match="_perf: its text does not determine"):
        bridge(checkout, "_perf")


@pytest.mark.parametrize(
    "body",
    [
        "open('RAN', 'w').write('x')\n    return Trainer.Config(training=TrainingConfig(), x=__import__('os').system('touch RAN'))",
        "return base()",
        "while True: pass",
        "return [[0] * 10 ** 9 for _ in range(10 ** 9)]",
        "x = 9 ** 9 ** 9\n    return x",
        "x = 9\n" + "    x = x * x\n" * 60 + "    return x",
        "return " + "(" * 300 + "1" + ")" * 300,
        "for a in [1] * 10: pass\n    return a",
    ],
)
def test_nothing_of_a_python_file_runs_and_nothing_takes_long(body: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"from torchtitan.trainer import Trainer\nimport os\nos.system('touch RAN')\n\ndef base():\n    {body}\n"
    (tmp_path / "x.py").write_text(text)
    with contextlib.suppress(MpbridgeError):
        read_file(Path("x.py:base"))
    assert not (tmp_path / "RAN").exists()


def test_text_that_is_no_python_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import torchtitan\ndef broken(:\n")
    with pytest.raises(DataError, match=r"bad\.py: is not Python"):
        read_file(tmp_path / "bad.py:broken")
    with pytest.raises((DataError, BadValue)):
        read_text("raise SystemExit('ran')", name="config.py")


@pytest.mark.parametrize(("name", "last"), [("super", 14), ("ultra", 16)])
def test_bridges_name_alone_leaves_out_what_its_performance_recipe_adds(name: str, last: int) -> None:
    text = f"mixed_precision: nemotron_3_{name}_bf16_with_nvfp4_mixed"
    found = read_text(text, stack="megatron-bridge", name="run_config.yaml")
    assert (found.fields.get("modules"), found.fields["num_layers_at_end_in_bf16"]) == (None, last)
