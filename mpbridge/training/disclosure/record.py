"""A signed record of a checkpoint or of served weights: in-toto statements in DSSE envelopes beside its files, and OpenSSF model signing of a published folder. Offline.

Formats: in-toto Statement v1, SLSA provenance v1 and test-result v0.1 (predicates), DSSE 1.0; one envelope a line. A signature says who claims something,
not that it is true.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mpbridge.common.errors import BadValue, CheckpointError, Refused, brief
from mpbridge.common.files import (
    ProgressCallback,
    bytes_of,
    drop_partials,
    opened,
    opened_inside,
    parsed,
    read_json,
    text_of,
    write_whole,
)
from mpbridge.common.shipped import VERSION
from mpbridge.precision.yaml_loader import load_yaml
from mpbridge.settings.huggingface.served import CONTRACT
from mpbridge.training.checkpoint.store import (
    CONFIG,
    MANIFEST,
    audit_of,
    read_manifest,
    step_in,
    step_of,
)
from mpbridge.training.checkpoint.verdict import Fingerprint, read_fingerprint
from mpbridge.training.disclosure.evidence import Evidence
from mpbridge.training.disclosure.keys import Signer, check_folder, model_signing_for, refuse_link, sign_folder

RECORD = "precision.intoto.jsonl"
MODEL_SIGNATURE = "model.sig"
"""OpenSSF model signing's bundle."""
OUTSIDE = frozenset({RECORD, MODEL_SIGNATURE})
"""Files of a signed folder that the record does not name."""
PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE, RESULT = "https://slsa.dev/provenance/v1", "https://in-toto.io/attestation/test-result/v0.1"
MEANINGS = {PROVENANCE: "how it was trained", RESULT: "what the audits found"}
BUILD_TYPE = "tag:mpbridge,2026:training/v1"
_LARGEST = 1 << 28
_CHUNK = 1 << 22
_MOST = 16
"""Threads: hashing releases the interpreter's lock."""
_PYPI = frozenset({"torch", "megatron_core", "transformer_engine", "torchao"})


def sign_checkpoint(
    folder: Path, evidence: Evidence, signer: Signer, *, publish: bool, told: ProgressCallback
) -> Mapping[str, Any]:
    """Writes the record into the folder of a checkpoint, or of served weights with their contract, and model signing's bundle if it is to be published; returns the test result.

    Raises CheckpointError for damaged files, Refused if the audits are of another run, BadValue for a bundle that would no longer fit.
    """
    subject = Subject.of(folder)
    if publish:
        # before anything is hashed or written
        model_signing_for(signer)
        refuse_link(folder / MODEL_SIGNATURE)
    elif os.path.lexists(folder / MODEL_SIGNATURE):
        raise BadValue(
            f"{folder / MODEL_SIGNATURE} is of this folder with the record that it has now: sign the folder again too (--publish), or remove that file"
        )
    for name in OUTSIDE:  # of a signing that was killed: neither the checkpoint's nor the record's
        drop_partials(folder / name)
    found = digests(folder, OUTSIDE, told)
    listed = {**subject.files, MANIFEST: found.get(MANIFEST)}
    if subject.files and (faults := differences(listed, found)):
        raise CheckpointError(
            "\n".join([f"{folder} is not as it was saved, so it is not signed:", *(f"  - {x}" for x in faults)])
        )
    bodies = _predicates(folder, subject, evidence.until(subject.step), publish)
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in found.items()]
    lines = [
        signer.envelope({"_type": STATEMENT, "subject": subjects, "predicateType": kind, "predicate": body}, PAYLOAD)
        for kind, body in bodies.items()
    ]
    if publish:
        # it covers the record that is replaced: if this ends between the two, a bundle is missing, and none is there that does not fit
        (folder / MODEL_SIGNATURE).unlink(missing_ok=True)
    write_whole(folder / RECORD, "".join(f"{line}\n" for line in lines))
    if publish:
        sign_folder(folder, signer, MODEL_SIGNATURE)
    return bodies[RESULT]


@dataclass(frozen=True, slots=True)
class Subject:
    """What a folder says of the run that it comes from: a checkpoint by its manifest, a served folder by its contract."""

    step: int
    run: Fingerprint
    audit: str
    """The audit's mark of the checkpoint."""
    files: Mapping[str, str]
    """File -> SHA-256 when it was saved; a contract has those of tensors."""
    warned: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    """The run's configuration as it was saved; None: a contract has none."""

    @classmethod
    def of(cls, folder: Path) -> Subject:
        """Raises CheckpointError for a folder that does not say it."""
        if not (folder / CONTRACT).exists():
            files = {name: facts["sha256"] for name, facts in read_manifest(folder)["files"].items()}
            config = load_yaml(text_of(folder / CONFIG, kind="configuration")) if CONFIG in files else None
            return cls(step_of(folder), read_fingerprint(folder), audit_of(folder), files, config=config)
        contract = read_json(folder / CONTRACT)
        run = contract.get("run") if isinstance(contract, dict) else None
        if not isinstance(run, dict):
            raise CheckpointError(
                f"{folder / CONTRACT} names no run: it was made of a checkpoint without a fingerprint"
            )
        try:
            other = f"quantized by another recipe than the run's: {contract['recipe']}"
            again, audit = (other,) if contract["requantized"] else (), str(contract["audit"])
        except KeyError as error:
            raise CheckpointError(f"{folder / CONTRACT} has no {error}: mpbridge convert writes one that has") from None
        return cls(step_in(contract, folder), Fingerprint.from_data(run), audit, {}, again)


def _predicates(folder: Path, subject: Subject, evidence: Evidence, publish: bool) -> dict[str, dict[str, Any]]:
    saved, data, step = subject.run, evidence.data, subject.step
    trained = {one["recipe"] for one in evidence.audits}
    if not trained:
        raise Refused(f"{evidence.path} has no audit up to step {step}: it is of another run than {folder}")
    if saved.recipe not in trained or saved.engine != data["engine"]:
        raise Refused(
            f"{evidence.path} is of another run than {folder}: recipe {', '.join(sorted(trained))} on {data['engine']}, the checkpoint's {saved.recipe} on {saved.engine}"
        )
    policy = saved.policy.fingerprint()
    config = data["config"] if subject.config is None else subject.config
    pairs = {
        "realization": (data["realization"], saved.realization),
        "model": (data["config"].get("model"), config.get("model")),
    }
    if data["recipe"] == saved.recipe:  # a run that went on under another recipe has that one's policy
        pairs["policy"] = data["fingerprint"], policy
    apart = {name: map(brief, pair) for name, pair in pairs.items() if pair[0] != pair[1]}
    if apart:
        others = [f"{name} {here}, the checkpoint's {there}" for name, (here, there) in apart.items()]
        raise Refused(f"{evidence.path} is of another run than {folder}: {'; '.join(others)}")
    byproducts: list[dict[str, Any]] = [
        {"name": evidence.path.name, "digest": {"sha256": hashlib.sha256(bytes_of(evidence.path, kind="json")).hexdigest()}, "annotations": {"in": "the run's folder"}}
    ]  # fmt: skip
    byproducts += [{"name": MODEL_SIGNATURE, "uri": MODEL_SIGNATURE}] if publish else []
    provenance = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"recipe": saved.recipe, "config": config},
            "internalParameters": {
                "policy": saved.policy.as_data(), "fingerprint": policy, "engine": saved.engine,
                "realization": saved.realization, "parallel": dict(saved.parallel),
            },
            "resolvedDependencies": [{"uri": _package(name, text)} for name, text in saved.versions.items() if text],
        },
        "runDetails": {
            "builder": {"id": "tag:mpbridge,2026:cli", "version": {"mpbridge": VERSION}},
            "metadata": {"invocationId": f"step {step}"},
            "byproducts": byproducts,
        },
    }  # fmt: skip
    tests: dict[bool, list[str]] = {True: [], False: []}
    for one in evidence.audits:
        text = f"{one['stage']} audit of step {one['step']} ({one['reason']})"
        tests[one["ok"]].append(text if one["ok"] else f"{text}: {'; '.join(map(str, one['faults']))}")
    mark = subject.audit
    if mark == "suspect":
        tests[False].append("this checkpoint is marked suspect")
    warned = [f"not observed: {name}" for name in sorted({row for one in evidence.live for row in one["not_observed"]})]
    warned += [*subject.warned, *(["the state in this checkpoint was not audited"] if mark == "unaudited" else [])]
    result = {
        "result": "FAILED" if tests[False] else "WARNED" if warned else "PASSED",
        "configuration": [{"name": "precision policy", "digest": {"sha256": policy}}],
        "passedTests": tests[True], "warnedTests": warned, "failedTests": tests[False],
    }  # fmt: skip
    return {PROVENANCE: provenance, RESULT: result}


def _package(name: str, version: str) -> str:
    kind = "pypi" if name in _PYPI else "generic"
    return f"pkg:{kind}/{name.replace('_', '-')}@{quote(version, safe='')}"


def digests(folder: Path, without: Collection[str], told: ProgressCallback) -> dict[str, str]:
    """Name below `folder` -> SHA-256, sorted by name; several files at a time. told: of bytes done and in all.

    Raises CheckpointError for anything that is neither a regular file nor a folder: links are not followed.
    """
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = sorted({path.relative_to(folder).as_posix() for path in paths} - set(without))
    total = sum((folder / name).lstat().st_size for name in names)
    done, lock = 0, threading.Lock()

    def digest(name: str) -> str:
        nonlocal done
        found = hashlib.sha256()
        with opened_inside(folder, name) as stream:
            while chunk := stream.read(_CHUNK):
                found.update(chunk)
                with lock:
                    done += len(chunk)
                    told(done, total)
        return found.hexdigest()

    with ThreadPoolExecutor(max_workers=min(_MOST, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A line for each file that was added, is missing or has another SHA-256."""
    changed = {name for name in wanted.keys() & found.keys() if wanted[name] != found[name]}
    kinds = (
        ("was added", found.keys() - wanted.keys()),
        ("is missing", wanted.keys() - found.keys()),
        ("was changed", changed),
    )
    # a name with a line break would print lines of its own
    return [f"{name if name.isprintable() else ascii(name)} {what}" for what, names in kinds for name in sorted(names)]


def verify_record(folder: Path, signer: Signer, told: ProgressCallback) -> dict[str, Any]:
    """Checks a folder against its record: 'key' (the id of who signed it), 'files' (their number), 'provenance' (SLSA's predicate), 'result' (the test
    result's, whose own 'result' is PASSED, WARNED or FAILED). signer: the public key. Raises Refused naming everything that is wrong."""
    statements, found = _statements(folder, signer), digests(folder, OUTSIDE, told)
    faults: list[str] = []
    try:
        for statement in statements.values():
            wanted = {str(one["name"]): one["digest"]["sha256"] for one in statement["subject"]}
            faults += [line for line in differences(wanted, found) if line not in faults]
        bodies = {kind: statement["predicate"] for kind, statement in statements.items()}
        faults = faults or _disagreements(folder, bodies)
        names = [one["name"] for one in bodies[PROVENANCE]["runDetails"]["byproducts"]]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise Refused(f"{folder / RECORD} lacks facts that a record has ({type(error).__name__}: {error})") from None
    if MODEL_SIGNATURE in names or os.path.lexists(folder / MODEL_SIGNATURE):
        faults += check_folder(folder, signer, MODEL_SIGNATURE)
    _refuse(folder, faults)
    return {"key": signer.id, "files": len(found), "provenance": bodies[PROVENANCE], "result": bodies[RESULT]}


def _statements(folder: Path, signer: Signer) -> dict[str, Mapping[str, Any]]:
    """Predicate type -> statement, both signed by the key. Raises Refused."""
    with opened(folder / RECORD) as stream:
        data = stream.read(_LARGEST + 1)
    lines, faults = data.splitlines(), []
    found: dict[str, Mapping[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{RECORD}, line {number}"
        fault, payload = signer.opened(line, PAYLOAD)
        if fault:
            faults.append(f"{where}: {fault}")
            continue
        statement = parsed(payload, where)
        kind = statement.get("predicateType") if isinstance(statement, dict) else None
        if kind not in MEANINGS or statement.get("_type") != STATEMENT:
            faults.append(f"{where}: expected a statement of {' or '.join(MEANINGS)}")
        elif kind in found:
            faults.append(f"{where}: a second statement of {MEANINGS[kind]}")
        else:
            found[kind] = statement
    if not faults:
        faults += [f"{RECORD}: the statement of {MEANINGS[kind]} is missing" for kind in MEANINGS if kind not in found]
    _refuse(folder, faults)
    return found


def _disagreements(folder: Path, bodies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a validly signed record says otherwise than the checkpoint that it is about."""
    subject, build, result = Subject.of(folder), bodies[PROVENANCE]["buildDefinition"], bodies[RESULT]
    saved = subject.run
    policy = saved.policy.fingerprint()
    pairs: Sequence[tuple[str, Any, Any]] = (
        ("recipe", build["externalParameters"]["recipe"], saved.recipe),
        ("engine", build["internalParameters"]["engine"], saved.engine),
        ("realization", build["internalParameters"]["realization"], saved.realization),
        ("parallel sizes", build["internalParameters"]["parallel"], dict(saved.parallel)),
        ("policy", build["internalParameters"]["fingerprint"], policy),
        ("audited policy", result["configuration"][0]["digest"]["sha256"], policy),
    )
    lines = [f"the record's {name} is {said}, the checkpoint's {there}" for name, said, there in pairs if said != there]
    mark = subject.audit
    if result["result"] == "PASSED" and (mark != "good" or result["failedTests"]):
        lines.append(
            f"the record says PASSED, the checkpoint is marked {mark} and {len(result['failedTests'])} audits failed"
        )
    return lines


def _refuse(folder: Path, faults: Sequence[str]) -> None:
    if faults:
        raise Refused("\n".join([f"{folder} is not what was signed:", *(f"  - {fault}" for fault in faults)]))
