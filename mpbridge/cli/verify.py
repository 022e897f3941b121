"""`mpbridge verify FOLDER --key PUB`: checks a folder against its signed record, offline. Loads no framework."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, record
from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.report.progress import bar

SUMMARY = "check a checkpoint or a published folder against its signed record"
ARGUMENTS = (
    arg("folder FOLDER", "a checkpoint with a record, or a published folder", Path),
    arg("--key PUB", "the public key (PEM) of who signed it", Path, required=True),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints what the record says. Returns 0 if the folder is what was signed and the verdict is not FAILED, else 1."""
    from mpbridge.training.disclosure.keys import check_folder, read_key
    from mpbridge.training.disclosure.record import MODEL_SIGNATURE, RECORD, verify_record

    folder, signer = args.folder, read_key(args.key, private=False)
    if not folder.is_dir():
        raise BadValue(f"{folder}: expected a folder")
    if not (folder / RECORD).exists():
        if not (folder / MODEL_SIGNATURE).exists():
            raise Refused(f"{folder} has no record ({RECORD}) and no signature ({MODEL_SIGNATURE}): nobody signed it")
        if faults := check_folder(folder, signer, MODEL_SIGNATURE):
            raise Refused(f"{folder} is not what was signed: {faults[0]}")
        line = f"{folder}: unchanged since {signer.id[:12]} signed it ({MODEL_SIGNATURE}); it has no record of how it was trained"
        answer(args, {"folder": str(folder), "key": signer.id, "record": None}, lambda: print_line(line))
        return 0
    with bar("hashing") as told:
        found = verify_record(folder, signer, told)
    build, result = found.provenance["buildDefinition"], found.result
    inner, run_id = build["internalParameters"], found.provenance["runDetails"]["metadata"]["invocationId"]
    lines = (
        f"{folder}: {found.files} files, unchanged since {found.key[:12]} signed them",
        f"{run_id}, recipe {build['externalParameters']['recipe']}, engine {inner['engine']}, {inner['realization']}",
        f"{result['result']}: {len(result['passedTests'])} audits passed, {len(result['failedTests'])} failed",
        *(f"  {text}" for text in (*result["failedTests"], *result["warnedTests"])),
    )
    data = {"folder": str(folder), **record(found, "key", "files", "provenance", "result")}
    answer(args, data, lambda: print_line(*lines))
    return 1 if result["result"] == "FAILED" else 0
