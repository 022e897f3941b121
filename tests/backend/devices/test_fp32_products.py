"""Products of FP32 factors are what the policy promises, whatever torch's settings were."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from mpbridge import get_mixed_precision_config, resolve
from mpbridge.backend.devices.products import hold, reduced

_KNOWN = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
MATMULS = tuple(one for one in _KNOWN if hasattr(one, "fp32_precision"))
"""What has a setting by its newer name; none before torch 2.9, where one older switch allows TF32 on GPUs and BF16 on CPUs."""
newer = pytest.mark.skipif(not MATMULS, reason="torch.backends.mkldnn.matmul is newer than this torch")
FP32, BF16 = (resolve(get_mixed_precision_config(name)) for name in ("fp32", "full_bf16"))


def now() -> tuple[str, ...]:
    return tuple(one.fp32_precision for one in MATMULS)


ALLOW: dict[str, Callable[[], None]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for one in MATMULS:
        one.fp32_precision = "none"


@newer
@pytest.mark.parametrize("allow", ALLOW.values(), ids=ALLOW)
def test_fp32_is_ieee_while_it_is_held_and_torch_gets_its_settings_back(
    allow: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    allow()
    before = now()
    with caplog.at_level(logging.WARNING, logger="mpbridge"):
        give_back = hold(FP32)
    assert give_back is not None
    assert now() == ("ieee", "ieee")
    assert not reduced(FP32)
    assert [one.getMessage() for one in caplog.records if "set to IEEE FP32" in one.getMessage()]
    give_back()
    assert now() == before


@newer
def test_what_promises_no_fp32_product_leaves_torch_alone(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_float32_matmul_precision("high")
    assert hold(BF16) is None
    assert now() == ("tf32", "tf32")
    assert not caplog.records


@newer
def test_the_last_of_several_gives_back() -> None:
    torch.set_float32_matmul_precision("high")
    first, second = hold(FP32), hold(FP32)
    assert first is not None
    assert second is not None
    first()
    assert now() == ("ieee", "ieee")
    second()
    assert now() == ("tf32", "tf32")


def test_the_switch_of_every_torch_is_off_while_fp32_is_held() -> None:
    torch.set_float32_matmul_precision("highest")
    for word in ("high", "medium"):
        torch.set_float32_matmul_precision(word)
        assert reduced(FP32)["cuda"] == "tf32"
        give_back = hold(FP32)
        assert give_back is not None
        assert not torch.backends.cuda.matmul.allow_tf32
        assert (torch.get_float32_matmul_precision(), reduced(FP32)) == ("highest", {})
        give_back()
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == word


def test_a_container_that_allows_tf32_through_its_environment_is_overruled() -> None:
    code = """
import torch
from mpbridge.backend.devices.products import hold, reduced
from mpbridge import get_mixed_precision_config, resolve
policy = resolve(get_mixed_precision_config("fp32"))
print(reduced(policy))
give_back = hold(policy)
print(reduced(policy), torch.backends.cuda.matmul.allow_tf32)
give_back()
print(reduced(policy), torch.backends.cuda.matmul.allow_tf32)
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.splitlines() == ["{'cuda': 'tf32'}", "{} False", "{'cuda': 'tf32'} True"]
    assert "set to IEEE FP32" in done.stderr
