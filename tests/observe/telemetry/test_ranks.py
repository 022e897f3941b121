"""Statistics of many ranks: the worst of all, in a number of collectives that does not depend on how many ranks there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpbridge.observe.telemetry.records import kept
from tests.forked import python
from tests.worlds import COUNTED, start

RANKS = """
import json, sys
import torch.distributed as dist
from mpbridge.observe.telemetry.hook import worst_of_all

nan, inf = float("nan"), float("inf")
def operand(linear, *values):
    return [linear, "x", "row", "fprop", "e4m3", "delayed", *values]
def said(rank):
    own = [operand(f"stage {rank % 2}", 0.1 * rank, None if rank else 0.5, 3.0 + rank, 2.0 ** -rank, [-0.1, 0.0, 0.05][rank], 30.0 - rank, inf if rank == 2 else 0.25, rank)]
    linears = [["l", 1.0, nan if rank == 1 else 2.0, 100.0 - rank, 7 + rank, None, None, 0, 5.0 + rank]]
    return {"operands": own, "linears": linears, "weights": [[f"w{rank}", 1.0, 2.0, 0, None, 0.5, 0.25, 0.125]]}
dist.init_process_group("gloo")
found = worst_of_all(said(dist.get_rank()))
stages = [operand("stage 0", 0.2, 0.5, 5.0, 0.25, -0.1, 28.0, inf, 2), operand("stage 1", 0.1, None, 4.0, 0.5, 0.0, 29.0, 0.25, 1)]
linears = [["l", 1.0, nan, 100.0, 7, None, None, 0, 5.0]]  # the channel of the largest outlier, not the largest channel
weights = [[f"w{rank}", 1.0, 2.0, 0, None, 0.5, 0.25, 0.125] for rank in range(3)]
expected = {"operands": stages, "linears": linears, "weights": weights}
assert json.dumps(found) == json.dumps(expected), (found, expected)
dist.destroy_process_group()
"""


def test_every_rank_gets_the_worst_of_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    start(3, str(script))


FAKE = (
    """
import json, sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from mpbridge.observe.telemetry.hook import worst_of_all

"""
    + COUNTED
    + """
linears = [f"decoder.layers.{i}.{part}" for i in range(100) for part in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")]
tables = {
    "operands": [[name, side, copy, "fprop", "e4m3", "mxfp8", *([2.0] * 8)] for name in linears for side in ("x", "w", "dy") for copy in ("row", "column")],
    "linears": [[name, *([2.0] * 8)] for name in linears],
    "weights": [[name, *([2.0] * 7)] for name in linears],
}
assert worst_of_all(tables)["operands"] == tables["operands"]
print(json.dumps([[name for name, _ in calls], sum(size for _, size in calls)]))
"""
)


def test_statistics_of_ten_thousand_ranks_take_as_many_collectives_as_those_of_two(tmp_path: Path) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    said = []
    for world in ("2", "10000"):
        done = python([str(script), world])
        assert done.returncode == 0, done.stderr[-3000:]
        said.append(json.loads(done.stdout.splitlines()[-1]))
    (few, _), (many, received) = said
    assert few == many
    assert len(many) < 8
    assert received < 10e6, "a model of 100 layers"


def test_a_damaged_line_of_statistics_stops_no_run_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "statistics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n{"iteration": Infinity}\n\xff[\n{"iteration": 2}\n{"iteration": 7}\n')
    assert kept(path, 2) == ['{"iteration": 1}\n', '{"iteration": 2}\n']
    assert "2 of 5 lines cannot be read" in capsys.readouterr().err
