"""Signum, with one state: legal, counted, stored wide, refused where it cannot be and built; with `train` as the argument it trains under audit and resumes."""

import json
import subprocess
import sys
from pathlib import Path

import mpbridge
from mpbridge import MixedPrecisionConfig, get_mixed_precision_config, resolve
from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.traits import traits
from mpbridge.planning.estimate.build import shares, update
from mpbridge.planning.memory.by_role import memory
from mpbridge.planning.memory.keeps import keeps
from mpbridge.planning.memory.ranks import Coordinates
from mpbridge.planning.rules.table import broken
from mpbridge.settings.sections import WORDS
from mpbridge.settings.stages import with_storage

SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=128, seq_length=32
)  # fmt: skip
SIGNUM = OptimizerFacts(name="signum")


def run(engine: str, optimizer: OptimizerFacts = SIGNUM) -> RunFacts:
    return RunFacts(shape=SHAPE, engine=engine, optimizer=optimizer, parallel=Parallel(world_size=2))


assert "signum" in WORDS["optimizer.optimizer"]
bf16 = MixedPrecisionConfig(bf16=True)
wide = resolve(with_storage(bf16, engine="fsdp2", optimizer="signum"))
assert wide.params is DType.FP32
# one state, of the parameters' dtype
kept = {role: one.dtype for role, one in keeps(wide.settled(), traits("fsdp2"), SIGNUM).items()}
assert kept == dict.fromkeys(("params", "grads", "exp_avg"), DType.FP32)
one, adam = (memory(wide, run("fsdp2", one)).roles for one in (SIGNUM, OptimizerFacts(name="torch_adamw")))
assert one["exp_avg"] == adam["exp_avg"] == adam["exp_avg_sq"]
assert "exp_avg_sq" not in one
first = Coordinates.of(0, run("fsdp2").parallel)
mine, usual = run("fsdp2"), run("fsdp2", OptimizerFacts(name="torch_adamw"))
assert update(wide, mine, shares(wide, mine, first)) < update(wide, usual, shares(wide, usual, first))
# rules
narrow = resolve(get_mixed_precision_config("bf16_mixed"))
assert not broken(wide, run("fsdp2"))
assert "torch-optimizer-keeps-no-main-weights" in {one.rule for one in broken(narrow, run("fsdp2"))}
assert "optimizer-that-the-engine-does-not-build" in {one.rule for one in broken(narrow, run("mcore"))}

if sys.argv[1:] == ["train"]:
    config = {
        "mixed_precision": {"recipe": "fp32_params_bf16_compute"}, "engine": "fsdp2", "data": {"seq_length": 32},
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 32, "add_bias_linear": False},
        "optimizer": {"optimizer": "signum", "lr": 1e-3}, "scheduler": {"lr_decay_style": "constant"}, "audit": {"every": 1},
        "train": {"train_iters": 6, "global_batch_size": 4, "micro_batch_size": 2, "audit": "stop"},
    }  # fmt: skip
    Path("signum.yaml").write_text(json.dumps(config), encoding="utf-8")

    def train(folder: str, steps: int, *more: str) -> list[float]:
        argv = [sys.executable, "-m", "mpbridge", "train", "--config", "signum.yaml", f"logger.log_dir={folder}", *more]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        losses = [row["loss"] for row in rows if "loss" in row]
        assert len(losses) == steps, done.stdout[-3000:] + done.stderr[-3000:]
        return losses

    whole = train("whole", 6)
    assert whole[-1] < whole[0]
    train("half", 3, "train.exit_interval=3", "checkpoint.save=saved")
    assert train("rest", 3, "checkpoint.load=saved") == whole[-3:]
print(Path(mpbridge.__file__).parent)
