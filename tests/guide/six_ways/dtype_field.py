"""AMSGrad's third state: read, refused, resolved, written, kept, counted and shown like the two that Adam has."""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace

import pytest

import mpbridge
from mpbridge import get_mixed_precision_config, resolve
from mpbridge.cli.main import main
from mpbridge.common.errors import Contradiction
from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.traits import engine_names, traits
from mpbridge.interop.stacks.exporters import export
from mpbridge.planning.estimate.build import shares, update
from mpbridge.planning.memory.by_role import STATES, memory
from mpbridge.planning.memory.keeps import keeps
from mpbridge.planning.memory.ranks import Coordinates
from mpbridge.planning.rules.table import broken
from mpbridge.precision.config import plain_states
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.sync.plan import plan

FIELD, ROLE = "max_exp_avg_sq_dtype", "max_exp_avg_sq"
SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=128, seq_length=32
)  # fmt: skip
RUN = RunFacts(shape=SHAPE, parallel=Parallel(world_size=2), optimizer=OptimizerFacts(distributed=True))

config = get_mixed_precision_config("bf16_mixed")
plain, stated = resolve(config), resolve(config.derive(max_exp_avg_sq_dtype="bf16"))
# meaning: legal values, fact, what follows from a narrow state, fingerprints of recipes without it
assert (plain.max_exp_avg_sq, stated.max_exp_avg_sq, stated.precision_aware) == (None, DType.BF16, True)
assert ROLE not in plain.as_data()
assert PrecisionPolicy.from_data(stated.as_data()) == stated
assert FIELD in plain_states()
for wrong in ({FIELD: "fp64"}, {FIELD: "bf16", "use_precision_aware_optimizer": False}):
    with pytest.raises(Contradiction, match=FIELD):
        resolve(config.derive(**wrong))
# megatron-core's field
writes = {write.field: write.after for write in plan(stated, optimizer={"lr": 1e-3}).writes}
assert writes["use_precision_aware_optimizer"] is True
assert FIELD not in writes, "no release has it"
live = SimpleNamespace(**{row.field: row.default for row in TABLE if row.target == "optimizer"})
assert {write.field: write.after for write in plan(stated, optimizer=live).writes}[FIELD] is DType.BF16
# who keeps it, on every engine; memory and step time
for name in engine_names():
    kind = traits(name)
    facts = OptimizerFacts(distributed=kind.distributed_optimizer != "never")
    assert ROLE not in keeps(plain.settled(), kind, facts)
    held = keeps(stated.settled(), kind, facts)[ROLE]
    assert (held.dtype, held.owner, held.sharding) == (DType.BF16, "optimizer", kind.layout)
assert ROLE in STATES
aware = resolve(config.derive(use_precision_aware_optimizer=True))
before, after = memory(aware, RUN), memory(stated, RUN)
assert ROLE not in before.roles
assert after.roles[ROLE] * 2 == after.roles["exp_avg"]
first = Coordinates.of(0, RUN.parallel)
assert update(stated, RUN, shares(stated, RUN, first)) > update(aware, RUN, shares(aware, RUN, first))
# rules and show
assert "precision-aware-needs-distributed-optimizer" in {v.rule for v in broken(stated, RunFacts(shape=SHAPE))}
for line in ("", f"{FIELD}: bf16\n"):
    page = io.StringIO()
    Path("mine.yaml").write_text(f"bf16: true\n{line}", encoding="utf-8")
    with contextlib.redirect_stdout(page):
        assert main(["show", "mine.yaml"]) == 0
    assert ("largest second moment" in page.getvalue()) is bool(line)
# no stack has words for it, and every export says so
for stack in ("megatron-lm", "megatron-bridge", "torchtitan"):
    lines = export(config.derive(max_exp_avg_sq_dtype="bf16"), stack).lines
    assert [line.fidelity for line in lines if line.fact == FIELD] == ["impossible"], stack
    assert FIELD not in {line.fact for line in export(config, stack).lines}
print(Path(mpbridge.__file__).parent)
