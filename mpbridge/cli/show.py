"""`mpbridge show NAME`: prints a recipe's card: its metadata, the fields that its author set, and their meaning."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mpbridge.cli.list import as_data, needs
from mpbridge.cli.options import JSON, arg, whole
from mpbridge.cli.text import answer, print_line, print_table
from mpbridge.common.errors import BadValue
from mpbridge.common.facts import MOST, ModelShape
from mpbridge.common.formats import DType, say
from mpbridge.common.traits import DEFAULT, traits
from mpbridge.interop.stacks.meaning import of_policy
from mpbridge.planning.memory.keeps import kept_fp32
from mpbridge.planning.memory.names import any_gpt, linear_rules, refuse_idle_rules
from mpbridge.planning.rules.cards import Card, card, main_weights
from mpbridge.precision.config import ROWS
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.recipe import Recipe
from mpbridge.precision.registry import describe, evidence_of, get_mixed_precision_config, model_of
from mpbridge.precision.resolve import resolve
from mpbridge.precision.wording import region_rule, region_text

SUMMARY = "show one recipe: its metadata, its fields, and what they mean"
ARGUMENTS = (
    arg("recipe NAME", "a recipe's name, a YAML file, package.module:function or file.py:function"),
    arg("--layers N", "a model's depth, to show which of its layers stay in high precision", whole, least=1),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the card."""
    if args.layers is not None and args.layers > MOST:
        raise BadValue(f"--layers {args.layers}: at most {MOST}")
    entry, config = describe(args.recipe), get_mixed_precision_config(args.recipe)
    policy = resolve(config, layers=args.layers).settled()
    known = evidence_of(args.recipe)
    if not model_of(args.recipe):
        refuse_idle_rules(policy, *any_gpt(args.layers), depth=args.layers)
    # the linears of any GPT of that depth, if it is known
    shapes = () if args.layers is None else any_gpt(args.layers)
    meaning, costs = facts(policy, *shapes, engine=entry.engine), card(args.recipe)
    data = {
        **as_data(entry),
        "config": config.as_data(), "policy": policy.as_data(), "fingerprint": policy.fingerprint(),
        "meaning": dict(meaning), "card": dataclasses.asdict(costs), **({"evidence": known} if known else {}),
    }  # fmt: skip
    fields = [(name, say(value)) for name, value in config.given().items()]
    tables = (
        ("fields set by its author", ("field", "value"), fields),
        ("what it means", ("fact", "value"), meaning),
        ("where it runs and what it costs", ("", ""), _costs(costs)),
        *((("evidence", ("", ""), evidence_rows(known)),) if known else ()),
    )
    answer(args, data, lambda: _print(entry, tables))
    return 0


def _print(entry: Recipe, tables: Iterable[tuple[str, tuple[str, str], list[tuple[str, str]]]]) -> None:
    print_line(f"{entry.name}: {entry.summary}", "")
    papers = [("needs", needs(entry)), ("status", entry.status), ("engine", entry.engine or DEFAULT)]
    papers += [("source", entry.source), *([("also called", ", ".join(entry.aliases))] if entry.aliases else [])]
    papers += [("hint", hint) for hint in entry.hints]
    width = max(len(label) for label, _ in papers)
    for label, text in papers:
        print_line(f"{label:{width}}  {text}")
    for title, columns, rows in tables:
        print_line()
        print_table(columns, rows, title=title)


def _costs(known: Card) -> list[tuple[str, str]]:
    unproven = f"; reported, unproven: {', '.join(known.unproven_on)}" if known.unproven_on else ""
    return [
        ("natively on", ", ".join(known.native_on) + unproven),
        ("compute", known.compute),
        ("kept", known.stored),
        ("exported", known.exported),
        (
            "bytes per parameter",
            f"{known.bytes_alone:.2f} on one GPU, {known.bytes_shared:.2f} on eight (states; mpbridge memory for a model)",
        ),
        ("rules about it", f"{len(known.rules)} (names: --json; mpbridge check applies them to a run)"),
    ]


def facts(policy: PrecisionPolicy, *shapes: ModelShape, engine: str | None = None) -> list[tuple[str, str]]:
    """The policy's facts as label and text. shapes, of one depth: adds the rule of each linear, and the layers that are not quantized."""
    meaning = of_policy(policy, engine=engine or DEFAULT)
    rows = [
        ("compute", say(policy.compute)),
        ("parameters", say(policy.params) + (" (quantized linears: in their low format)" if policy.stored else "")),
        ("gradients on the wire", say(policy.reduce)),
        ("main weights", main_weights(policy, traits(engine or DEFAULT))),
        ("gradient accumulator", say(meaning.accumulator)),
        ("gradients that the optimizer reads", say(meaning.optimizer_reads or meaning.accumulator)),
        ("Adam moments", f"{say(policy.exp_avg)}, {say(policy.exp_avg_sq)}"),
        ("between pipeline stages", say(policy.pipeline)),
        ("autocast", say(policy.autocast)),
        ("loss scale", _scale(policy)),
    ]
    rows += linear_rules(policy, *shapes) if shapes and policy.module_regions else regions(policy)
    if shapes and policy.quantized:
        layers = shapes[0].num_layers
        ids = policy.bf16_layers(layers)
        rows.append((f"layers of {layers} in {say(policy.compute)}", ", ".join(map(str, ids)) or "none"))
    rows += _mamba(policy, shapes[0]) if len(shapes) == 1 and "M" in shapes[0].pattern else []
    rows += [("kept in fp32", ", ".join(policy.keep_fp32))] if policy.keep_fp32 else []
    stated = [(row.shown, getattr(policy, row.fact)) for row in ROWS.values() if row.shown]
    return rows + [(label, say(value)) for label, value in stated if value is not None]


def _mamba(policy: PrecisionPolicy, shape: ModelShape) -> list[tuple[str, str]]:
    """What becomes of the parameters that megatron-core makes in FP32 in a Mamba layer, and the dtype of the scan (ssm/mamba_mixer.py)."""
    first, narrow = shape.pattern.index("M"), say(policy.params)
    cast = f"{narrow}, cast from the fp32 that it is made in"
    made = {} if policy.params is DType.FP32 else {"A_log": cast, "D": cast}
    rows = []
    for name in ("A_log", "D", "dt_bias"):
        kept = kept_fp32(policy, f"decoder.layers.{first}.mixer.{name}")
        rows.append((f"Mamba's {name}", "fp32" if kept else made.get(name, narrow)))
    return [
        *rows,
        ("Mamba's conv1d and norm", f"{narrow}, never quantized"),
        ("decays, step sizes and state of the scan", "fp32"),
    ]


def regions(policy: PrecisionPolicy) -> list[tuple[str, str]]:
    """The policy's regions as label and rule, in order; the first match decides."""
    many = len(policy.module_regions) > 0 and len(policy.regions) > 2
    first = [(region_text(region), region_rule(region)) for region in policy.regions[:-1]]
    last = (region_text(policy.regions[-1]), region_rule(policy.regions[-1]))
    return [*first, ("all other linears" if policy.module_regions else last[0], last[1])] + (
        [("of these lines", "the first that matches a linear decides")] if many else []
    )


def evidence_rows(known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A tuned recipe's evidence as label and text, regardless of its contents."""
    found: list[tuple[str, str]] = []
    for name, value in known.items():
        if isinstance(value, Mapping):
            found += [(f"{name}: {key}", _said(item)) for key, item in value.items()]
        elif isinstance(value, list):
            found += [(str(name), str(item)) for item in value]
        else:
            found.append((str(name), str(value)))
    return found


def _said(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    if any(isinstance(item, Mapping) for item in value.values()):
        return "; ".join(f"{key}: {_said(item)}" for key, item in value.items())
    return ", ".join(f"{key} {item}" for key, item in value.items())


def _scale(policy: PrecisionPolicy) -> str:
    scale = policy.loss_scale
    if scale is None:
        return "none"
    if not scale.dynamic:
        return say(scale.static)
    return f"dynamic from {say(scale.initial)}, at least {scale.minimum:g}, doubled after {scale.window:g} good steps"
