"""`mpbridge check`: every rule that a configuration breaks on a machine, and every size that does not fit its recipe."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from mpbridge.cli._target import TargetMachine, add_target_arguments, asked, target
from mpbridge.cli.options import add_run_arguments
from mpbridge.cli.text import print_json, print_line, print_table
from mpbridge.planning.certificates.optimizer import lost_line
from mpbridge.planning.hardware.capability import Capability, can_run
from mpbridge.planning.rules.base import Violation
from mpbridge.planning.rules.gemm_shapes import Misfit, lint, spans, token_multiple
from mpbridge.planning.rules.table import broken, rules
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.wording import scale_warmup
from mpbridge.settings.container import Run
from mpbridge.training.admission import Admission
from mpbridge.training.certified import training_of
from mpbridge.training.preflight import on_cpu

SUMMARY = "check whether a configuration is valid on a machine: every broken rule, every unsuitable size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    add_run_arguments(parser)
    add_target_arguments(parser)
    parser.add_argument("--rules", action="store_true", help="list every rule with its source and exit")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the violations. Returns 1 if any is an error."""
    if args.rules:
        return _list(args.json)
    admission = Admission(here=target(args).here, training=False)
    where, made = asked(args, also=admission)
    lost = lost_line(made.policy, training_of(made))
    notes = [*admission.notes, *admission.trackers, *([f"{lost} (mpbridge certify)"] if lost else [])]
    violations = judge(made, where)
    findings = lint(made.policy, where.facts(made.facts))
    quantizer = "emulation" if made.facts.realization == "emulated" else "transformer_engine"
    answer = can_run(made.policy, where.machine, where.versions, quantized_by=quantizer)  # type: ignore[arg-type]
    if args.json:
        print_json(as_data(made, where, violations, findings, answer) | {"notes": notes})
    else:
        _print(made, where, violations, findings, answer, notes)
    return 1 if any(v.severity == "error" for v in violations) else 0


def judge(made: Run, where: TargetMachine) -> tuple[Violation, ...]:
    """The violations of every recipe of the run; those of later stages name the stage."""
    facts = where.facts(made.facts)
    found = list(broken(made.policy, facts))
    for index, stage in enumerate(made.stages[1:], start=2):
        later = (v for v in broken(stage.policy, facts) if v.rule not in {seen.rule for seen in found})
        found += [dataclasses.replace(v, found=f"stage {index} ({stage.recipe}): {v.found}") for v in later]
    return tuple(sorted(found, key=lambda v: v.severity != "error"))


def as_data(
    made: Run, where: TargetMachine, violations: Sequence[Violation], findings: Sequence[Misfit], answer: Capability
) -> dict[str, object]:
    """The answer as JSON types."""
    errors = [v for v in violations if v.severity == "error"]
    return {
        "ok": not errors,
        "recipe": made.recipe,
        "engine": made.engine,
        "world_size": made.world_size,
        "target": {
            "machine": where.machine.name,
            "arch": where.machine.sm,
            "versions": dataclasses.asdict(where.versions),
            "assumed": list(where.assumed),
        },
        "capability": dataclasses.asdict(answer),
        "played": made.played is not None,
        "violations": [dataclasses.asdict(v) for v in violations],
        "sizes": [dataclasses.asdict(f) | {"pad": f.pad} for f in findings],
        "bf16_layers": _edges(made.policy, made.facts.shape.num_layers),
        "steps_that_the_first_loss_scale_may_cost": made.policy.loss_scale.skips() if made.policy.loss_scale else 0,
        "token_multiple": token_multiple(made.policy, where.facts(made.facts)),
    }


def _edges(policy: PrecisionPolicy, depth: int) -> list[int]:
    return list(policy.bf16_layers(depth)) if policy.quantized else []


def _print(
    made: Run,
    where: TargetMachine,
    violations: Sequence[Violation],
    findings: Sequence[Misfit],
    answer: Capability,
    notes: Sequence[str],
) -> None:
    print_line(
        f"recipe {made.recipe}, engine {made.engine}, {made.world_size} process{'es' if made.world_size > 1 else ''}"
    )
    print_line(f"target {where.line()}")
    if made.played is not None:
        print_line(f"here   played {on_cpu(made)}")
    print_line(f"runs   {answer.how}{'' if answer.proven else ' (unproven)'}: {answer.reason}")
    warmup = scale_warmup(made.policy.loss_scale, made.train["train_iters"])
    if warmup:
        print_line(f"scale  {warmup}")
    print_line()
    _print_violations(violations)
    _print_sizes(findings)
    for note in notes:
        print_line(f"note   {note}")
    errors = sum(v.severity == "error" for v in violations)
    print_line(
        f"{errors} error{'s' if errors != 1 else ''}, {len(violations) - errors} warning{'s' if len(violations) - errors != 1 else ''}"
    )


def _print_violations(violations: Sequence[Violation]) -> None:
    for v in violations:
        print_line(f"{v.severity}: {v.rule}")
        source = f"{v.source}{f' ({v.versions})' if v.versions else ''}"
        for name, text in (("found", v.found), ("expected", v.expected), ("cure", v.cure), ("source", source)):
            print_line(f"{name:8}  {text}", indent="  ")
        print_line()


def _print_sizes(findings: Sequence[Misfit]) -> None:
    rows = [
        (
            f.level,
            f.module,
            spans(f.layers),
            f.dimension,
            str(f.value or "at run time"),
            str(f.multiple) if f.multiple > 1 else "",
            str(f.pad or ""),
            f.cure,
        )
        for f in findings
    ]
    if rows:
        print_table(
            ("size", "module", "layers", "dimension", "value", "multiple of", "to pad", "what to do"),
            rows,
            title="sizes",
        )
        print_line()


def _list(as_json: bool) -> int:
    rows = [
        (rule.severity, rule.id, rule.expected, " and ".join(map(str, rule.holds)), rule.source) for rule in rules()
    ]
    if as_json:
        print_json([dict(zip(("severity", "id", "expected", "holds", "source"), row, strict=True)) for row in rows])
    else:
        print_table(("severity", "rule", "what it expects", "applies to", "source"), rows, title=f"{len(rows)} rules")
    return 0
