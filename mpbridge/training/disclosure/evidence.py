"""What a run's audits saw, for others: the lowest precision in linears, attention and communication; the nine keys with which MLPerf Training 6.1 asks for precision
and parallel sizes, written by the library mlperf-logging; and a paragraph and a table for a Hugging Face model card.

Source of the keys: mlperf-logging 4.1.68, compliance_checker/training_6.1.0/common.yaml.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue, Refused, cut
from mpbridge.common.files import lines_of, read_json, write
from mpbridge.common.report.curves import PRECISION, read_history
from mpbridge.common.shipped import VERSION, install
from mpbridge.common.tables import processes, table
from mpbridge.precision.regions import GEMMS
from mpbridge.precision.scalings import ELEMENTS, SCALINGS
from mpbridge.precision.wording import HIGH

WIDTHS: Mapping[str, tuple[int, int]] = {
    "fp64": (64, 52), "fp32": (32, 23), "fp16": (16, 10), "bf16": (16, 7), "fp8": (8, 3), "nvfp4": (4, 1),
}  # fmt: skip
"""Word -> (bits, mantissa bits) of an element: the smallest pair is the lowest precision."""
_FORMATS: Mapping[str, str] = {name: "nvfp4" if name == "e2m1" else "fp8" for name in ELEMENTS} | {
    # as collectives see them: stored FP8 weights travel as codes
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "uint8": "fp8",
}  # fmt: skip
_OTHER = {*SCALINGS, *GEMMS, *HIGH.split()} - set(WIDTHS)
"""The other words of the row 'linears'."""
WIRES: Mapping[str, str] = {
    "data": "wire: gradients", "pipeline": "wire: stages",
    "tensor": "wire: tensor", "context": "wire: context", "expert": "wire: experts",
}  # fmt: skip
"""Parallel dimension -> the audit's row for what its ranks send each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowest:
    """The lowest precision in one part of the computation."""

    word: str
    """A key of WIDTHS."""
    where: str = ""
    """The audit's row in which it was seen; '' for a promise."""
    step: int = 0
    """The first audited step at which it was seen."""
    seen: Mapping[str, Sequence[str]]
    """Row -> all precisions seen in it."""
    unobserved: str = ""
    """Why this is what the recipe promises, and was not observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A run's precision.json and its audits."""

    path: Path
    data: Mapping[str, Any]
    audits: tuple[Mapping[str, Any], ...]
    """Short forms, oldest first (`common.report.history`)."""

    @property
    def emulated(self) -> bool:
        """Whether low precision was computed in software."""
        return bool(self.data["realization"] == "emulated")

    @property
    def live(self) -> list[Mapping[str, Any]]:
        """The audits of a step."""
        return [one for one in self.audits if one["stage"] == "live"]

    def until(self, step: int) -> Evidence:
        """The same without audits after `step`."""
        return Evidence(path=self.path, data=self.data, audits=tuple(one for one in self.audits if one["step"] <= step))

    def lowest(self) -> dict[str, Lowest]:
        """'linear', 'attn', 'comm' -> the lowest precision over all audits. Raises Refused naming everything that no audit saw, and every fault found."""
        faults = [
            f"the {one['stage']} audit of step {one['step']} found deviations: {'; '.join(map(str, one['faults']))}"
            for one in self.audits
            if not one["ok"]
        ]
        if not any("compute" in one["facts"] or "linears" in one["facts"] for one in self.live):
            faults.append("no step was audited: the live audit looks at the first update that is applied")
        found: dict[str, Lowest] = {}
        for part, rows in (("linear", ("compute", "linears")), ("attn", ("attention",))):
            seen = list(self._seen(rows, faults))
            quantized = any(row == "linears" for row, _, _ in seen)
            if not seen or (part == "linear" and not quantized and not any(row == "compute" for row, _, _ in seen)):
                faults.append(self._unseen(part, rows[0]))
            else:
                found[part] = _lowest(seen)
        communication = self._communication(faults)
        if faults:
            raise Refused("\n".join([f"{self.path}: nothing is disclosed:", *(f"  - {fault}" for fault in faults)]))
        assert communication is not None
        return found | {"comm": communication}

    def _communication(self, faults: list[str]) -> Lowest | None:
        parallel = self.data["parallel"]
        if parallel["world_size"] == 1:
            policy = self.data["policy"]
            sent = {"gradients": policy["reduce"], "parameters": policy["gather"] or policy["params"]}
            promised = {f"wire: {kind}": [_FORMATS.get(word, word)] for kind, word in sent.items()}
            if odd := [str(words[0]) for words in promised.values() if words[0] not in WIDTHS]:
                faults.append(f"comm: the policy's {cut(', '.join(odd))} is no precision that is known here")
                return None
            word = min((words[0] for words in promised.values()), key=WIDTHS.__getitem__)
            return Lowest(word=word, seen=promised, unobserved="a single process sends nothing: promised by the recipe")
        sizes = {name: int(parallel[name] or 1) for name in ("tensor", "pipeline", "context", "expert")}
        sizes["data"] = parallel["world_size"] // (sizes["tensor"] * sizes["pipeline"] * sizes["context"])
        rows = sorted({row for one in self.live for row in one["facts"] if row.startswith("wire: ")})
        missing = [name for name, size in sizes.items() if size > 1 and WIRES[name] not in rows]
        faults += [
            f"comm: no audit saw what the ranks of {name}-parallel groups send each other (row {WIRES[name]!r} of a live audit would show it)"
            for name in missing
        ]
        seen = list(self._seen([row for row in rows if row != "wire: which gradients"], faults))
        return _lowest(seen) if seen and not missing else None

    def _seen(self, rows: Sequence[str], faults: list[str]) -> Iterator[tuple[str, int, str]]:
        """(row, step, precision) of every observation; a word that is not known is added to `faults`."""
        for one in self.live:
            for row in rows:
                _, found, state = one["facts"].get(row, ("", "", ""))
                if state != "ok":
                    continue
                words = re.findall(r"[a-z][a-z0-9_]*", str(found)) if row == "linears" else str(found).split("/")
                read = [_FORMATS.get(word, word) for word in words if row != "linears" or word not in _OTHER]
                if strange := sorted(set(read) - set(WIDTHS)):
                    faults.append(f"{row} of step {one['step']}: {', '.join(strange)} is not a precision known here")
                    continue
                yield from ((row, one["step"], word) for word in read)

    def _unseen(self, part: str, row: str) -> str:
        reasons = {str(one["not_observed"][row]) for one in self.live if row in one["not_observed"]}
        if reasons:
            return f"{part}: no audit saw it ({'; '.join(sorted(reasons))}); row {row!r} of a live audit shows it where torch computes it, as in an emulated run of the same recipe"
        return f"{part}: no audit saw it; row {row!r} of the live audit after the first applied update shows it"


def _lowest(seen: Sequence[tuple[str, int, str]]) -> Lowest:
    words: dict[str, list[str]] = {}
    for row, _, word in seen:
        words.setdefault(row, [])
        if word not in words[row]:
            words[row].append(word)
    row, step, word = min(seen, key=lambda one: (WIDTHS[one[2]], one[1]))
    return Lowest(word=word, where=row, step=step, seen=words)


def read_evidence(run: Path) -> Evidence:
    """The evidence in a run's folder (logger.log_dir). Raises BadValue if it has no audits or lacks facts that every run records."""
    path = run / PRECISION if run.is_dir() else run
    audits = read_history(path)
    data = read_json(path)
    needed = ("recipe", "engine", "realization", "fingerprint", "policy", "parallel", "versions", "config")
    if missing := [name for name in needed if name not in data]:
        raise BadValue(f"{path} lacks {', '.join(missing)}: expected the precision.json of a run")
    return Evidence(path=path, data=data, audits=tuple(audits))


WORDS = {"bf16": "bfloat16"}
"""Precisions that MLPerf spells in another way. It has no word for a scaling, which goes into the metadata."""
PRECISIONS = {part: f"lowest_numerical_precision_in_{part}" for part in ("linear", "attn", "comm")}
SIZES = ("tensor", "pipeline", "context", "expert")


def keys_of(evidence: Evidence) -> dict[str, tuple[Any, dict[str, Any]]]:
    """MLPerf's key -> (value, metadata). Raises Refused for what no audit saw, BadValue if the micro-batch size was not recorded."""
    data = evidence.data
    if "micro_batch_size" not in data:
        raise BadValue(f"{evidence.path} does not record micro_batch_size: an older mpbridge wrote it; run it again")
    common = {"recipe": data["recipe"], "policy": data["fingerprint"], "realization": data["realization"]}
    keys: dict[str, tuple[Any, dict[str, Any]]] = {}
    for part, lowest in evidence.lowest().items():
        told = asdict(lowest) | {"audits": len(evidence.audits), "observed": not lowest.unobserved}
        keys[PRECISIONS[part]] = (WORDS.get(told.pop("word"), lowest.word), common | told)
    for name in SIZES:
        keys[f"{name}_parallelism"] = (int(data["parallel"][name] or 1), common)
    keys["micro_batch_size"] = (int(data["micro_batch_size"]), common)
    keys["config_filename"] = (evidence.path.name, common)
    return keys


def write_mllog(evidence: Evidence, log: Path) -> dict[str, Any]:
    """Appends the keys to a benchmark's log, or to a new file; returns key -> value. Raises Refused if the log already has one, since each is allowed once."""
    try:
        from mlperf_logging.mllog.mllog import MLLogger
    except ImportError:
        raise Refused(f"--mllog needs the package mlperf-logging: {install('disclose')}") from None
    keys = keys_of(evidence)
    if log.exists():
        there = [key for key in keys if any(f'"key": "{key}"' in line for line in lines_of(log))]
        if there:
            raise Refused(f"{log} already has {', '.join(there)}; MLPerf allows each key once: name another file")
    lines, logger = io.StringIO(), logging.Logger("mpbridge.mllog")
    logger.addHandler(logging.StreamHandler(lines))
    writer = MLLogger(logger, root_dir=re.escape(str(Path(__file__).parents[3])))
    for key, (value, metadata) in keys.items():
        writer.event(key=key, value=value, metadata=metadata)
    write(log, lines.getvalue(), append=True)
    return {key: value for key, (value, _) in keys.items()}


ROWS = (
    "params", "main_params", "grads", "main_grads", "exp_avg", "exp_avg_sq", "linears", "quantized GEMMs", "compute", "attention", "softmax",
    "residual stream", "norms", "router", "rotary angles", "logits", "loss", "autocast", "loss scale",
)  # fmt: skip
"""Facts of the audit that a reader of a card asks for; rows of the wire follow."""


def model_card(evidence: Evidence) -> str:
    """Markdown: which recipe, on what, audited when, and what was found on live tensors."""
    data, parallel = evidence.data, evidence.data["parallel"]
    versions = ", ".join(f"{name.replace('_', '-')} {text}" for name, text in data["versions"].items() if text)
    how = "emulated in software" if evidence.emulated else "computed natively"
    recipes = list(dict.fromkeys(f"`{one['recipe']}`" for one in evidence.audits))
    steps = sorted({one["step"] for one in evidence.live})
    bad = [one["step"] for one in evidence.audits if not one["ok"]]
    found: dict[str, tuple[str, str, str, int]] = {}
    for one in evidence.live:
        for name, (promised, seen, state) in one["facts"].items():
            found[name] = (str(promised), str(seen), str(state), one["step"])
    verdict = f"deviations at step {', '.join(map(str, bad))}" if bad else "everything as the recipe promises"
    unseen = sorted(name for name, row in found.items() if row[2] == "not observed")
    text = (
        f"Trained with the recipe{'s' if len(recipes) > 1 else ''} {', then '.join(recipes)} (mpbridge {VERSION}; {versions}), engine {data['engine']}, {how}, on "
        f"{processes(parallel['world_size'])}. "
        f"Live tensors were audited at {f'steps {_steps(steps)}' if steps else 'no step'}: {verdict}"
        + (f"; not observed: {', '.join(unseen)}." if unseen else ".")
    )
    shown = [name for name in (*ROWS, *sorted(n for n in found if n.startswith("wire: "))) if name in found]
    columns = ("what", "promised", "found on live tensors", "", "last seen at step")
    rows = ([" ".join(str(cell).split()) for cell in (name, *found[name])] for name in shown)
    return "\n".join(["## Numerical precision", "", text, "", table("", columns, rows).markdown()])


def _steps(steps: list[int]) -> str:
    named = [str(step) for step in steps]
    return ", ".join(named if len(named) <= 8 else [*named[:4], f"... ({len(named)} audits)", named[-1]])
