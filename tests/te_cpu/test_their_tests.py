"""`scripts/evidence/te_tests.py`, which runs Transformer Engine's own tests from a clone, on a clone made up here."""

from pathlib import Path

from tests.forked import python
from tests.te_cpu.wheels import OLDEST, ROOT, environment, ran, release_or_skip

MADE_UP = """
import os, signal
import pytest, torch

@pytest.mark.parametrize("number", range(5))
def test_numbers(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    assert number != 4

@pytest.mark.parametrize("number", range(3))
def test_what_another_left_behind(number):
    from transformer_engine.pytorch import distributed
    assert distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE
    distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = False

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_random_tensors(dtype):
    torch.manual_seed(1)
    first, second = (torch.rand(2048, 1024, dtype=dtype, device="cuda") for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand((2048, 1024), dtype=dtype)) and not torch.equal(first, second)
    step = torch.finfo(dtype).eps / 2  # of torch's kernel
    steps = first.double() / step
    assert torch.equal(steps, steps.round()) and 0 <= steps.min() and steps.max() < 1 / step
    assert abs(first.double().mean() - (1 - step) / 2) < 1e-3 and abs(first.double().var() - 1 / 12) < 1e-3

def test_only_equal_tensors_are_close_at_once():
    close, (one, unknown, other) = torch.testing.assert_close, (torch.ones(3, 4) for _ in range(3))
    unknown[1, 2], other[1, 2] = torch.nan, 1.1
    close(one, one.clone())
    close(one.t(), one.t().contiguous())
    close(unknown, unknown.clone(), equal_nan=True)
    for expected in (unknown.clone(), other, one, unknown.clone().t()):
        with pytest.raises(AssertionError):
            close(unknown, expected)

@pytest.mark.parametrize("written", ["clone", "original", "gradient"])
def test_large_clones_are_copies(written):
    original = torch.zeros(4096, 4096).t().requires_grad_()
    clone = original.clone() if written == "gradient" else original.detach().clone()
    assert clone.stride() == original.stride()
    if written == "gradient":
        (2 * clone).sum().backward()
        gradient = original.grad.clone()
        original.grad.add_(1)
        assert bool((gradient == 2).all()) and bool((original.grad == 3).all())
    else:
        (clone if written == "clone" else original.detach()).add_(1)
        assert bool((clone == (written == "clone")).all()) and bool((original == (written == "original")).all())
"""


def test_a_killed_process_fails_one_test_and_the_others_run_in_a_sound_environment(tmp_path: Path) -> None:
    te = release_or_skip(OLDEST)
    tests = tmp_path / "clone/tests/pytorch"
    tests.mkdir(parents=True)
    (tests / "test_recipe.py").write_text(MADE_UP, encoding="utf-8")
    (tests / "test_custom_recipe.py").write_text("import a_package_of_nobody", encoding="utf-8")
    command = [str(ROOT / "scripts/evidence/te_tests.py"), "clone", "test_custom_recipe.py", "test_recipe.py"]
    command += ["--te", te, "--store", "store", "--minutes", "1", "--least", "15", "--each", "60"]
    command += ["--again", "failed", "--show", "9"]  # does not try the killed one for ever
    done = ran(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| test_recipe | B200 | 15 | 15 | 13 | 2 | 0 |" in done.stdout
    assert "test_custom_recipe.py imports a_package_of_nobody, which is not installed" in done.stderr
    assert "signal 9 killed the process" in done.stderr
    assert "assert 4 != 4" in done.stderr


def test_a_file_of_a_quantization_that_no_table_would_show_is_named(tmp_path: Path) -> None:
    tests = tmp_path / "clone/tests/pytorch/nvfp4"
    tests.mkdir(parents=True)
    (tests / "test_nvfp4_new.py").write_text("", encoding="utf-8")
    command = [str(ROOT / "scripts/evidence/te_tests.py"), str(tmp_path / "clone"), "--te", OLDEST]
    command += ["--store", str(tmp_path / "store")]
    done = python(command, env=environment())
    assert done.returncode == 1
    assert "nvfp4/test_nvfp4_new.py" in done.stderr
