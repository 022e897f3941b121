"""Measures the cost of the audit in CPU time: ordinary and audited steps alternate, so that a busy machine slows both alike; FP8 and FP4 are emulated. `python scripts/evidence/bench_audit.py [RECIPE] [ROUNDS]`."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.parallel import start_process_group
from mpbridge.backend.engines.registry import build_engine
from mpbridge.observe.audit import AuditHook
from mpbridge.observe.audit.cadence import LATEST, SHARE
from mpbridge.observe.audit.examine import audit, promises_of
from mpbridge.observe.audit.invariants import broken
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.data.batches import Feed

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml"


def measured(recipe: str, rounds: int) -> dict[str, float]:
    """CPU seconds for an ordinary step, an audited step with its audit, the invariants, the check before a checkpoint."""
    settings = get_mixed_precision_config(recipe)
    low = bool(settings.fp8 or settings.fp4)
    run = ConfigContainer.load(CONFIG, [f"mixed_precision={recipe}", f"emulate={str(low).lower()}"]).resolved()
    start_process_group(False)
    with device_layer(False):
        engine = build_engine(run)
    stream = Feed(run).batches("train", 0, 0, 1)
    hook, training = AuditHook(mode="stop", every=1, invariants=0), SimpleNamespace(engine=engine)
    hook.built(training)
    hook.started(training)
    times: dict[str, list[float]] = {"usual": [], "audited": [], "invariants": [], "checkpoint": []}
    promises = promises_of(run.policy, engine)

    def timed(name: str, act: Any) -> Any:
        begun = time.process_time()
        result = act()
        times[name].append(time.process_time() - begun)
        return result

    def audited() -> None:
        hook.stepping(training)
        hook.stepped(training, engine.train_step(stream, microbatches=1))

    engine.train_step(stream, microbatches=1)
    for _ in range(rounds):
        timed("usual", lambda: engine.train_step(stream, microbatches=1))
        timed("audited", audited)
        timed("invariants", lambda: broken(engine, promises, hook._wiring))
        timed("checkpoint", lambda: audit(run.policy, engine, stage="live"))
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    recipe = sys.argv[1] if len(sys.argv) > 1 else "bf16_mixed"
    found = measured(recipe, int(sys.argv[2]) if len(sys.argv) > 2 else 10)
    step = found["usual"]
    extra = (found["audited"] - step) / step
    print(
        f"{recipe}: a step takes {step * 1e3:.0f} ms; an audit costs {extra:.2f} steps, so by default one runs every {min(LATEST, extra / SHARE):.0f} steps"
    )
    print(
        f"invariants every 10 steps: {found['invariants'] / step * 10:.2f} % of a run; the check before a checkpoint: {found['checkpoint'] / step:.2f} steps"
    )
