"""Every Python block of the README and of Getting started runs as it stands, on a CPU, with the objects that the reader's own script has."""

from __future__ import annotations

import ast
import json
import os

import pytest

from mpbridge.common.probe import installed
from tests.forked import python
from tests.guide.test_docs import FENCE, ROOT
from tests.scripts import loaded

SCRIPT = """
import contextlib, io, json, sys
import mpbridge, torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.optimizers import CpuFusedAdam

def of_the_reader():
    '''What the scripts have into which the lines go.'''
    torch.manual_seed(0)
    transformer_config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, masked_softmax_fusion=False, gradient_accumulation_fusion=False)
    def build_model(config):
        return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=32)
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    def step():
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return dict(mpbridge=mpbridge, transformer_config=transformer_config, optimizer_config=OptimizerConfig(optimizer="adam", lr=1e-3),
                ddp_config=DistributedDataParallelConfig(), build_model=build_model, model=net, optimizer=optimizer, step=step)

out = io.StringIO()
for number, code in enumerate(json.loads(sys.argv[1])):
    names = of_the_reader()
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(out):
        if "wrap(" in code:  # a loop on megatron-core has its process groups
            stack.enter_context(device_layer(False, fused_adam=CpuFusedAdam))
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            stack.callback(torch.distributed.destroy_process_group)
            parallel_state.initialize_model_parallel()
            stack.callback(parallel_state.destroy_model_parallel)
            model_parallel_cuda_manual_seed(1)
        exec(compile(code, f"block {number}", "exec"), names)
print(out.getvalue()[-4000:])
"""


@pytest.mark.parametrize("page", ["README.md", "docs/getting_started.md"])
def test_every_python_block_runs_as_it_stands(page, tmp_path):
    found = [
        block["body"]
        for block in FENCE.finditer((ROOT / page).read_text(encoding="utf-8"))
        if block["kind"] == "python"
    ]
    assert len(found) >= 3
    assert all(ast.parse(code).body for code in found)
    (tmp_path / "blocks.py").write_text(SCRIPT, encoding="utf-8")
    done = python(
        ["blocks.py", json.dumps(found)], cwd=tmp_path, env={name: os.environ[name] for name in ("PATH", "HOME")}
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "step 5/5" in done.stdout, "the first example trains"


def test_the_new_users_path_says_what_the_page_shows_until_it_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert loaded("evidence/first_walk").walk(tmp_path, "train") == []


def test_the_walk_sees_an_output_that_is_another_one(tmp_path, monkeypatch):
    walk = loaded("evidence/first_walk")
    monkeypatch.setattr(walk, "steps", lambda: [("mpbridge list", "...\nfp31 ...")])
    assert [text.splitlines()[0] for text in walk.walk(tmp_path, "train")] == ["$ mpbridge list"]


@pytest.mark.slow
def test_the_new_users_path_says_what_the_page_shows_to_its_end(tmp_path):
    assert loaded("evidence/first_walk").walk(tmp_path) == []


@pytest.mark.skipif(installed().megatron_core != "0.16.1", reason="the picture shows which megatron-core is installed")
def test_the_picture_is_what_check_prints():
    picture = loaded("generate/picture")
    assert picture.OUT.read_text(encoding="utf-8") == picture.drawn(), (
        "python scripts/generate/picture.py writes it anew"
    )


def test_the_readme_is_at_most_120_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
