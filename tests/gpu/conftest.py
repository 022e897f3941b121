"""GPU tests skip with the reason that the capability check gives, never with a bare 'no GPU'."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # tests.gpu.feed


def transformer_engine_reason() -> str | None:
    """Why Transformer Engine cannot be imported here; None when it can."""
    try:
        if importlib.util.find_spec("transformer_engine") is None:
            return "Transformer Engine is not installed (pip install -e '.[te]' on a machine with CUDA libraries)"
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return f"Transformer Engine is installed but cannot be imported: {type(error).__name__}: {error}"
    return None


@pytest.fixture(scope="session")
def transformer_engine():
    """The imported package; needs its libraries, not a GPU."""
    reason = transformer_engine_reason()
    if reason:
        pytest.skip(reason)
    return importlib.import_module("transformer_engine.pytorch")


def native_reason(name: str) -> str | None:
    """Why this machine cannot run the recipe `name` natively; None when it can."""
    from mpbridge.common.probe import installed, this_machine
    from mpbridge.planning.capability import can_run
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.precision.resolve import resolve

    machine = this_machine()
    if not machine.gpu:
        return f"needs a CUDA device; this machine is a {machine.name}"
    answer = can_run(resolve(get_mixed_precision_config(name)), machine, installed())
    return None if answer.native else answer.reason


@pytest.fixture
def on_gpu():
    """A function that skips unless a recipe (default bf16_mixed) runs natively here."""

    def check(name: str = "bf16_mixed") -> None:
        reason = native_reason(name) or transformer_engine_reason()
        if reason:
            pytest.skip(reason)

    return check


def is_played() -> bool:
    """Whether these tests run under `-p mpbridge.te_cpu.pytest_plugin`: Transformer Engine's Python on a CPU, a GPU's speed and memory not."""
    return bool(getattr(sys.modules.get("transformer_engine_torch"), "mpbridge", False))


@pytest.fixture
def real_gpu():
    """A function that skips on a played machine: for what only speed or CUDA memory can show."""

    def check(why: str) -> None:
        if is_played():
            pytest.skip(f"the machine is played on a CPU: {why}")

    return check


@pytest.fixture
def world():
    """A process group of one on this machine's device, given back: other folders' tests begin without one."""
    import torch

    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group

    mine = start_process_group(torch.cuda.is_available())
    yield
    if mine:
        stop_process_group()


def sizes(width: int) -> list[str]:
    sized = {"hidden_size": width, "ffn_hidden_size": 3 * width, "num_attention_heads": width // 64}
    return [f"model.{name}={value}" for name, value in sized.items()]


@pytest.fixture
def gpu_run(tmp_path):
    """From a recipe and dotted overrides to the Run of a small GPT on real text."""
    import torch

    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.precision.resolve import resolve
    from mpbridge.settings.container import ConfigContainer

    small = is_played() or not torch.cuda.is_available()

    def make(recipe: str, *overrides: str, config: str = "gpt_tiny", **sections):
        path = ROOT / "configs" / f"{config}.yaml"
        # dimensions that every recipe of a Hopper can quantize, and heads that fused attention takes; small ones where a CPU computes
        width, length = (128, ["data.seq_length=128", "train.global_batch_size=4"]) if small else (512, [])
        shape = [*sizes(width), *length] if config == "gpt_tiny" else []
        # weights at rest in FP8 want the distributed optimizer, which keeps the high-precision copy
        sharded = ["ddp.use_distributed_optimizer=true"] if resolve(get_mixed_precision_config(recipe)).stored else []
        common = [f"mixed_precision={recipe}", f"logger.log_dir={tmp_path / recipe}", "logger.progress=false"]
        return ConfigContainer.load(path, [*common, *shape, *sharded, *overrides]).resolved(world_size=1)

    return make
