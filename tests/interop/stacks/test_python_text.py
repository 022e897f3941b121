"""Python configurations as text: what is read, what is not known, and that nothing of them runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from mpbridge.common.errors import BadValue, DataError, MpbridgeError, UnknownName
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.importers import read_file, read_text
from mpbridge.interop.stacks.nearest import answer

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


def told(found: Imported) -> str:
    return str(answer(found.fields, engine=found.engine, meaning=found.meaning))


def test_a_torchtitan_function_is_followed_through_another_of_its_file(checkout: Path) -> None:
    assert told(titan(checkout, "base")) == "fp32_params_bf16_compute"
    assert titan(checkout, "plain16").meaning.storage is DType.BF16


def test_converters_are_read_with_what_they_leave_out(checkout: Path) -> None:
    found = titan(checkout, "quantized")
    assert "mxfp8" in found.meaning.quantization
    assert any("lm_head" in line for line in found.cannot_express)
    found = titan(checkout, "rowwise")
    assert told(found) == "bf16_with_fp8_rowwise_gw_hp"
    assert [line for line in found.cannot_express if "tensorwise" in line]
    assert [line for line in found.cannot_express if "gate" in line]
    assert not [line for line in found.cannot_express if "output layer" in line]
    assert any("fraction of the last layers" in line for line in titan(checkout, "tail").cannot_express)


def test_a_bridge_recipe_takes_its_base_from_another_file_of_the_checkout(checkout: Path) -> None:
    found = bridge(checkout, "named")
    assert told(found) == "bf16_mixed"
    assert any("takes precedence" in line for line in found.inert)


def test_branches_with_known_conditions_are_taken(checkout: Path) -> None:
    found = bridge(checkout, "performance")
    assert (found.meaning.wire, found.meaning.exp_avg) == (DType.BF16, DType.BF16)


def test_values_set_on_a_named_recipe_win(checkout: Path) -> None:
    assert (
        told(bridge(checkout, "by_name"))
        == "bf16_with_mxfp8_mixed, fp8_param_gather=false, reuse_grad_buf_for_mxfp8_param_ag=false"
    )


def test_rules_by_module_on_the_model_are_told(checkout: Path) -> None:
    assert bridge(checkout, "rules").cannot_express[0].startswith("model.quant_recipe: rules by module")


def test_what_depends_on_the_machine_is_refused_or_said(checkout: Path) -> None:
    with pytest.raises(DataError, match=r"depends: mixed_precision = .*under `if torch\.cuda\.is_available"):
        bridge(checkout, "depends")
    found = bridge(checkout, "one_field_depends")
    assert any(line.startswith("mixed_precision.grad_reduce_in_fp32") for line in found.undecided)
    assert bridge(checkout, "elsewhere").undecided[0].startswith("optimizer = ")
    assert "not in this checkout" in bridge(checkout, "base_elsewhere").undecided[-1]


def test_a_recipe_that_trains_adapters_says_so(checkout: Path) -> None:
    assert "peft: only adapters are trained" in bridge(checkout, "adapters").cannot_express


def test_a_file_with_several_functions_asks_for_one_and_knows_their_names(checkout: Path) -> None:
    with pytest.raises(DataError, match=r"has 5 functions: name one, config_registry\.py:FUNCTION \(base"):
        read_file(checkout / "config_registry.py")
    with pytest.raises(UnknownName, match="nearest: quantized"):
        titan(checkout, "quantised")


def test_a_function_that_is_no_configuration_is_refused_by_name(checkout: Path) -> None:
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
def test_nothing_of_a_python_file_runs_and_nothing_takes_long(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("function", "said"),
    [("nemotronh_56b_pretrain_8gpu_h100_bf16_config", "says BF16, and its GEMMs are quantized: linears of the first 2"), ("nemotronh_8b_pretrain_2gpu_h100_bf16_config", None)],
)  # fmt: skip
def test_a_function_named_bf16_that_trains_in_fp8_is_told(checkout: Path, function: str, said: str | None) -> None:
    assert [
        line.removeprefix(function).strip().startswith(said or "?") for line in bridge(checkout, function).contradicts
    ] == ([True] if said else [])


@pytest.mark.parametrize(("name", "last"), [("super", 14), ("ultra", 16)])
def test_bridges_name_alone_leaves_out_what_its_performance_recipe_adds(name: str, last: int) -> None:
    found = read_text(
        f"mixed_precision: nemotron_3_{name}_bf16_with_nvfp4_mixed", stack="megatron-bridge", name="run_config.yaml"
    )
    assert (found.fields.get("modules"), found.fields["num_layers_at_end_in_bf16"]) == (None, last)
