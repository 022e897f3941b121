"""What the audit catches and what it lets be: every planted fault of tests/observe/audit on every engine that can have it, on one process and on two, and healthy runs drawn at random.

    python scripts/evidence/audit_faults.py faults OUT [--share 0.5]   # each fault before steps 1, 7 and 14 of a run that is audited at 1, 7 and 14
    python scripts/evidence/audit_faults.py pairs OUT                  # the same of the faults that take two processes
    python scripts/evidence/audit_faults.py models OUT                 # the same of Muon, adapters and hybrids (megatron-core's Muon with Emerging-Optimizers on PYTHONPATH)
    python scripts/evidence/audit_faults.py blind OUT                  # the faults of scripts/evidence/audit_blind.py, which is no part of the catalogue
    python scripts/evidence/audit_faults.py outsider OUT               # the faults of scripts/evidence/audit_outsider.py, likewise
    python scripts/evidence/audit_faults.py healthy OUT [--runs 200]   # runs as scripts/evidence/audit_healthy.py draws them
    python scripts/evidence/audit_faults.py healthy_models OUT         # the same of runs with Muon, adapters or Mamba layers
    python scripts/evidence/audit_faults.py collect OUT                # writes data/audit_faults.json, which docs/audit.md shows

OUT is a folder; results are appended to files in it, so that a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
FIGURES = Path(__file__).parent / "data" / "audit_faults.json"
EVERY = 7
MOMENTS = (1, 7, 14)
"""The step before which a fault is planted: the first audit's, the next one's, the last one's."""
AFTER = ("rank 1's scales frozen", "rank 1's moment one ulp apart")
"""Faults of states that exist after the first update only."""
AT_ONCE = 40
"""Runs of one process; engines leave some memory behind."""
SEED = 20260
APART = {
    "models": "tests.observe.audit.model_faults",
    "blind": "audit_blind",
    "outsider": "audit_outsider",
    "outsider_after": "audit_outsider",
}
"""Faults that are no part of the catalogue -> the module that has them; outsider_after: counted again after the audit was mended."""
HEALTHY = {"healthy": 0, "healthy_models": 1_000_000}
"""Healthy runs, those with Muon, adapters or Mamba layers apart -> the number of the first (audit_healthy.MODELS)."""
WHY = {
    "ties of E4M3 are rounded away from zero": "both neighbours of a tie are equally near, so no bound on the error of a rounding tells them apart",
    "a hook rounds every gradient to E5M2": "FSDP2 sets the gradients of its shards itself: a hook on a parameter never runs, and nothing is rounded",
    "every tensor draws the same bytes": "the random bytes are not observed, only the seed and the step behind them",
}
"""Fault that an audit does not name -> the reason."""


Job = list[Any]
"""What a run is, as JSON: [fault, engine, moment] or [number]."""


def jobs(kind: str, share: float, runs: int) -> list[Job]:
    """All runs of a kind in an order drawn at random, or the first share of them."""
    if kind in HEALTHY:
        return [[HEALTHY[kind] + number] for number in range(4 * runs)]  # many are refused by a rule
    if kind == "pairs":
        from tests.observe.audit.two_rank_faults import START, cases

        found = [
            [name, case[0], moment]
            for name, case in cases().items()
            if case[3]
            for moment in MOMENTS
            if not (name == START and moment > 1) and not (name in AFTER and moment == 1)
        ]
    else:
        found = [
            [fault.name, engine, moment]
            for fault in catalogue(kind)
            for engine in fault.engines
            for moment in MOMENTS
            if moment - fault.behind > 0 and (fault.early or moment - fault.behind > 1) and _is_there(kind, engine)
        ]
    random.Random(SEED).shuffle(found)
    return found[: max(1, round(share * len(found)))]


def _is_there(kind: str, engine: str) -> bool:
    """Whether the package is installed without which the engine cannot be built."""
    needs = getattr(importlib.import_module(APART[kind]), "NEEDS", {}) if kind in APART else {}
    return engine not in needs or importlib.util.find_spec(needs[engine]) is not None


def catalogue(kind: str) -> tuple[Any, ...]:
    """The faults of one process."""
    if kind in APART:
        return tuple(importlib.import_module(APART[kind]).FAULTS)
    from tests.observe.audit.catalogue import CATALOGUE

    return CATALOGUE


def engines(kind: str) -> dict[str, Any]:
    """Engine -> (recipe, sections)."""
    found: dict[str, Any] = importlib.import_module(APART.get(kind, "tests.observe.audit.catalogue")).ENGINES
    return found


def processes(kind: str, job: Job) -> int:
    """Number of processes of a run."""
    if kind in HEALTHY:
        from audit_healthy import ranks

        return ranks(job[0])
    if kind in APART:
        return int(next(getattr(fault, "ranks", 1) for fault in catalogue(kind) if fault.name == job[0]))
    return 2 if kind == "pairs" else 1


def over_te(kind: str, job: Job) -> bool:
    """Whether a run is over Transformer Engine's Python, which has to come before megatron-core's import."""
    return kind in APART and engines(kind)[job[1]][1].get("emulate") == "te"


# --- one run ------------------------------------------------------------------------------------------------------------------------------
def stepped(
    engine: Any, plant: Callable[[Any], None], at: int, moment: int, batches: Iterator[Any], micro: int
) -> list[Any]:
    """[step, row, texts] of everything that the audits of a run find until step `moment`, with the fault planted before step `at`.

    A step that fails with the fault in it is a row too: no audit has to name what ends the run by itself.
    """
    from mpbridge.observe.audit import AuditHook
    from mpbridge.training.base import scheduler

    engine.undo = []
    rates = scheduler(engine.run, engine.optimizer)
    hook, training = AuditHook(mode="warn", every=EVERY, invariants=1), SimpleNamespace(engine=engine, scheduler=rates)
    failed: list[Any] = []
    try:
        hook.built(training)
        for step in range(1, moment + 1):
            if step == at:
                plant(engine)
            if step == 1:
                hook.started(training)
            hook.stepping(training)
            try:
                result = engine.train_step(batches, microbatches=micro)
            except (RuntimeError, AttributeError, TypeError, KeyError, ValueError) as error:
                failed = [[step, "the step failed", [f"{type(error).__name__}: {error}"[:200]]]]
                break
            if result.applied:
                rates.step(increment=int(engine.run.train["global_batch_size"]))
            hook.stepped(training, result)
    finally:
        hook.closed()
        for one in engine.undo:
            setattr(one.owner, one.name, one.value)
    return failed + [
        [one["step"], subject, one.get("faults", [])[:3]]
        for one in hook.history
        for subject, fact in one["facts"].items()
        if fact[2] == "NO"
    ]


def planted(kind: str, job: Job) -> dict[str, Any]:
    """One fault in one run. caught: an audit of the step named it (or ended it), and none before it did."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.registry import build_engine
    from tests.backend.engines import tiny

    name, engine_name, moment = job
    at = moment
    if kind == "pairs":
        from tests.observe.audit.two_rank_faults import cases

        plant = cases()[name][1]
    else:
        fault = next(fault for fault in catalogue(kind) if fault.name == name)
        plant, at = fault.plant, moment - fault.behind
    world = dist.get_world_size()
    recipe, sections = engines(kind)[engine_name]
    with device_layer(over_te(kind, job)):
        engine = build_engine(tiny.run(recipe, world=world, scheduler={"lr_decay_style": "constant"}, **sections))
    try:
        ranks = state.get_data_parallel_world_size()
        batches = tiny.batches(rank=state.get_data_parallel_rank(), size=ranks)
        found = stepped(engine, plant, at, moment, batches, 4 // ranks if world > 1 else 2)
    finally:
        engine.close()
    early = [one for one in found if one[0] < at and at > 1]
    return {"caught": any(one[0] <= moment for one in found) and not early, "found": found[:4]}


def one(kind: str, job: Job) -> dict[str, Any]:
    if kind in HEALTHY:
        from audit_healthy import outcome

        return outcome(job[0])
    return planted(kind, job)


def work(kind: str, out: Path, todo: list[Job]) -> None:
    """Runs of this process, or of this rank; rank 0 writes what became of each."""
    import gc

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    if todo and over_te(kind, todo[0]):
        from mpbridge import transformer_engine_on_cpu

        played = transformer_engine_on_cpu("b200")  # ends with the process, not before
        played.__enter__()
    torch.set_num_threads(1)
    torch._dynamo.config.disable = (
        True  # the emulation without its compilation, which would take longer than such a run
    )
    from mpbridge.backend.engines.parallel import start_process_group

    start_process_group(False)
    for job in todo:
        begun = time.process_time()
        try:
            result = one(kind, job)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:600]}
        gc.collect()
        if dist.get_rank() == 0:
            result |= {"job": job, "seconds": round(time.process_time() - begun, 2)}
            with (out / f"{kind}.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
        if "error" in result and dist.get_world_size() > 1:
            os._exit(3)  # the other rank may wait for this one for ever
    os._exit(0)


# --- all runs -----------------------------------------------------------------------------------------------------------------------------
def done(out: Path, kind: str) -> list[dict[str, Any]]:
    file = out / f"{kind}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def drive(kind: str, out: Path, wanted: list[Job], enough: int = 0) -> None:
    """Processes that do what is left, some runs each; a run that ends its process is written down and not tried again. enough: number of runs that were not refused."""
    out.mkdir(parents=True, exist_ok=True)
    while True:
        finished = {json.dumps(row["job"]) for row in done(out, kind)}
        if enough and sum(bool(row.get("ran")) for row in done(out, kind)) >= enough:
            return
        left = [job for job in wanted if json.dumps(job) not in finished]
        if not left:
            return
        size, te = processes(kind, left[0]), over_te(kind, left[0])
        batch = [job for job in left if processes(kind, job) == size and over_te(kind, job) is te][:AT_ONCE]
        (out / f"{kind}.todo").write_text(json.dumps(batch))
        command = [sys.executable, "-W", "ignore"]
        if size > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += [__file__, "work", str(out), "--kind", kind]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=7200, check=False).returncode
        after = {json.dumps(row["job"]) for row in done(out, kind)}
        lost = [job for job in batch if json.dumps(job) not in after]
        if code and lost and not after - finished:
            with (out / f"{kind}.jsonl").open("a") as file:
                file.write(json.dumps({"job": lost[0], "error": f"its process ended with {code}"}) + "\n")


def collect(out: Path) -> dict[str, Any]:
    """The figures: caught and planted by engine and moment, what was missed, and the healthy runs."""
    figures: dict[str, Any] = {}
    for kind in ("faults", "pairs", *APART):
        possible = {json.dumps(job) for job in jobs(kind, 1.0, 0)}
        rows = [row for row in done(out, kind) if json.dumps(row["job"]) in possible]
        if not rows:
            continue
        engines: dict[str, dict[str, list[int]]] = {}
        missed = []
        for row in sorted(rows, key=lambda row: json.dumps(row["job"])):
            name, engine, moment = row["job"]
            counts = engines.setdefault(engine, {str(one): [0, 0] for one in MOMENTS})[str(moment)]
            caught = bool(row.get("caught"))
            counts[0] += caught
            counts[1] += 1
            if not caught:
                why = "when first planted; named since" if kind == "outsider" else WHY.get(name, "not explained")
                missed.append([name, engine, moment, row.get("error") or why])
        figures[kind] = {"engines": engines, "missed": missed, "of": len(possible)}
    for kind in HEALTHY:
        rows = done(out, kind)
        ran = [row for row in rows if row.get("ran")]
        if not ran:
            continue
        axes: dict[str, dict[str, int]] = {}
        for row in ran:
            for axis, value in row["drawn"].items():
                counted = axes.setdefault(axis, {})
                counted[str(value)] = counted.get(str(value), 0) + 1
        alarms = [[row["drawn"], row["faults"]] for row in ran if row["faults"]]
        errors = [[row["job"], row["error"]] for row in rows if "error" in row]
        refused = sum(bool(row.get("refused")) for row in rows)
        figures[kind] = {
            "runs": len(ran), "audits": sum(row["audits"] for row in ran), "alarms": alarms, "errors": errors, "refused": refused, "axes": axes,
        }  # fmt: skip
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["faults", "pairs", *APART, *HEALTHY, "collect", "work"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="part of the runs, drawn at random")
    parser.add_argument("--runs", type=int, default=200, help="healthy runs")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verb == "work":
        work(args.kind, args.out, json.loads((args.out / f"{args.kind}.todo").read_text()))
    elif args.verb == "collect":
        figures = (json.loads(FIGURES.read_text()) if FIGURES.exists() else {}) | collect(args.out)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    else:
        drive(args.verb, args.out, jobs(args.verb, args.share, args.runs), args.runs if args.verb in HEALTHY else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
