"""Other projects' trainers under a witness, the real packages: what each word means there, from live tensors, beside the table of words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.forked import ROOT, python

PACKAGES = {
    "transformers": ("transformers", "accelerate"), "accelerate": ("accelerate",), "lightning": ("lightning",), "deepspeed": ("deepspeed",), "megatron-lm": (),
    "torchtitan": ("spmd_types", "tyro"), "automodel": ("transformers",),
}  # fmt: skip
CASES = {
    "transformers": 2, "accelerate": 4, "lightning": 5, "deepspeed": 4, "megatron-lm": 4, "torchtitan": 2, "automodel": 2
}  # fmt: skip
"""How many rows of the table each stack's loop shows at least."""
CHECKOUTS = {"torchtitan": "torchtitan", "automodel": "Automodel"}
"""Stack -> folder of its clone: no package of it is on PyPI that would do."""
SHARDED = ("deepspeed", "megatron-lm", "torchtitan", "automodel")
"""Shown in two processes only; megatron-core's objects in one process have tests of their own."""


@pytest.mark.parametrize(
    ("stack", "size"), [(stack, size) for stack in PACKAGES for size in (1, 2) if size == 2 or stack not in SHARDED]
)
@pytest.mark.timeout(1200)
def test_what_a_stack_does_is_what_the_table_of_words_says(stack: str, size: int, tmp_path: Path) -> None:
    for package in PACKAGES[stack]:
        pytest.importorskip(package, reason=f"{package} is not installed: its own loop is what this runs")
    checkouts = os.environ.get("MPBRIDGE_CHECKOUTS", "")
    if stack in CHECKOUTS and not (checkouts and Path(checkouts, CHECKOUTS[stack]).is_dir()):
        pytest.skip(f"its own code is what this runs: MPBRIDGE_CHECKOUTS=FOLDER with a clone of {CHECKOUTS[stack]}")
    # a run of DeepSpeed's that was killed leaves the lock of an extension behind, and every later one would wait for it
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    program = f"{ROOT}/scripts/evidence/witness_stacks.py"
    done = python([program, "--only", stack], size=size if size > 1 else 0, env=env, timeout=580)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ok ") for line in lines) >= CASES[stack], done.stdout
    assert not any(line.startswith("NO ") for line in lines)


WITHOUT_ZERO = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import deepspeed, deepspeed.comm.torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # minutes of a compiler
from scripts.evidence.witness_common import Net, adam, tokens
from mpbridge.observe.witnessing.witness import witness
deepspeed.init_distributed(dist_backend="gloo")
said = {}
for zeroed in (True, False):
    model = Net()
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}, "gradient_clipping": 0.05}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    seen = witness(engine, engine.optimizer, at={2})
    for step in range(4):
        with seen.microbatch(lambda: step % 2 == 1):
            engine.backward(engine(tokens(step)))
            engine.step()
        if zeroed and step % 2:
            engine.zero_grad()
    said[zeroed] = seen.report.line, [str(fault) for fault in seen.report.report.faults]
if os.environ["RANK"] == "0":
    print("\\n" + json.dumps([deepspeed.__version__, *said.values()]), flush=True)
"""


@pytest.mark.timeout(1200)
def test_deepspeed_without_zero_under_bf16_leaves_the_last_steps_gradients(tmp_path: Path) -> None:
    """Its real engine: release 0.18.4 does not zero BF16 gradients without ZeRO (runtime/engine.py, _take_model_step), unless the script does."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: its own loop is what this runs")
    (tmp_path / "loop.py").write_text(WITHOUT_ZERO)
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = python([str(tmp_path / "loop.py"), str(ROOT)], size=2, env=env, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    said = next(one for one in done.stdout.splitlines() if one.startswith('["'))
    release, (line, faults), (_, kept) = json.loads(said)
    assert "FP16_UnfusedOptimizer" in line
    assert faults == []
    if release.startswith("0.18."):
        assert [one.partition(":")[0] for one in kept] == ["gradients"]
        assert "differs from what its backward pass produced" in kept[0]
