"""Tables of the README and the docs, generated from the code: `python scripts/generate/tables.py` rewrites them, `--check` names those that are out of date.

A page requests a table with a pair of lines; the text between them is generated:

    <!-- table:NAME -->
    <!-- end of table -->

A new table is a function here that returns Markdown, under @table("NAME").
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import math
import re
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs in a checkout without installation

BLOCK = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {}


def table(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    def enter(make: Callable[[], str]) -> Callable[[], str]:
        if name in TABLES:
            raise SystemExit(f"two tables named {name!r}")
        TABLES[name] = make
        return make

    return enter


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    from mpbridge.common.tables import table as made

    return made("", columns, ([str(cell) for cell in row] for row in rows)).markdown()


@table("recipes")
def recipe_table() -> str:
    from mpbridge.precision.recipes import BUILT_IN

    def needs(arch: tuple[int, int] | None) -> str:
        return "any machine" if arch is None else f"compute capability {arch[0]}.{arch[1]}"

    rows = [
        (
            f"`{r.name}`",
            r.summary,
            needs(r.needs),
            f"{r.status}{f', engine {r.engine}' if r.engine else ''}",
            ", ".join(f"`{a}`" for a in r.aliases),
        )
        for r in BUILT_IN
    ]
    return markdown(("recipe", "what it does", "needs", "status", "also called"), rows)


@table("recipes-short")
def short_recipe_table() -> str:
    """Every recipe once, by the arithmetic of its GEMMs."""
    from mpbridge.precision.recipes import BUILT_IN
    from mpbridge.precision.scalings import SCALINGS

    kinds = dict[str, list[str]]()
    for r in BUILT_IN:
        config = r.make()
        kind = "FP32, BF16 or FP16"
        if config.fp8 or config.fp4:
            scaling = str(config.fp4_recipe or "nvfp4" if config.fp4 else config.fp8_recipe or "tensorwise")
            kind = f"{'FP4' if config.fp4 else 'FP8'}, a scale per {'tensor' if SCALINGS[scaling].per_tensor else 'block or row'}"
        kinds.setdefault(kind, []).append(f"`{r.name}`")
    return markdown(("GEMMs", "recipes"), [(kind, ", ".join(names)) for kind, names in kinds.items()])


@table("sources")
def source_table() -> str:
    from mpbridge.precision.recipes import BUILT_IN

    return markdown(
        ("recipe", "values and evidence", "advice"),
        [(f"`{r.name}`", r.source, "; ".join(r.hints)) for r in BUILT_IN],
    )


@table("differences")
def difference_table() -> str:
    from mpbridge.precision.recipes import BUILT_IN, DIFFERENCES

    reference = json.loads((ROOT / "tests" / "golden" / "recipes.json").read_text(encoding="utf-8"))["reference"]
    ours = {entry.name: entry.make().stored() for entry in BUILT_IN}

    def said(value: object) -> str:
        return f"`{json.dumps(value)}`"

    rows = [
        (
            f"`{name}`",
            f"`{field}`",
            said((reference["class_defaults"] | reference["recipes"][name]).get(field)),
            said(ours[name][field]),
            reason,
        )
        for (name, field), reason in DIFFERENCES.items()
    ]
    return markdown(("recipe", "field", "Megatron Bridge", "mpbridge", "why"), rows)


@table("fields")
def field_table() -> str:
    """The fields of megatron-core's configs that a recipe decides."""
    from mpbridge.precision.megatron_spec.fields import TABLE

    rows = [
        (
            f"`{row.target}.{row.field}`",
            row.why,
            f"`mixed_precision.{row.knob}`" if row.knob else "another recipe",
            row.kind,
        )
        for row in TABLE
    ]
    return markdown(("field", "what it is", "what changes it", "kind"), rows)


@table("audit-cost")
def audit_cost_table() -> str:
    """What an audited step takes, as scripts/evidence/bench_audit.py measured it."""
    from mpbridge.observe.audit.between import LATEST, SHARE, SOONEST

    def row(name: str, one: dict[str, float]) -> tuple[str, ...]:
        interval = min(LATEST, max(SOONEST, math.ceil((one["audited"] - 1) / SHARE)))
        return name, f"{one['audited']:.2f}", f"{one['again']:.2f}", f"{interval}", f"{one['checkpoint']:.2f}"

    columns = ("recipe", "an audited step / a plain one", "A/A", "default interval, steps", "check before a checkpoint")
    return markdown(columns, (row(*one) for one in evidence("audit_cost").items()))


@table("audit-faults")
def audit_faults_table() -> str:
    """Planted faults that an audit named in the step in which they begin, as scripts/evidence/audit_faults.py counted them."""
    found, rows = evidence("audit_faults"), []
    kinds = {
        "faults": "catalogue, one process",
        "pairs": "catalogue, two processes",
        "models": "Muon, adapters on frozen bases, hybrids",
        "blind": "from reports of other bugs",
        "outsider": "thought of by an outsider, when first planted",
        "outsider_after": "the same, after the general causes of the missed ones were mended",
    }
    for kind, name in kinds.items():
        if kind not in found:
            continue
        engines = found[kind]["engines"]
        per = {at: [sum(one[at][i] for one in engines.values()) for i in (0, 1)] for at in ("1", "7", "14")}
        caught, planted = (sum(one[i] for one in per.values()) for i in (0, 1))
        share = f"{caught} of {planted} ({100 * caught / planted:.1f} %)"
        rows.append(
            (name, *(f"{one[0]} of {one[1]}" for one in per.values()), share, f"{planted} of {found[kind]['of']}")
        )
    columns = ("faults", "before step 1", "before step 7", "before step 14", "all", "drawn")
    table = markdown(columns, rows)
    missed: dict[tuple[str, str], list[str]] = {}
    for kind in kinds:
        for fault, engine, moment, why in found.get(kind, {}).get("missed", ()):
            missed.setdefault((fault, why), []).append(f"{engine} {moment}")
    lines = [f"- {fault} ({', '.join(where)}): {why}" for (fault, why), where in sorted(missed.items())]
    return "\n".join([table, "", "Missed, with the engine and the step:", "", *lines]) if lines else table


@table("audit-healthy")
def audit_healthy_table() -> str:
    """Healthy runs drawn at random: how many of each value of each axis."""
    return _healthy("healthy", "{errors} more ended where a checkpoint was written.")


@table("audit-healthy-models")
def audit_healthy_models_table() -> str:
    """The same of runs with Muon, adapters or Mamba layers."""
    return _healthy("healthy_models", "{errors} ended with an error.")


def _healthy(kind: str, ended: str) -> str:
    found = evidence("audit_faults")[kind]
    counts = f"{found['runs']} runs, {found['audits']} audits, {len(found['alarms'])} false alarms"
    rows = [
        (axis, ", ".join(f"{value} ({count})" for value, count in sorted(values.items(), key=lambda one: -one[1])))
        for axis, values in found["axes"].items()
        if len(values) > 1
    ]
    return f"{counts}; {ended.format(errors=len(found['errors']))}\n\n{markdown(('axis', 'values (runs)'), rows)}"


@table("known-bugs")
def known_bug_table() -> str:
    """Public bugs as tests/known_bugs plays them."""
    from tests.known_bugs.bugs import BUGS, NOT

    def row(bug: Any) -> tuple[str, ...]:
        name, _, number = bug.number.partition("#")
        link = f"[{name.partition('/')[2]}#{number}](https://github.com/{name}/issues/{number})"
        return link + ("" if bug.again else " \u2020"), bug.what, f"`{bug.says}`" if bug.says else "nothing", bug.when

    said = [bug for bug in BUGS if bug.says]
    count = f"{len(said)} of {len(BUGS)} are named; {sum(bool(bug.play) for bug in BUGS)} are repeated by a test."
    caught = markdown(("thread", "what happened", "mpbridge says", "when"), map(row, said))
    missed = markdown(
        ("thread", "what happened", "why it is not caught"),
        [(row(bug)[0], bug.what, bug.when.removeprefix(NOT)) for bug in BUGS if not bug.says],
    )
    return f"{count}\n\n{caught.rstrip()}\n\n## Not caught\n\n{missed}"


@table("serving-bugs")
def serving_bug_table() -> str:
    """Public bugs as tests/training/serving plants them in folders."""
    from tests.training.serving.bugs import BUGS

    def link(thread: str) -> str:
        name, _, number = thread.partition("#")
        return f"[{name.partition('/')[2]}#{number}](https://github.com/{name}/issues/{number})"

    rows = [
        (", ".join(link(thread) for thread in bug.threads.split(", ")) if bug.threads else "", bug.planted, f"`{bug.method}`", bug.said) for bug in BUGS
    ]  # fmt: skip
    return markdown(("thread", "planted", "in", "`mpbridge contract` says"), rows)


@table("left-alone")
def left_alone_table() -> str:
    """Precision fields that no recipe decides."""
    from mpbridge.precision.megatron_spec.classes import PROCESS_WIDE, USERS_OWN

    rows = [
        (f"`{'.'.join(key)}`", why, kind)
        for kind, which in (("yours", USERS_OWN), ("process-wide", PROCESS_WIDE))
        for key, why in which.items()
    ]
    return markdown(("field", "what it does", "whose"), rows)


@table("scalings")
def scaling_table() -> str:
    """Every row of mpbridge.precision.scalings."""
    from mpbridge.precision.scalings import SCALINGS

    def block(extent: object) -> str:
        return " x ".join("all" if side == 0 else str(side) for side in (extent.across, extent.along))  # type: ignore[attr-defined]

    rows = []
    for row in SCALINGS.values():
        blocks = "the factory's" if row.blocks is None else ", ".join(dict.fromkeys(map(block, row.blocks)))
        scale = "" if row.blocks is None else row.blocks[0].scale
        need = f"{row.hardware.low[0]}.{row.hardware.low[1]}" + (
            f" to below {row.hardware.high[0]}.{row.hardware.high[1]}" if row.hardware.high else ""
        )
        library = f"{row.hardware.library.replace('_', ' ')} {row.hardware.engine}" + (
            f", CUDA {row.hardware.cuda}" if row.hardware.cuda else ""
        )
        sizes = f"{row.sizes.tokens}, {row.sizes.inner}, {row.sizes.outer}"
        rows.append(
            (f"`{row.name}`", ", ".join(row.formats), blocks, scale, need, library, sizes, f"`{row.recipe_class()}`")
        )
    return markdown(
        (
            "scaling",
            "formats",
            "elements per scale (across x along the contraction; activations, weights)",
            "scale",
            "compute capability",
            "needs",
            "multiples of tokens, in, out",
            "recipe class",
        ),
        rows,
    )


@table("scaling-options")
def option_table() -> str:
    """The options of each scaling."""
    from mpbridge.common.formats import say
    from mpbridge.precision.scalings import SCALINGS

    rows = [
        (
            f"`{row.name}`",
            f"`{option.name}`",
            ", ".join(say(value) for value in option.choices),
            option.meaning,
            f"`{option.variable}`" if option.variable else "none: set by a quantizer factory",
            option.since,
        )
        for row in SCALINGS.values()
        for option in row.options
    ]
    return markdown(
        (
            "scaling",
            "option",
            "values (default first)",
            "meaning",
            "Transformer Engine's environment variable",
            "since",
        ),
        rows,
    )


@table("recipe-machines")
def recipe_machine_table() -> str:
    """Which recipe runs on which GPU, with the versions that a target is assumed to have."""
    from mpbridge.common.machines import machines
    from mpbridge.planning.capability import ASSUMED, can_run
    from mpbridge.precision.recipes import BUILT_IN
    from mpbridge.precision.resolve import resolve

    kinds: dict[tuple[str, ...], list[str]] = {}
    for row in machines.values():
        answers = [can_run(resolve(entry.make()), row, ASSUMED) for entry in BUILT_IN]
        words = {"native": "yes", "emulated": "emulated", "no": "no"}
        kinds.setdefault(tuple(words[a.how] if a.proven else "unproven" for a in answers), []).append(row.name)
    columns = ("recipe", *(", ".join(names) for names in kinds.values()))
    rows = [(f"`{entry.name}`", *(column[i] for column in kinds)) for i, entry in enumerate(BUILT_IN)]
    return markdown(columns, rows)


@table("machines")
def machine_table() -> str:
    """The GPUs that `--target` knows."""
    from mpbridge.common.machines import machines

    formats = ("fp32", "bf16", "fp16", "fp8", "fp4")
    rows = []
    for row in machines.values():
        peaks = dict(row.peak)
        speeds = [f"{peaks[name]:g}" if name in peaks else "" for name in formats]
        size = f"{row.memory_bytes / 2**30:.1f}" if row.gpu else ""
        links = (
            (f"{row.nvlink / 1e9:g}", str(row.domain), f"{row.network / 1e9:g}" if row.network else "")
            if row.gpu
            else ("", "", "")
        )
        rows.append(
            (
                row.name,
                row.sm,
                size,
                f"{row.bandwidth / 1e9:g}" if row.gpu else "",
                *speeds,
                *links,
                row.source + (f" ({row.note})" if row.note else ""),
            )
        )
    return markdown(
        (
            "machine",
            "architecture",
            "usable GiB",
            "GB/s",
            *(f"{name} TFLOP/s" for name in formats),
            "link GB/s",
            "domain",
            "network GB/s",
            "source",
        ),
        rows,
    )


@table("rules")
def rule_table() -> str:
    """Every rule of `mpbridge check`."""
    from mpbridge.planning.rules.base import BETWEEN_STAGES
    from mpbridge.planning.rules.table import rules

    rows = [
        (f"`{r.id}`", r.severity, r.expected, r.cure, " and ".join(map(str, r.holds)) or "all", r.source)
        for r in (*rules(), BETWEEN_STAGES)
    ]
    return markdown(("rule", "severity", "expects", "cure", "versions", "source"), rows)


@table("json")
def json_table() -> str:
    """The keys of every answer with a schema."""
    import json

    from mpbridge.cli.text import SCHEMAS

    rows = [
        (f"`{path.stem}`", f"`{key}`", " or ".join(part["type"]), part["description"])
        for path in sorted(SCHEMAS.glob("*.json"))
        for key, part in json.loads(path.read_text(encoding="utf-8"))["properties"].items()
    ]
    return markdown(("verb", "key", "type", "meaning"), rows)


@table("engine-releases")
def engine_release_table() -> str:
    """Transformer Engine's releases, and which of them have run under the kernel module."""
    from mpbridge.common.transformer_engine import RELEASES

    oldest, newest = min(RELEASES), max(RELEASES)
    rows = [["2.9, 2.10", "", "no: source read, not run"]]
    for number, what in RELEASES.items():
        ends = number in (oldest, newest)
        rows.append([".".join(map(str, number)), what, "in the default suite" if ends else "tested in the slow suite"])
    rows.append([f"{newest[0]}.{newest[1] + 1} and later", "", "no: refused on a CPU, a warning on a GPU"])
    return markdown(("release", "what it changed below Transformer Engine's Python", "runs in"), rows)


REAL = {
    **dict.fromkeys(("cuda.CudaError", "cuda.DeferredCudaCallError", "cuda.cudaStatus", "cuda.check_error", "cuda.has_half", "cuda.has_magma"), "types and constants"),
    **dict.fromkeys(("cuda.get_gencode_flags", "cuda.memory_stats", "cuda.memory_summary", "cuda.host_memory_stats", "cuda.max_memory_cached", "cuda.memory_cached"), "torch's own, over played names"),
    **dict.fromkeys((f"cuda.{name}" for name in ("amp", "graphs", "graph_annotations", "memory", "nccl", "nvtx", "profiler", "random", "sparse", "streams", "tunable")), "modules"),
}  # fmt: skip
"""Name below torch -> what it is: torch's own, unchanged."""

PLAYED_BESIDE = (
    "torch.load(map_location)", "torch.device(index)", "torch.Stream", "torch.Event", "torch.Generator", "torch.profiler.profile", "torch.autocast", "torch.compile (says that nothing is compiled)", "torch.set_default_device",
    "torch.version.cuda", "Tensor.cuda, .to, .is_cuda, .get_device, .pin_memory, .is_pinned, .record_stream, .type", "Module.cuda, .to",
    "UntypedStorage.cuda", "optimizers with capturable=True", "torch.cuda.memory._record_memory_history, ._snapshot, ._dump_snapshot", "torch.cuda.nccl.version",
    "torch.distributed with nccl (on gloo), ProcessGroupNCCL.Options", "symmetric memory (torch's error without NVLink)", "DeviceMesh of CUDA devices", "DistributedDataParallel with device_ids", "FullyShardedDataParallel",
)  # fmt: skip
"""What is played outside of torch.cuda and torch.accelerator."""


@table("cuda-names")
def cuda_name_table() -> str:
    """What is played of CUDA, what is torch's own, and what is refused."""
    from mpbridge.te_cpu.refusals import REFUSED

    rows = []
    for kind, names in (("refused", REFUSED), ("real", REAL)):
        reasons = dict[str, list[str]]()
        for name, why in names.items():
            reasons.setdefault(why, []).append(f"`{name}`")
        rows += [(", ".join(of), kind, why) for why, of in reasons.items()]
    rows.append(
        (
            "every other public name of `torch.cuda` and `torch.accelerator`",
            "played",
            "answers as on the played machine",
        )
    )
    rows.append((", ".join(f"`{name}`" for name in PLAYED_BESIDE), "played", "the same, elsewhere"))
    return markdown(("name", "state", "why"), rows)


@table("bytes")
def bytes_table() -> str:
    """Bytes per parameter of each recipe, as `mpbridge memory` predicts them for a 70B model's shape."""
    from mpbridge.planning.rules.cards import card
    from mpbridge.precision.recipes import BUILT_IN

    cards = [card(entry.name) for entry in BUILT_IN]
    rows = [(f"`{c.recipe}`", c.compute, c.stored, f"{c.bytes_alone:.2f}", f"{c.bytes_shared:.2f}") for c in cards]
    return markdown(("recipe", "compute", "kept", "bytes per parameter, 1 GPU", "8 GPUs"), rows)


def evidence(name: str) -> dict[str, Any]:
    """What a script of scripts/evidence wrote down."""
    path = ROOT / "scripts" / "evidence" / "data" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def certificate_rows(rows: Sequence[dict[str, Any]], named: str) -> str:
    def bits(pair: Sequence[float | None]) -> str:
        one, plateau = ("exact" if value is None else f"{value:.2f}" for value in pair)
        return one if one == plateau else f"{one} -> {plateau}"

    def percent(figure: Sequence[float] | None) -> str:
        return "" if figure is None else f"{100 * figure[0]:+.2f} ± {100 * figure[1]:.1g}" if figure[1] else f"{100 * figure[0]:+.2f}"  # fmt: skip

    found = []
    for row in rows:
        found.append(
            (
                f"`{row[named] or 'as Transformer Engine does'}`",
                *(bits(row[gemm]) for gemm in ("fprop", "dgrad", "wgrad")),
                f"{1e3 * row['MSE'][0][0]:.3g}",
                " / ".join(percent(value) for value in row["alignment"]),
                " / ".join(percent(value) for value in row["small-signal gain"] if value is not None),
                percent(row["fresh"]),
                row["sentence"].partition("; ")[2] if named == "recipe" else "",
                f"{row['seconds']:.0f}",
            )
        )
    return markdown(
        (
            named,
            "forward, bits: one step -> plateau",
            "input gradient",
            "weight gradient",
            "gradients' MSE x 1e-3",
            "their alignment, %: normal / Student 3 / lognormal / sparse",
            "small-signal gain, %",
            "over fresh data, %",
            "optimizer",
            "seconds of one core",
        ),
        found,
    )


@table("certificates")
def certificate_table() -> str:
    """The certificate of every built-in recipe, as scripts/evidence/certificates.py measured it."""
    return certificate_rows(evidence("certificates")["recipes"], "recipe")


@table("certificate-variants")
def certificate_variant_table() -> str:
    from mpbridge.planning.certificates import NOT_OFFERED, VARIANTS

    rows = certificate_rows(evidence("certificates")["variants"], "variant")
    words = [(f"`{one.name}`", one.words, "yes" if one.offered else NOT_OFFERED) for one in VARIANTS.values()]
    return rows + "\n\n" + markdown(("variant", "what it changes", "Transformer Engine has it"), words)


def agreement(row: dict[str, Any]) -> str:
    """Whether ours is the published figure: to the digits given, or within the tolerance for theirs and our sample."""
    text = repr(row["published"])
    digits = 12 if "e" in text else len(text.partition(".")[2])
    return "to its digits" if round(row["ours"], digits) == round(row["published"], digits) else "within its sample" if row["agrees"] else "**no**"  # fmt: skip


@table("published-and-ours")
def published_table() -> str:
    rows = evidence("certificates")["published"]
    return markdown(
        ("source", "what", "published", "ours", "agrees", "why not"),
        [
            (
                r["source"],
                r["what"],
                f"{r['published']:.10g}",
                f"{r['ours']:.5g}",
                agreement(r),
                r["why"],
            )
            for r in rows
        ],
    )


@table("certificate-correlation")
def correlation_table() -> str:
    """What scripts/evidence/certificate_correlation.py found."""
    data = evidence("certificate_correlation")
    words = {"gradient, all": "the gradient's error between formats", "gradient, nvfp4": "and within NVFP4", "loss, all": "the loss between formats", "loss, nvfp4": "and within NVFP4"}  # fmt: skip

    def span(values: Sequence[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}"

    rows = [
        (
            name,
            *(span(found[key]) for key in words),
            ", ".join(word for key, word in words.items() if min(found[key]) >= 0.7) or "nothing",
        )
        for name, found in data["rows"].items()
    ]
    rows.append(("*one seed's ranks with another's*", *(span(data["between seeds"][key]) for key in words), ""))
    columns = ("figure", "gradient's error, all", "NVFP4 alone", "loss, all", "NVFP4 alone", "predicts (0.7 in every seed)")  # fmt: skip
    arms = [
        (
            arm,
            f"{100 * statistics.fmean(run[arm]['gradient'] for run in data['trained'].values()):.2f}",
            " / ".join(f"{run[arm]['loss']:+.4f}" for run in data["trained"].values()),
        )
        for arm in next(iter(data["trained"].values()))
    ]
    return (
        markdown(columns, rows)
        + "\n\n"
        + markdown(("recipe or variant", "gradient's error, %", "loss less FP32's, by seed"), arms)
    )


def notes(cls: type) -> dict[str, str]:
    """field -> the note under it, from a dataclass's source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(note.value.value.split())  # type: ignore[union-attr]
        for field, note in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant)
    }


def settings_table(section: str) -> str:
    """Every setting of a section: type, default, range, and what is known about it."""
    from mpbridge.precision.megatron_spec.classes import NOT_PRECISION, PROCESS_WIDE, USERS_OWN
    from mpbridge.precision.megatron_spec.fields import TABLE
    from mpbridge.precision.megatron_spec.versions import described
    from mpbridge.settings.schema import settings
    from mpbridge.settings.sections import GPT, LIMITS, OWN

    said = notes(GPT if section == "model" else OWN[section]) if section == "model" or section in OWN else {}
    for (target, field), text in (USERS_OWN | PROCESS_WIDE | NOT_PRECISION).items():
        said |= {field: text} if target == section else {}
    said |= {row.field: f"the recipe decides: {row.why}" for row in TABLE if row.target == section}
    by_version = {version: settings(section, latent=True, version=version) for version in described()}
    known = {name: setting for found in reversed(by_version.values()) for name, setting in found.items()}
    rows = []
    for name, setting in known.items():
        have = [version for version, found in by_version.items() if name in found]
        where = "" if len(have) == len(by_version) else f"megatron-core {', '.join(have)} only"
        limit = LIMITS.get(f"{section}.{name}")
        words = [said.get(name, ""), f"a number {limit}" if limit is not None else "", where]
        rows.append(
            (
                f"`{name}`",
                setting.expected(),
                f"`{json.dumps(setting.default)}`",
                "; ".join(word.removesuffix(".") for word in words if word),
            )
        )
    return markdown(("setting", "type", "default", "meaning"), rows)


for _section in (
    "model",
    "optimizer",
    "scheduler",
    "ddp",
    "parallel",
    "train",
    "data",
    "checkpoint",
    "logger",
    "audit",
):
    table(f"settings-{_section}")(functools.partial(settings_table, _section))


@table("settings-mixed_precision")
def recipe_field_table() -> str:
    """The fields of a recipe."""
    from mpbridge.precision.config import MixedPrecisionConfig

    said = notes(MixedPrecisionConfig)
    rows = []
    for field in dataclasses.fields(MixedPrecisionConfig):
        kind = (
            "dtype or null"
            if field.type == "DTypeField"
            else str(field.type).replace("None", "null").replace(" |", " or")
        )
        default = None if field.type == "DTypeField" else field.default
        rows.append((f"`{field.name}`", kind, f"`{json.dumps(default)}`", said.get(field.name, "")))
    return markdown(("field", "type", "default", "meaning"), rows)


@table("cli")
def command_table() -> str:
    """Every verb with its arguments, from their parsers."""
    from mpbridge.cli.main import parser_of, verbs

    parts = []
    for verb in verbs():
        parser = parser_of(verb)
        rows = []
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            value = (
                f" {'|'.join(map(str, action.choices))}"
                if action.choices
                else f" {action.metavar}"
                if action.metavar
                else ""
            )
            name = (
                ", ".join(action.option_strings) + value
                if action.option_strings
                else str(action.metavar or action.dest)
            )
            if action.help != argparse.SUPPRESS:
                rows.append((f"`{name}`", (action.help or "") % {"default": action.default}))
        parts += [f"## mpbridge {verb}", "", parser.description or "", "", markdown(("argument", "meaning"), rows), ""]
    return "\n".join(parts).rstrip()


@table("stack-coverage")
def stack_coverage_table() -> str:
    """Recipe x stack: how faithful an export is."""
    from mpbridge.interop.stacks.exporters import STACKS, export
    from mpbridge.precision.recipes import BUILT_IN

    rows = [(f"`{r.name}`", *(export(r.name, stack).fidelity for stack in STACKS)) for r in BUILT_IN]
    return markdown(("recipe", *STACKS), rows)


@table("loop-edits")
def loop_edits_table() -> str:
    """What is edited in a copy of Megatron-LM's example loop."""
    spec = importlib.util.spec_from_file_location(
        "simple_loop", ROOT / "scripts" / "evidence" / "stacks" / "simple_loop.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before

    def code(text: str) -> str:
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        return "<br>".join(f"`{line}`" for line in lines) or "(nothing)"

    rows = [
        (edit.kind, edit.why or "(part of the edit above)", code(edit.before), code(edit.after))
        for edit in module.EDITS
    ]
    return markdown(("for", "why", "before", "after"), rows)


@table("stack-words")
def stack_word_table() -> str:
    """One word in many stacks."""
    from mpbridge.interop.stacks.meaning import rows
    from mpbridge.interop.stacks.words import TABLE

    shown = ("storage", "compute", "autocast", "main", "wire", "accumulator", "exp_avg", "bytes", "quantization")
    heads = (
        "word",
        "stack",
        "where",
        "stored",
        "forward",
        "autocast",
        "main weights",
        "wire",
        "accumulator",
        "moments",
    )
    return markdown(
        (*heads, "bytes per parameter", "quantized linears"),
        [(f"`{row.words[0]}`", row.stack, row.where, *(rows(row.meaning)[name] for name in shown)) for row in TABLE],
    )


@table("served-formats")
def served_format_table() -> str:
    """The formats of `convert --quantization`."""
    from mpbridge.settings.huggingface.served import FORMATS

    rows = []
    for row in FORMATS:
        extent = {"channel": "output row", "blocks": "128 x 128 block", "lines": f"{row.along} elements of a row"}[
            row.layout
        ]
        kind = {"F32": "FP32", "U8": "E8M0 byte", "F8_E4M3": "E4M3"}[row.scale_dtype]
        second = f"`{row.second}`, {'divisor' if row.divides else 'multiplier'}" if row.second else ""
        algorithm = row.config.get("quant_algo") or row.config.get("format") or ""
        rows.append(
            (f"`{row.method}`", f"`{algorithm}`" if algorithm else "", ", ".join(row.scalings), f"`{row.codes}`", f"`{row.scale}`, {kind} for each {extent}",
             second, f"`{row.kept}`", row.activations,
             ", ".join(f"{one} (no experts)" if one not in (row.engines if row.experts is None else row.experts) else one for one in row.engines))
        )  # fmt: skip
    heads = (
        "quant_method",
        "algorithm or format",
        "scalings",
        "codes",
        "scales",
        "second level",
        "kept modules",
        "activations in the engine",
        "read by",
    )
    return markdown(heads, rows)


def served_data(section: str) -> Any:
    """A section of what the judges of served folders measured (scripts/evidence/stacks/served_*.py)."""
    data = ROOT / "scripts" / "evidence" / "data" / "served.json"
    return json.loads(data.read_text(encoding="utf-8"))[section]


def share(part: float) -> str:
    return "equal" if part == 0 else f"{part:.2%}" if part >= 0.0001 else "< 0.01%"


@table("served-bytes")
def served_bytes_table() -> str:
    """The bytes of other tools beside training's."""
    second = {None: "", True: "equal", False: "other"}
    rows = [
        (r["rule"], r["tool"], share(r["codes"]), share(r["scales"]), second[r["second"]], r["cause"])
        for r in served_data("bytes")["rows"]
    ]
    return markdown(("training", "tool", "codes that differ", "scales", "second level", "the tool's rule"), rows)


@table("served-lists")
def served_lists_table() -> str:
    """What engines' own matchers make of lists, summed up over quantization methods."""
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for r in served_data("lists")["rows"]:
        wrong = f"{r['method']}: {r['wrong']} of {r['modules']}" if r["wrong"] else ""
        rows.setdefault((r["list"], r["engine"]), {}).setdefault(r["model"], []).append(wrong)
    models = list(dict.fromkeys(r["model"] for r in served_data("lists")["rows"]))
    return markdown(
        ("list", "engine", *models),
        [
            (name, engine, *("; ".join(filter(None, found[m])) or "exactly" for m in models))
            for (name, engine), found in rows.items()
        ],
    )


@table("served-loading")
def served_loading_table() -> str:
    """What vLLM's loaders made of folders."""

    def said(row: dict[str, Any]) -> str:
        if "refused" in row:
            return str(row["refused"])
        if "error" in row:
            return f"not loaded: {row['error']}"
        return f"{row['equal']} of {row['equal'] + len(row['different'])} equal" + (
            f"; {'; '.join(row['list'])}" if row["list"] else ""
        )

    rows: dict[str, dict[str, str]] = {}
    for row in served_data("loading")["rows"]:
        rows.setdefault(row["format"], {})[row["model"]] = said(row)
    models = list(dict.fromkeys(row["model"] for row in served_data("loading")["rows"]))
    return markdown(("format", *models), [(name, *(found[m] for m in models)) for name, found in rows.items()])


@table("wings")
def wing_table() -> str:
    """The contracts of pyproject.toml, with the first paragraph of each wing's docstring."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    frameless = next(
        contract["source_modules"] for contract in contracts if contract["name"].startswith("up to settings")
    )
    rows = []
    for wing in layers:
        folder = ROOT / "mpbridge" / wing
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        rooms = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
        torch = "never" if f"mpbridge.{wing}" in frameless else "allowed"
        rows.append(
            (f"`{wing}`", " ".join(text.split("\n\n")[0].split()), ", ".join(f"`{room}`" for room in rooms), torch)
        )
    return markdown(("wing", "subject", "rooms", "torch"), rows)


@table("evidence")
def evidence_table() -> str:
    """Every script under scripts/evidence with its subject, and the pages that quote it."""
    rows = []
    for path in sorted((ROOT / "scripts" / "evidence").rglob("*.py")):
        if path.name == "__init__.py":
            continue
        name = path.relative_to(ROOT / "scripts" / "evidence").as_posix()
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        quoted = [
            page
            for page in pages()
            if page.name not in ("figures.md", "README.md") and f"{path.stem}.py" in page.read_text(encoding="utf-8")
        ]
        links = ", ".join(f"[{page.stem}]({page.relative_to(ROOT / 'docs').as_posix()})" for page in quoted)
        rows.append((f"`{name}`", text.split("\n\n")[0].split(": `")[0].replace("\n", " "), links or "here"))
    return markdown(("script", "subject", "quoted in"), rows)


def filled(text: str, page: str) -> str:
    def fill(found: re.Match[str]) -> str:
        if found["name"] not in TABLES:
            raise SystemExit(f"{page}: no table named {found['name']!r} (known: {', '.join(TABLES)})")
        return f"{found[1]}{TABLES[found['name']]()}\n{found[3]}"

    return BLOCK.sub(fill, text)


def pages() -> list[Path]:
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a table is out of date")
    parser.add_argument("--print", metavar="NAME", dest="shown", help="print one table")
    parser.add_argument("page", nargs="*", type=Path, help="default: README.md and every page under docs/")
    args = parser.parse_args(arguments)
    if args.shown:
        if args.shown not in TABLES:
            parser.error(f"no table named {args.shown!r} (known: {', '.join(TABLES)})")
        print(TABLES[args.shown]())
        return 0
    stale = []
    for page in args.page or pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text, page.name)
        if new != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'out of date' if args.check else 'rewritten'}: {', '.join(stale)}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
