"""`mpbridge on-cpu` runs a script that knows only CUDA, in processes of its own: also those that the script spawns."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpbridge.common.errors import Refused
from mpbridge.common.transformer_engine import VARIABLE, choose
from mpbridge.te_cpu import context, foreign
from mpbridge.te_cpu.foreign import _Triton
from tests.forked import forked
from tests.te_cpu.wheels import FOLDERS, OLDEST, ran, release_or_skip

SCRIPT = '''
import multiprocessing, sys
import torch
import transformer_engine.pytorch as te

class Box:
    """Pickled by name of the main module."""
    def __init__(self, value):
        self.value = value

def ask(box, answers):
    device = te.Linear(16, 16, device="cuda").weight.device
    answers.put({"name": torch.cuda.get_device_name(), "weight": str(device), "value": box.value})

def start(context, *work):
    child = context.Process(target=work[0], args=work[1:])
    child.start()
    child.join()
    assert child.exitcode == 0

if __name__ == "__main__":
    assert sys.argv[1:] == ["--flag", "x"], sys.argv
    context = multiprocessing.get_context(sys.argv[0].split("-")[-1].removesuffix(".py"))
    answers = context.SimpleQueue()
    start(context, start, context, ask, Box(7), answers)  # a process that one starts plays too
    print(answers.get())
'''


def on_cpu(
    script: Path | str, *arguments: str, launcher: tuple[str, ...] = (), folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """script: a path, or -m. folder: the working directory; None: the script's."""
    verb = ("mpbridge", "on-cpu", "--target", "b200", "--te", release_or_skip(OLDEST))
    return ran(*launcher, "-m", *verb, str(script), *arguments, cwd=folder or Path(script).parent)


def test_processes_that_a_script_spawns_play_the_same_machine(tmp_path) -> None:
    script = tmp_path / "script-spawn.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = on_cpu(script, "--flag", "x")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("{'name': 'B200', 'weight': 'cpu', 'value': 7}")


def test_a_conftest_that_fails_is_all_that_a_test_run_says(tmp_path) -> None:
    (tmp_path / "conftest.py").write_text("import no_such_module", encoding="utf-8")
    played = ("-p", "mpbridge.te_cpu.pytest_plugin", "--played", "h100", "--te", release_or_skip(OLDEST))
    done = ran("-m", "pytest", *played, "-c", os.devnull, str(tmp_path), timeout=300)
    assert "No module named 'no_such_module'" in done.stderr
    assert "Exception ignored" not in done.stderr


ASKS = """
import importlib.metadata, sys
import shadowed, torch, transformer_engine
print(sys.argv[1:], torch.cuda.get_device_name())
print(shadowed.__file__, importlib.metadata.version("transformer-engine"), transformer_engine.__file__)
"""


def test_a_module_runs_in_the_place_of_a_script_and_what_lies_beside_transformer_engine_hides_no_checkout(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """site-packages may be the folder of Transformer Engine, and holds an older copy of what PYTHONPATH names."""
    release_or_skip(OLDEST)
    package = choose(OLDEST, FOLDERS)
    beside, checkout, app = tmp_path / "site", tmp_path / "checkout", tmp_path / "app"
    for folder in (beside, checkout, app):
        folder.mkdir()
    for folder in (beside, checkout):
        (folder / "shadowed.py").write_text("", encoding="utf-8")
    for found in package.folder.glob("transformer_engine*"):
        (beside / found.name).symlink_to(found)
    (app / "__init__.py").write_text("", encoding="utf-8")
    (app / "train.py").write_text(ASKS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    monkeypatch.setenv(VARIABLE, str(beside))
    done = on_cpu("-m", "app.train", "-m", "--flag", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    asked, found = done.stdout.splitlines()[-2:]
    assert asked == "['-m', '--flag'] B200"
    places = checkout / "shadowed.py", package.version, beside / "transformer_engine/__init__.py"
    assert found.split() == [str(one) for one in places]


def _command(script: str) -> None:
    """The verb without what it plays: the script's own errors are the command line's matter."""
    from mpbridge.cli.main import entry

    context.transformer_engine_on_cpu = lambda *args, **how: contextlib.nullcontext()  # type: ignore[assignment,misc]
    foreign.foreign_code = contextlib.nullcontext  # type: ignore[assignment]
    sys.argv = ["mpbridge", "on-cpu", script]
    entry()


def errors(script: Path) -> str:
    """What a script that fails leaves on stderr."""
    with forked(_command, str(script), apart=True) as process:
        assert process.wait() == 1, process.errors
    return process.errors


def test_a_scripts_own_import_error_passes_through(tmp_path) -> None:
    (tmp_path / "asker.py").write_text("import megatron.core.no_such_module", encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text("import asker", encoding="utf-8")
    said = errors(script)
    assert "No module named 'megatron.core.no_such_module'" in said.strip().splitlines()[-1]
    assert f'File "{tmp_path / "asker.py"}", line 1' in said
    assert "not installed" not in said


UNGUARDED = """
import multiprocessing, torch
torch.distributed.init_process_group("nccl")
context = multiprocessing.get_context("spawn")
child = context.Process(target=print)
child.start()
child.join()
raise SystemExit(child.exitcode)
"""


def test_a_script_without_a_guard_is_told_so(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED, encoding="utf-8")
    done = on_cpu(script)
    assert done.returncode == 1
    assert f"{script} begins its work again in a process that it has started" in done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr


RANKS = """
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
mine = torch.tensor([1.5, -2.0 - rank], device="cuda").to(torch.float8_e4m3fn)
whole = torch.empty(4, dtype=torch.float8_e4m3fn, device="cuda")
dist.all_gather_into_tensor(whole, mine.view(1, 2))  # of NCCL, elements are enough
first = mine.clone()
dist.broadcast(first, 0)
told = [torch.cuda.current_device(), torch.accelerator.current_device_index(), mine.get_device(), whole.tolist(), first.tolist()]
gathered = [None, None]
dist.all_gather_object(gathered, told)
if rank == 0:
    print(gathered, flush=True)
if rank == 1:
    raise ValueError("this rank fails")
dist.all_reduce(torch.ones(1))
"""


def test_ranks_have_their_devices_send_fp8_as_it_is_and_end_when_one_fails(tmp_path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    began = time.monotonic()
    done = on_cpu(script, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    whole, first = [1.5, -2.0, 1.5, -3.0], [1.5, -2.0]
    assert str([[rank, rank, rank, whole, first] for rank in (0, 1)]) in done.stdout, done.stderr[-3000:]
    assert done.returncode == 1
    assert "ValueError: this rank fails" in done.stderr
    assert time.monotonic() - began < 800  # no wait for gloo's own limit of half an hour


def test_check_says_that_the_target_is_played() -> None:
    command = ["-m", "mpbridge", "check", "--recipe", "bf16_with_fp8_delayed_scaling_mixed", "--target", "h100"]
    for more, played in (["--emulate", "te", "--te", release_or_skip(OLDEST)], True), ([], False):
        done = ran(*command, *more, "ddp.use_distributed_optimizer=true", COLUMNS="200")
        assert done.returncode == 0, done.stdout + done.stderr
        said = "here   played by Transformer Engine 2.11.0's own Python on the CPU"
        assert (said in done.stdout) is played


def test_an_operating_systems_error_of_the_script_keeps_its_traceback(tmp_path) -> None:
    script = tmp_path / "fetches.py"
    script.write_text('raise ConnectionError("the network is unreachable")\n', encoding="utf-8")
    said = errors(script)
    assert "fetches.py" in said
    assert said.rstrip().endswith("ConnectionError: the network is unreachable")


def test_a_triton_kernel_under_several_decorators_is_refused_by_name() -> None:
    """Megatron-LM's are autotuned; one that nothing launches would leave its output as it was."""
    triton = _Triton("triton")

    @triton.autotune(configs=[triton.Config({"BLOCK": 1})], key=["n"])
    @triton.heuristics({"EVEN": lambda args: True})
    @triton.jit
    def rotate(x: int) -> None: ...

    assert rotate.src == "def rotate(x: int) -> None: ...\n"  # xformers writes kernels from it when it is imported
    for launch in (lambda: rotate[(1,)](0), lambda: rotate.run(0, grid=(1,)), lambda: rotate(0)):
        with pytest.raises(Refused, match=r"the Triton kernel .*rotate runs on a GPU only"):
            launch()
    blocks = triton.cdiv(4097, triton.next_power_of_2(1000))  # as callers compute the grid of a launch
    assert blocks == 5
    assert [triton.next_power_of_2(n) for n in (0, 1, 2, 3, 1024, 1025)] == [0, 1, 2, 4, 1024, 2048]
    with pytest.raises(Refused, match="rotate runs on a GPU only"):
        rotate[blocks,](0)
