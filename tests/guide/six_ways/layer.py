"""A gated delta rule among a hybrid's layers: legal, sized, counted to the parameter, kept, timed, quantized and checked like Mamba's."""

import contextlib
import io
import json
from pathlib import Path

import mpbridge
from mpbridge import get_mixed_precision_config, resolve
from mpbridge.cli.main import main
from mpbridge.common.facts import RunFacts
from mpbridge.planning.estimate.gemms import model_flops_per_token
from mpbridge.planning.memory.activations import activations
from mpbridge.planning.memory.layers import parameters
from mpbridge.planning.memory.names import module_paths
from mpbridge.planning.memory.ranks import Coordinates, undivided
from mpbridge.settings.container import ConfigContainer

MODEL = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128, "normalization": "RMSNorm", "add_bias_linear": False,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
}  # fmt: skip
FIRST = Coordinates(tensor=0, stage=0, expert=0, data=0, expert_data=0)
policy = resolve(get_mixed_precision_config("bf16_mixed"))


def facts(pattern: str, **parallel: int) -> RunFacts:
    sizes = {f"{name}_model_parallel_size": size for name, size in parallel.items()}
    container = ConfigContainer(
        mixed_precision="bf16_mixed", model=MODEL | {"hybrid_override_pattern": pattern}, parallel=sizes, data={"seq_length": 32},
        train={"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1}, optimizer={"lr": 1e-3},
    )  # fmt: skip
    return container.resolved(world_size=parallel.get("tensor", 1)).facts


run, plain = facts("G-*-"), facts("*-*-")
assert run.shape.parts(0) == ("delta",)
assert run.shape.sizes == {name: MODEL[name] for name in MODEL if name.startswith("linear_")}
# its parameters: queries and keys of 2 x 16, values and gate of 4 x 16, two numbers for each of 4 heads; sizes written down from megatron-core's module
shapes = {
    "input_layernorm.weight": (64,), "self_attention.dt_bias": (4,), "self_attention.A_log": (4,), "self_attention.in_proj.weight": (2 * 32 + 2 * 64 + 8, 64),
    "self_attention.conv1d.weight": (128, 1, 4), "self_attention.out_norm.weight": (16,), "self_attention.out_proj.weight": (64, 64),
}  # fmt: skip
found = {p.weight.path: p.weight.shape for p in parameters(run, FIRST)[0] if p.layer == 0}
assert found == shapes
halves = {p.weight.path: p.weight.shape for p in parameters(facts("G-*-", tensor=2), FIRST)[0] if p.layer == 0}
assert halves["self_attention.in_proj.weight"] == (100, 64)
assert "linear_num_key_heads 2 by tensor 4" in undivided(facts("G-*-", tensor=4))
# in `modules`, in FLOPs, in what it keeps
assert {"self_attention.in_proj", "self_attention.out_proj"} <= set(module_paths(run.shape)) - set(
    module_paths(plain.shape)
)
only = facts("GGGG").shape
weights = 4 * (200 * 64 + 64 * 64) + 64 * only.vocab_size
assert model_flops_per_token(only, {}) == 6 * weights + 4 * 3 * 6 * 64 * 16
assert activations(policy, run, FIRST) != activations(policy, plain, FIRST)
# the command line
Path("run.yaml").write_text(
    json.dumps(
        {
            "mixed_precision": "bf16_mixed",
            "model": MODEL | {"hybrid_override_pattern": "G-*-"},
            "data": {"seq_length": 32},
        }
    ),
    encoding="utf-8",
)
page = io.StringIO()
with contextlib.redirect_stdout(page):
    assert main(["memory", "--config", "run.yaml", "--recipe", "bf16_mixed"]) == 0
print(Path(mpbridge.__file__).parent)
