"""What an import says is what the stack runs, not what is written: settings that a stack overrides or never reads are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpbridge.cli.main import main

FSDP = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params", "use_distributed_optimizer": True}  # fmt: skip
SHARDED = {"mixed_precision": "bf16_with_mxfp8_mixed", "ddp": FSDP, "model": {"num_layers": 2}}
ROUTER = """import torch

def config(cfg):
    cfg.mixed_precision = "bf16_mixed"
    cfg.model.moe_router_dtype = torch.float32
    return cfg
"""


def imported(
    place: Path, text: str, capsys: pytest.CaptureFixture[str], stack: str, *more: str
) -> tuple[int, dict[str, list[str]]]:
    """(exit code, the answer) of an import."""
    place.write_text(text)
    code = main(["import", str(place), "--from", stack, "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_a_routers_dtype_that_megatron_core_does_not_know_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = imported(tmp_path / "a.py", ROUTER, capsys, "megatron-bridge")
    assert code == 1
    assert any(
        "moe_router_dtype=torch.float32" in line and "runs in the model's dtype" in line for line in said["inert"]
    )
    _, known = imported(tmp_path / "b.py", ROUTER.replace("torch.float32", "'fp32'"), capsys, "megatron-bridge")
    assert not any("moe_router_dtype" in line for line in known["inert"])


def test_the_gather_that_bridge_switches_off_under_full_sharding_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = imported(tmp_path / "a.yaml", json.dumps(SHARDED), capsys, "megatron-bridge")
    assert code == 1
    assert any(line.startswith("reuse_grad_buf_for_mxfp8_param_ag: Bridge switches it off") for line in said["inert"])
    plain = SHARDED | {"ddp": {"use_distributed_optimizer": True}}
    _, kept = imported(tmp_path / "b.yaml", json.dumps(plain), capsys, "megatron-bridge")
    assert not any("reuse_grad_buf" in line for line in kept["inert"])


@pytest.mark.parametrize(("given", "code"), [(["--env", "9=bf16"], 0), ([], 1)], ids=["given", "not given"])
def test_the_ninth_word_of_a_script_counts_without_the_first_eight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], code: int
) -> None:
    script = "#!/bin/bash\ntorchrun x.py --micro-batch-size 1 --${9}\n"
    found, said = imported(tmp_path / "a.sh", script, capsys, "megatron-lm", *given)
    assert found == code
    assert bool(said["undecided"]) == (not given)


def test_a_script_that_decides_by_running_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fsdp.py").write_text(
        "from accelerate import Accelerator\nfrom accelerate.utils import AORecipeKwargs\n"
        "Accelerator(mixed_precision='fp8', kwargs_handlers=[AORecipeKwargs()])\n"
    )
    assert main(["import", str(tmp_path / "fsdp.py")]) == 2
    assert "would have to be executed" in capsys.readouterr().err
