"""Calibration on this CPU, in real time: what it writes is what predictions read."""

from __future__ import annotations

import json
import time

import torch

from mpbridge.planning.estimate.constants import read_machine
from tests.worlds import reported

HURRIED = """
import datetime, functools, json, pathlib, sys, time
import torch, torch.distributed as dist
from mpbridge.training.simulate import calibrate

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
clock, called = time.perf_counter, []
calibrate.Timer = functools.partial(calibrate.Timer, timer=lambda: clock() * (1 + 9 * dist.get_rank()))
calibrate.dist.all_reduce = lambda tensor, reduce=dist.all_reduce: called.append(1) or reduce(tensor[:1])  # quick: repeated often
calibrate._link(0.3, torch.device("cpu"))
counts = [None] * 2
dist.all_gather_object(counts, len(called))
if dist.get_rank() == 0:
    pathlib.Path(sys.argv[1]).write_text(json.dumps(counts))
dist.destroy_process_group()
"""


def test_ranks_whose_clocks_differ_issue_the_same_collectives(tmp_path):
    program = tmp_path / "hurried.py"
    program.write_text(HURRIED)
    first, second = reported(2, str(program), tmp_path / "counts.json")
    assert first == second >= 5


def test_this_cpu_is_measured_and_predictions_follow(tmp_path, cli):
    path = tmp_path / "machine.yaml"
    cli("calibrate --seconds 2 --out", path)
    made, held = read_machine(path)
    assert not made.gpu
    assert held.of("gemm_fp32") == held.of("memory") == 1
    # a product of this moment; the machine may be busier or idler than it was
    a = torch.randn(512, 512)
    start = time.perf_counter()
    for _ in range(5):
        a @ a
    rate = 5 * 2 * 512**3 / (time.perf_counter() - start)
    assert 1 / 50 < rate / (made.flops("fp32") or 0) < 50
    seconds = []
    for size in (64, 256):
        arguments = ["estimate", "--config", "gpt_tiny", "--machine-file", str(path), "--recipe", "fp32", "--json"]
        printed = cli(*arguments, f"data.seq_length={size}", f"model.max_sequence_length={size}")
        seconds.append(json.loads(printed)["seconds"])
    assert seconds[1] > 2 * seconds[0]
