"""What ranks tell each other: exact, equal parts once, two collectives in any world, and little of it in one of 10,000 ranks (a fake group)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import python
from tests.worlds import COUNTED, start

EXACT = """
import os, sys
from dataclasses import dataclass, field
import torch.distributed as dist
from mpbridge.backend.devices.collectives import from_all

@dataclass
class Inner:
    names: list = field(default_factory=list)
    loss: float = 0.0

@dataclass
class Outer:
    table: dict
    inner: Inner | None = None

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
def made(rank):
    return Outer({"a": [1, 2.5, None]} if rank != 1 else {"b": rank}, None if rank == 2 else Inner(["x"] * 50, float(rank)))
assert from_all(made(rank), deeper={"inner": Inner}) == [made(r) for r in range(size)]
assert from_all(f"rank {rank % 2}") == [f"rank {r % 2}" for r in range(size)]
assert from_all(None) == [None] * size
pair = dist.new_group([0, 2])
if rank in (0, 2):
    assert from_all(rank, group=pair) == [0, 2]
dist.barrier()
dist.destroy_process_group()
"""


MANY_GROUPS = """
import os
import torch
import torch.distributed as dist
from mpbridge.backend.devices import device_layer
before = dist.ProcessGroupGloo.__init__
with device_layer(cuda=False):
    dist.init_process_group("gloo")
    first = len(os.listdir("/proc/self/task"))
    groups = [dist.new_group([0, 1]) for _ in range(60)]
    # two threads for each group, and at most 16 for their devices: torch's own are 180
    assert len(os.listdir("/proc/self/task")) - first <= 2 * 60 + 16, len(os.listdir("/proc/self/task"))
    ones = torch.ones(60, 3)
    works = [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(ones, groups)]
    [work.wait() for work in works]
    assert torch.equal(ones, torch.full((60, 3), 2.0))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
assert dist.ProcessGroupGloo.__init__ is before
"""


AT_ONCE = """
import torch
import torch.distributed as dist
from mpbridge.backend.devices import device_layer
from mpbridge.backend.devices.collectives import group_of
with device_layer(cuda=False):
    dist.init_process_group("gloo")
    mine = sorted({dist.get_rank(), dist.get_rank() ^ 1})
    with group_of(mine):
        group = dist.new_group(mine)
    one = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(one, group=group)
    assert one.item() == sum(mine)
    dist.barrier()
    dist.destroy_process_group()
"""


SCRIPTS = {
    "every rank gets what every rank said": (3, EXACT),
    "the groups of a process share their devices": (2, MANY_GROUPS),
    "ranks that make different groups at once find the right ones": (4, AT_ONCE),
}


@pytest.mark.parametrize(("size", "text"), SCRIPTS.values(), ids=SCRIPTS)
def test_ranks(size: int, text: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    start(size, str(tmp_path / "script.py"))


FORKED = """
import os
import torch
import torch.distributed as dist
from mpbridge.backend.devices import device_layer

def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.new_group([0]) for _ in range(5)]
    dist.all_reduce(torch.ones(1), group=groups[-1])
    dist.destroy_process_group()

with device_layer(cuda=False):
    world()
    child = os.fork()
    if not child:
        world()
        raise SystemExit(0)
    assert os.waitpid(child, 0)[1] == 0
    world()
os.environ["GLOO_SOCKET_IFNAME"] = "none0"
with device_layer(cuda=False):
    try:
        world()
    except RuntimeError as error:
        assert "none0" in str(error), error
    else:
        raise SystemExit("it opened another interface than the one asked for")
"""


def test_devices_of_a_fork_and_of_an_interface_that_was_named(tmp_path: Path) -> None:
    script = tmp_path / "devices.py"
    script.write_text(FORKED, encoding="utf-8")
    # a process that ends as an interpreter does, and so does its child
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


FAKE = """
import json, random, sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from mpbridge.observe.audit.replicas import agree
from mpbridge.observe.audit.examine import bounded, chosen
from mpbridge.observe.audit.examine import everywhere
from mpbridge.observe.audit.gradients import Followed
from mpbridge.observe.audit.observe import Observed, Tally
from mpbridge.observe.audit.quantization import Quantizations
from mpbridge.observe.audit.replicas import Copies
from mpbridge.observe.audit.weights import Weights
from mpbridge.settings.container import ConfigContainer
from mpbridge.backend.devices import collectives as gather
from mpbridge.backend.devices.collectives import agreed, on_first_rank

WORLD = int(sys.argv[1])
DATA = max(1, WORLD // 32)
names = [f"decoder.layers.{i}.{part}.weight" for i in range(8) for part in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")]
norms = [f"decoder.layers.{i}.input_layernorm.weight" for i in range(8)]

def observed(rank):
    '''What a rank of 8 layers says under a quantized recipe: 8 tensor ranks, 4 stages, the states sharded over the others.'''
    draw, shard = random.Random(rank), rank // 32
    near = {name: {i * 350_003: draw.gauss(0, 1) for i in range(48)} for name in chosen(names, 2)}
    mine = [names[shard * len(names) // (DATA + 1)]]
    return Observed(
        tensors={(role, "fp32", "fp32"): Tally(1 + shard % 3, 800_000, 3_200_000) for role in ("params", "grads", "main_params", "exp_avg", "exp_avg_sq")},
        layouts={name: {"params": "bf16", "grads": "fp32"} for name in names + norms},
        rules={("hybrid delayed", "hybrid delayed"): list(names)},
        flags=(24, []),
        weights=Weights(trainable=names + norms, moved=mine, elsewhere=[name for name in names + norms if name not in mine]),
        copies=Copies(whole={(name, rank % 8, 0): hash((name, rank % 32)) for name in names + norms}),
        quantized=Quantizations(promised=96, seen=96, scales=192, amaxes={f"{name} {side}": (draw.random(), draw.random()) for name in names for side in "xwd"}),
        followed=Followed(produced=near, read={mine[0]: {0: draw.gauss(0, 1)}}, group=tuple(range(rank % 32, WORLD, 32)), roots=draw.random(), loss=draw.random()),
    )

COUNTED
run = ConfigContainer.load("gpt_tiny").resolved()
assert agree(run.policy) == run.policy.fingerprint()
assert len(everywhere(observed(0))) == WORLD
agreed(1)
on_first_rank(lambda: "done")
issued = [name for name, _ in calls]
received = max(size for _, size in calls)
# the group answers as if all ranks said the same: what they would say travels in the sum, every part of it once. Of a large world every ninth rank speaks
# (nine has no factor in common with the layout) for itself and eight others: at least what all would say
EVERY = 9 if WORLD > 1000 else 1
deeper = {"followed": Followed}
marks, total = {}, 0
for rank in range(0, WORLD, EVERY):
    for part in map(gather._packed, gather._apart(bounded(observed(rank), WORLD), deeper)):
        total += gather._MARK + gather._LENGTH
        marks.setdefault(gather._mark(part), len(part))
print(json.dumps([issued, received, EVERY * (total + sum(marks.values()))]))
""".replace("COUNTED\n", COUNTED)


def said(world: int, tmp_path: Path) -> list:
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    done = python([str(script), str(world)])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_number_of_collectives_does_not_depend_on_the_world_and_ten_thousand_ranks_say_less_than_ten_megabytes(
    tmp_path: Path,
) -> None:
    few, _, _ = said(64, tmp_path)
    many, received, different = said(10_000, tmp_path)
    assert few == many
    assert len(many) < 10
    assert received < 10e6
    assert different < 10e6, "marks of all ranks, and every part that no other rank has"
    print(f"10,000 ranks: {len(many)} collectives, {different / 1e6:.2f} MB")
