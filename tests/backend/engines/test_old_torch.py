"""What torch 2.6 lacks is refused where it is needed, and nowhere else."""

import subprocess
import sys

import pytest

from mpbridge.common.probe import installed
from mpbridge.common.versions import at_least

CODE = """
import torch, torch._dynamo, torch._inductor.cpp_builder  # the newer torch needs these names itself
for where, name in ((torch, "float8_e8m0fnu"), (torch.optim, "Muon")):
    if hasattr(where, name):
        delattr(where, name)
import mpbridge.training.loop, mpbridge.backend.engines.shard_state, mpbridge.observe.witnessing.witness
from mpbridge.backend.engines.muon import ShardMuon
from mpbridge.common.errors import Refused
try:
    ShardMuon([], None, None, {}, {})
except Refused as error:
    print(error)
"""


@pytest.mark.skipif(
    at_least(installed().megatron_core, "0.20"), reason="megatron-core 0.20 itself imports torch.float8_e8m0fnu"
)
def test_a_torch_without_muon_and_e8m0_trains_and_refuses_muon() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "needs torch.optim.Muon" in done.stdout
