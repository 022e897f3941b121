"""`mpbridge verify FOLDER --key PUB`: checks a folder against its signed record, offline. Loads no framework."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import print_json, print_line
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
        if args.json:
            print_json({"folder": str(folder), "key": signer.id, "record": None})
        else:
            print_line(
                f"{folder}: unchanged since {signer.id[:12]} signed it ({MODEL_SIGNATURE}); it has no record of how it was trained"
            )
        return 0
    with bar("hashing") as told:
        found = verify_record(folder, signer, told)
    build, result = found.provenance["buildDefinition"], found.result
    if args.json:
        print_json(
            {
                "folder": str(folder),
                "key": found.key,
                "files": found.files,
                "provenance": found.provenance,
                "result": result,
            }
        )
    else:
        inner = build["internalParameters"]
        print_line(f"{folder}: {found.files} files, unchanged since {found.key[:12]} signed them")
        print_line(
            f"{found.provenance['runDetails']['metadata']['invocationId']}, recipe {build['externalParameters']['recipe']}, engine {inner['engine']}, {inner['realization']}"
        )
        print_line(
            f"{result['result']}: {len(result['passedTests'])} audits passed, {len(result['failedTests'])} failed"
        )
        for text in (*result["failedTests"], *result["warnedTests"]):
            print_line(text, indent="  ")
    return 1 if result["result"] == "FAILED" else 0
