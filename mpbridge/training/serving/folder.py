"""A served folder examined: its headers and scales by themselves, its tensors against contract.json and the run, its list by the engines' matchers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.common.files import ProgressCallback
from mpbridge.common.machines import Machine
from mpbridge.settings.huggingface.folder import FolderTensor, read_config, read_json_file, tensors
from mpbridge.settings.huggingface.kept import list_faults
from mpbridge.settings.huggingface.quantization import listed, row_of, scales_are_static, settings_of
from mpbridge.settings.huggingface.served import INPUT_SCALES, LEGACY, STATIC, ServedFormat
from mpbridge.settings.huggingface.written import refuse_differences
from mpbridge.training.serving.cast import FILE, SCHEMA, is_module
from mpbridge.training.serving.convert import model_of
from mpbridge.training.serving.differences import (
    NO_CONFIG,
    Comparison,
    Difference,
    bad_scales,
    compared,
    group_faults,
    header_faults,
    note_second,
)
from mpbridge.training.serving.files import DTYPES, FolderReader, bad_values, facts_of

POWERS_ONLY = (10, 0)
"""From this compute capability on, DeepGEMM's kernels for 128 x 128 blocks take powers of two as scales."""


@dataclass(slots=True)
class Report:
    """What is in a folder, and what is not as it should be."""

    folder: Path
    format: str
    quantized: int = 0
    """Number of quantized linears."""
    high: int = 0
    """Number of linears in high precision."""
    recipe: str = ""
    step: int | None = None
    found: list[Difference] = field(default_factory=list)
    """Worst first."""
    notes: list[str] = field(default_factory=list)
    """What was not decided, and why."""


def examine(
    folder: Path,
    run: Path | None = None,
    *,
    recipe: str | None = None,
    engines: Sequence[str] = (),
    target: Machine | None = None,
    told: ProgressCallback = lambda done, total: None,
) -> Report:
    """Everything that is wrong with a served folder. run: the checkpoint that it should hold; recipe: another recipe than the run's.

    Raises BadValue, and Contradiction, for a folder that cannot be read: damage, pickles, code, a format that no row of the table describes.
    """
    config, held = read_config(folder), tensors(folder)
    if not held:
        raise BadValue(f"{folder} has no weights: expected safetensors files")
    quantization, faults = _quantization(folder, config)
    row = row_of(quantization) if quantization else None
    report = Report(folder, row.name if row is not None else "high precision", found=faults)
    contract = _contract(folder)
    if contract is not None:
        report.recipe, report.step = str(contract.get("recipe", "")), contract.get("step")
        if contract.get("requantized"):
            after = " after adapters were merged" if contract.get("merged") else ""
            report.notes.append(f"{FILE}: quantized anew{after}: these are not the codes that training computed with")
    modules = _modules(held, row)
    report.quantized, report.high = sum(modules.values()), len(modules) - sum(modules.values())
    if row is not None:
        report.found += _from_headers(held, modules, row) if run is None else []
        report.found += _input_scales(held, modules, quantization)
        entries, two = listed(quantization, row)
        report.found += [Difference("ignored_layers", "list", two)] if two else []
        kept = modules | ({} if "lm_head" in modules else {"lm_head": False})
        # of two lists that differ each engine takes another
        for name, text in list_faults(entries, kept, row.method, () if two else engines):
            report.found.append(Difference(name, "list", text))
        readers = row.read_by(name for name, low in modules.items() if low)
        for engine in set(engines) - set(readers):
            what = f"{row.name} of experts" if engine in row.engines else row.name
            report.found.append(Difference(engine, "engine", f"does not read {what}"))
    elif run is None:
        report.found += [Difference(name, "shape", NO_CONFIG) for name, low in modules.items() if low]
    with FolderReader(folder, held, {}) as reader:
        _read(report, reader, row, config, quantization, contract, run, recipe, target, told)
    if run is None:
        report.notes += contract.get("notes", []) if contract else []
        report.notes.append("not compared with training: name its checkpoint with --run")
        report.notes += [] if contract else [f"there is no {FILE}, so changed bytes are not noticed"]
    report.found.sort(key=lambda one: one.weight)
    return report


def _quantization(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Difference]]:
    """(quantization_config, or its like from ModelOpt's own file; where the two contradict each other)."""
    given = config.get("quantization_config") or {}
    if not isinstance(given, dict):
        raise BadValue(f"{folder / 'config.json'}: quantization_config: expected an object, got {type(given).__name__}")
    if not (folder / LEGACY).exists():
        return given, []
    data = read_json_file(folder / LEGACY)
    inner = data.get("quantization") if isinstance(data, dict) else None
    if not isinstance(inner, dict):
        raise BadValue(f"{folder / LEGACY}: expected an object with 'quantization'")
    theirs = {"quant_method": "modelopt", **inner, "ignore": inner.get("exclude_modules") or []}
    if not given:
        return theirs, []
    mine = given.get("ignore") or []
    faults = []
    if sorted(map(str, mine)) != sorted(map(str, theirs["ignore"])):
        faults.append(Difference(LEGACY, "list", "lists other modules in high precision than config.json"))
    here, there = settings_of(given), settings_of(theirs)
    for name in ("quant_algo", "group_size", "key-value cache"):
        our, other = (said.get(name, "absent") for said in (here, there))
        if our != other and (name == "key-value cache" or "absent" not in (our, other)):
            said = f"says {name} {other}, and config.json {our}: engines read one or the other, so both have to say the same"
            faults.append(Difference(LEGACY, "config", said))
    return given, faults


def _contract(folder: Path) -> dict[str, Any] | None:
    file = folder / FILE
    if not file.exists():
        return None
    data = read_json_file(file)
    named = data.get("tensors") if isinstance(data, dict) else None
    held = named.values() if isinstance(named, dict) else [None]
    sound = all(isinstance(one, dict) and isinstance(one.get("sha256"), str) for one in held)
    if not sound or data.get("schema") != SCHEMA:
        raise BadValue(f"{file}: expected a contract of schema {SCHEMA}, as mpbridge convert writes it")
    return dict(data)


def _modules(held: Mapping[str, FolderTensor], row: ServedFormat | None) -> dict[str, bool]:
    """Every linear of the folder -> whether it is stored quantized."""
    found = {}
    for name, tensor in held.items():
        module, _, last = name.rpartition(".")
        named = last in ("weight", "weight_packed", row.codes if row else "") and is_module(f"{module}.weight")
        if named and len(tensor.shape) == 2:
            found[module] = tensor.dtype not in DTYPES
    return found


def _from_headers(
    held: Mapping[str, FolderTensor], modules: Mapping[str, bool], row: ServedFormat
) -> Iterator[Difference]:
    """Missing scales, wrong shapes and dtypes, without knowing the model: the codes' shape decides the others'."""
    for module, low in modules.items():
        if not low:
            continue
        codes = held.get(f"{module}.{row.codes}")
        if codes is None:
            yield Difference(f"{module}.{row.codes}", "missing", f"is missing; {row.name} stores codes under this name")
            continue
        rows, columns = codes.shape
        yield from header_faults(module, (rows, columns * 2 if row.second else columns), held, row)


def _input_scales(
    held: Mapping[str, FolderTensor], modules: Mapping[str, bool], quantization: Mapping[str, Any]
) -> Iterator[Difference]:
    """Static scales of activations that only some linears have, or none although the config asks for them."""
    low = [module for module, quantized in modules.items() if quantized]
    has = {name: {module for module in low if f"{module}.{name}" in held} for name in INPUT_SCALES}
    name = max(has, key=lambda one: len(has[one]))
    if has[name] or scales_are_static(quantization):
        said = "is missing: an engine multiplies with what its memory held"
        yield from (Difference(f"{module}.{name}", "missing", said) for module in low if module not in has[name])


def _config_faults(
    comparison: Comparison, config: Mapping[str, Any], held: Mapping[str, FolderTensor]
) -> Iterator[Difference]:
    """What config.json says of the model that is not the run's: an engine computes something else from the same weights."""
    export = comparison.export
    try:
        refuse_differences(
            model_of(export.run), {name: config[name] for name in config if name != "quantization_config"}
        )
    except Contradiction as error:
        yield from (Difference("config.json", "config", fault) for fault in error.faults)
    embedding = export.wanted[0]
    stored = held.get(embedding.parts[0][0])
    known = (export.read(embedding, meta=True).dtype, DTYPES.get(stored.dtype) if stored else None)
    wanted = {export.run.policy.compute.value, *(str(one)[6:] for one in known if one)}
    for name in ("dtype", "torch_dtype"):
        said = str(config.get(name) or "").removeprefix("torch.")
        if isinstance(getattr(torch, said, None), torch.dtype) and said not in wanted:
            text = f"{name} is {said}, expected {' or '.join(sorted(wanted))}: an engine computes in it"
            yield Difference("config.json", "config", text)


def _read(
    report: Report,
    reader: FolderReader,
    row: ServedFormat | None,
    config: Mapping[str, Any],
    quantization: Mapping[str, Any],
    contract: Mapping[str, Any] | None,
    run: Path | None,
    recipe: str | None,
    target: Machine | None,
    told: ProgressCallback,
) -> None:
    """Reads what has to be read: with a contract or a run every tensor once, otherwise only scales."""
    recorded = contract["tensors"] if contract is not None else {}
    seconds: dict[str, float] = {}
    powers = True
    total, done = sum(one.bytes for one in reader.held.values()), 0
    with nullcontext() if run is None else compared(run, quantization, recipe) as comparison:
        for name in sorted(reader.held, key=lambda one: (reader.held[one].file, one)):
            scale = row is not None and name.endswith((f".{row.scale}", f".{row.single or row.scale}"))
            static = row is not None and name.rpartition(".")[2] in STATIC
            if scale or static or comparison is not None or name in recorded:
                tensor = reader.raw(name)
                if name in recorded and facts_of(tensor)["sha256"] != recorded[name]["sha256"]:
                    report.found.append(Difference(name, "bytes", f"is not what {FILE} recorded: changed since"))
                judge = bad_scales if scale or static else bad_values
                if (static or comparison is None) and (bad := judge(tensor)):
                    report.found.append(Difference(name, "invalid", bad, float("inf")))
                note_second(seconds, row, name, tensor)
                if scale and row is not None and row.layout == "blocks":
                    powers = powers and bool((torch.frexp(tensor.float()).mantissa == 0.5).all())
                report.found += [] if comparison is None else comparison.see(name, tensor)
            done += reader.held[name].bytes
            told(done, total)
        if comparison is not None:
            report.found += [*comparison.end(), *_config_faults(comparison, config, reader.held)]
            report.notes += comparison.served.notes
            report.recipe, policy = comparison.training.recipe, comparison.training.policy
            if contract is not None and contract.get("fingerprint") != policy.fingerprint():
                said = f"was written under {contract.get('recipe')}, another precision policy than {report.recipe}"
                report.found.append(Difference(FILE, "bytes", said))
    if contract is not None and comparison is None:
        added = [name for name in reader.held if name not in recorded]
        gone = [name for name in recorded if name not in reader.held]
        report.found += [Difference(name, "extra", f"is not in {FILE}: added since") for name in added]
        report.found += [Difference(name, "missing", f"is missing; {FILE} records it") for name in gone]
    report.found += group_faults(seconds)
    if row is None or row.layout != "blocks" or powers:
        return
    if quantization.get("scale_fmt") == "ue8m0":
        said = "are not powers of two, but scale_fmt says ue8m0: an engine rounds them"
        report.found.append(Difference(row.scale, "scales", said))
    if target is not None and target.arch is not None and target.arch >= POWERS_ONLY:
        said = (
            f"are FP32 numbers, and {target.name} multiplies with powers of two: an engine quantizes the weights anew"
        )
        report.found.append(Difference(row.scale, "scales", said))
