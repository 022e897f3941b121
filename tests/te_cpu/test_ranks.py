"""`--ranks N` of the pytest plugin: worlds that a test run starts itself."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from mpbridge.te_cpu import ranks
from tests.te_cpu.wheels import NEWEST, environment, ran, release_or_skip

THEIRS = """
import os, subprocess, sys
import pytest, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel

RANK = int(os.environ["RANK"])

@pytest.fixture(scope="module", autouse=True)
def world():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    assert dist.is_nccl_available()
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    dist.init_process_group("nccl", pg_options=options)
    yield
    dist.destroy_process_group()

def test_sum():
    ones = torch.ones(3, device="cuda")
    dist.all_reduce(ones)
    assert ones[0] == dist.get_world_size() == int(os.environ["SIZE"]) == torch.cuda.device_count()
    with pytest.raises(Exception, match="expert dispatch by NCCL needs GPUs"):  # whose address Transformer Engine's ep.py asks for
        dist.group.WORLD._get_backend(torch.device("cuda"))._comm_ptr()

def test_a_bf16_sum_is_rounded_at_every_hop_of_a_ring():
    ranks = dist.get_world_size()
    parts = torch.randn(ranks, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    def ring(start, step):
        total = parts[start]
        for hop in range(1, ranks):
            total = total + parts[(start + hop * step) % ranks]
        return total
    rings = torch.stack([ring(start, step) for start in range(ranks) for step in (1, -1)])
    whole = parts[RANK].clone()
    dist.all_reduce(whole)
    assert bool((rings == whole).any(0).all())
    if ranks > 2:  # one addition is rounded once
        assert not bool((rings == parts.float().sum(0).bfloat16()).any(0).all())
    part = torch.empty(4096 // ranks, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(part, parts[RANK].clone())
    assert bool((rings.view(len(rings), ranks, -1)[:, RANK] == part).any(0).all())

def test_an_average_is_a_sum_of_what_was_multiplied_before():
    ranks = dist.get_world_size()
    one = torch.full((4,), 1e-45)  # the smallest FP32 number: half of it is rounded to zero
    expected = torch.zeros(4)
    kept = one.clone()
    dist.all_reduce(one, dist.ReduceOp.AVG)
    assert torch.equal(one, expected)
    dist.reduce(kept, 0, op=dist.ReduceOp.AVG)
    if RANK == 0:
        assert torch.equal(kept, expected)
    part = torch.empty(4)
    dist.reduce_scatter_tensor(part, torch.arange(4.0 * ranks) + RANK, op=dist.ReduceOp.AVG)
    assert torch.equal(part, torch.arange(4.0) + 4 * RANK + (ranks - 1) / 2)
    numbers = torch.tensor([-3 * (RANK + 1), 5])
    dist.all_reduce(numbers, op=dist.ReduceOp.AVG)
    assert numbers.tolist() == [int(-3 * (ranks + 1) / 2), 5]

def test_groups_by_an_iterator_or_by_none():
    ranks = dist.get_world_size()
    everyone = dist.new_group(number for number in range(ranks)) if RANK else dist.new_group()
    one = torch.ones(1)
    dist.all_reduce(one, group=everyone)
    assert one.item() == ranks

def test_a_hook_that_waits_for_another_collective_of_its_group():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, bias=False).cuda())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model(torch.randn(8, 64)).square().sum().backward()

def test_ddp_on_the_devices_of_its_rank():
    here = int(os.environ["LOCAL_RANK"])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).cuda(), device_ids=[here], output_device=here)
    model(torch.full((2, 4), float(RANK), device="cuda")).sum().backward()
    assert model.module.weight.grad.tolist() == [[float(dist.get_world_size() - 1)] * 4]

def test_fsdp_of_parameters_on_a_gpu_or_on_none():
    expected = [[float(dist.get_world_size() - 1)] * 4]
    for where in ("cuda", "cpu"):
        with torch.device(where):
            plain = torch.nn.Linear(4, 1)
        model = FullyShardedDataParallel(plain, device_id=int(os.environ["LOCAL_RANK"]), use_orig_params=True)
        model(torch.full((2, 4), float(RANK), device="cuda")).sum().backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            assert model.weight.grad.tolist() == expected

def test_one_rank_fails_while_the_others_wait_for_it():
    assert RANK != 1, "wrong here"
    dist.all_reduce(torch.ones(3))

def test_one_rank_fails():
    assert RANK != 0

def test_a_rank_dies():
    if RANK == 0:
        os._exit(9)
    dist.all_reduce(torch.ones(3))

@pytest.mark.skipif(RANK == 0, reason="not on rank 0")
def test_some_ranks_skip():
    pass

@pytest.mark.skip(reason="nowhere")
def test_all_ranks_skip():
    pass

def test_after_all_that():
    test_sum()
    stays = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", stays], stdout=subprocess.PIPE)
    left.stdout.readline()
    with open(f"left{RANK}", "w") as file:
        file.write(str(left.pid))
"""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_one_report_for_all_ranks_and_none_hangs(tmp_path: Path, size: int) -> None:
    te = release_or_skip(NEWEST)
    (tmp_path / "test_theirs.py").write_text(THEIRS, encoding="utf-8")
    command = ["-m", "pytest", "-p", "mpbridge.te_cpu.pytest_plugin", "--played", "h100", "--te", te]
    command += ["--ranks", str(size), "--ranks-grace", "3", "-p", "no:cacheprovider", "-q", "-rA", "-c", os.devnull]
    done = ran(*command, "--rootdir", str(tmp_path), "test_theirs.py", cwd=tmp_path, SIZE=str(size))
    said = done.stdout
    assert "3 failed, 9 passed, 1 skipped" in said, said + done.stderr
    assert done.returncode == 1
    words = [
        *(f"FAILED test_theirs.py::test_{name} " for name in ("one_rank_fails_while_the_others_wait_for_it", "one_rank_fails", "a_rank_dies")),
        "rank 1 failed, and 3 s later not all had finished", "rank 0: waits",
        "in test_one_rank_fails_while_the_others_wait_for_it",  # where the rank waits
        "AssertionError: wrong here", f"failed on 0 of {size}", "rank 0 ended with status 9",
    ]  # fmt: skip
    assert [word for word in words if word not in said] == []
    for rank in range(size):
        left = Path(f"/proc/{(tmp_path / f'left{rank}').read_text()}/stat")
        stop = time.monotonic() + 60
        with contextlib.suppress(OSError):  # it is gone
            while left.read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < stop, "what a rank leaves ends with it"
                time.sleep(0.1)


COUNTING = """
import os, threading, time

def test_a():
    if os.environ["RANK"] == "0":
        for _ in range(60):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

def test_b():
    assert threading.active_count() < 60
    os._exit(0)

def test_c():
    assert threading.active_count() < 60
"""
SKIPS = "import pytest\npytest.skip('as a whole', allow_module_level=True)\n"


def test_a_world_goes_on_as_a_new_one_before_threads_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    te = release_or_skip(NEWEST)
    monkeypatch.setattr(ranks, "THREADS", 60)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for name, text in (("test_counting.py", COUNTING), ("test_skips.py", SKIPS)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    with ranks.Ranks(2, "h100", te) as world:
        found = list(world.run(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "."], 300))
    assert [(one.test, one.outcome) for one in found] == [
        ("test_counting.py::test_a", "passed"),
        ("test_skips.py", "skipped"),
        ("test_counting.py::test_b", "failed"),
        ("test_counting.py::test_c", "passed"),
    ]
    assert world._worlds == 3
