"""A release with one field more that a recipe writes and one that it leaves alone, another place for the common state and one more name in pickles."""

from pathlib import Path

import mpbridge
from mpbridge import get_mixed_precision_config, resolve
from mpbridge.backend.megatron import process
from mpbridge.common.facts import ModelShape, RunFacts, Versions
from mpbridge.interop.stacks.megatron_lm import CORE
from mpbridge.planning.rules.table import broken
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.megatron_spec.versions import COMMON_OBJECTS, RELEASES, described, nearest
from mpbridge.precision.sync.plan import plan
from mpbridge.training.checkpoint import converter_process

SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=128, seq_length=32
)  # fmt: skip
policy = resolve(get_mixed_precision_config("bf16_mixed"))


def untested(core: str) -> bool:
    found = broken(policy, RunFacts(shape=SHAPE, versions=Versions(torch="2.11.0", megatron_core=core)))
    return "library-versions-untested" in {violation.rule for violation in found}


assert described() == tuple(release.version for release in RELEASES)
assert (nearest("0.21.3"), nearest("0.20.5")) == ("0.21.0", "0.20.0")
assert "fp8_embedding" in records("model", version="0.21.0")
assert [untested(core) for core in ("0.18.0", "0.20.0", "0.21.0", "0.22.0")] == [True, False, False, True]
wanted = {"model": {"fp8_embedding": True}, "optimizer": {}, "ddp": {}}
assert plan(policy, **wanted, core="0.21.0").of("model")["fp8_embedding"] is False
assert "fp8_embedding" not in plan(policy, **wanted, core="0.20.0").of("model")
assert [kept.field for kept in plan(policy, model={"fp32_rotary": True}, core="0.21.0").kept] == ["fp32_rotary"]
assert "common_state/shard_0" in COMMON_OBJECTS
assert ("megatron.core.dist_checkpointing.strategies.torch", "MCoreTable") in converter_process._RECORDS
assert "_GLOBAL_FP8_BUFFER" in process._BUFFERS
assert set(CORE.values()) == {"0.16.1", "0.20.0"}, "Megatron-LM's arguments are described apart"
print(Path(mpbridge.__file__).parent)
