"""`mpbridge disclose FOLDER`: what a run computed in, for a model card, for MLPerf, or as a signed record of a checkpoint. Loads no framework."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, print_whole
from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.report.curves import PRECISION
from mpbridge.common.report.progress import bar
from mpbridge.settings.huggingface.served import CONTRACT
from mpbridge.training.checkpoint.store import MANIFEST, step_of
from mpbridge.training.disclosure.evidence import Evidence, model_card, read_evidence, write_mllog
from mpbridge.training.disclosure.keys import check_folder, read_key, sign_folder
from mpbridge.training.disclosure.record import MODEL_SIGNATURE, RECORD, sign_checkpoint, verify_record

SUMMARY = "say what a run computed in: for a model card, MLPerf, or as a signed record"
ARGUMENTS = (
    arg("folder FOLDER", "a run's folder (logger.log_dir), a checkpoint, or with --sign a folder to publish", Path),
    arg("--run DIR", "the run of a checkpoint (default: the folder that contains it) or of served weights", Path),
    arg("--mllog FILE", "append MLPerf Training 6.1's nine keys to this log", Path),
    arg("--sign KEY", "write a record into the checkpoint, signed by this private key (PEM)", Path),
    arg("--publish", "with --sign: also sign the whole folder in OpenSSF model signing's format"),
    JSON,
)


def run(args: argparse.Namespace) -> int:
    """Prints the model card's text, or what was written. Returns 1 if the record's verdict is FAILED."""
    if args.publish and args.sign is None:
        raise BadValue("--publish signs the folder: give --sign KEY too")
    if args.sign is not None:
        return _sign(args)
    evidence = _evidence(args)
    if args.mllog is not None:
        keys = write_mllog(evidence, args.mllog)
        written = f"{'emulated; ' if evidence.emulated else ''}written to {args.mllog}"
        lines = (*(f"{key} = {value}" for key, value in keys.items()), written)
        data = {"keys": keys, "emulated": evidence.emulated, "written": str(args.mllog)}
        answer(args, data, lambda: print_line(*lines))
        return 0
    card = model_card(evidence)
    said = {"emulated": evidence.emulated, "card": card, "audits": evidence.audits, "precision": evidence.data}
    answer(args, {"folder": str(args.folder), **said}, lambda: print_whole(card))
    return 0


def _evidence(args: argparse.Namespace) -> Evidence:
    folder: Path = args.folder
    if not (folder / MANIFEST).exists():
        return read_evidence(args.run or folder)
    around = [place for place in (folder.parent, folder.resolve().parent.parent) if (place / PRECISION).exists()]
    if args.run is None and not around:
        raise BadValue(
            f"{folder} is a checkpoint, and no folder around it is a run's: name it (--run DIR, its logger.log_dir)"
        )
    return read_evidence(args.run or around[0]).until(step_of(folder))


def _sign(args: argparse.Namespace) -> int:
    folder, signer = args.folder, read_key(args.sign, private=True)
    if args.sign.resolve().is_relative_to(folder.resolve()):
        raise BadValue(f"{args.sign} lies in the folder that it signs, and would be published with it: move it out")
    if not (folder / MANIFEST).exists() and not (args.run is not None and (folder / CONTRACT).exists()):
        if not args.publish:
            raise BadValue(
                f"{folder} is no checkpoint of mpbridge (it has no {MANIFEST}): to sign any folder, add --publish; served weights with their {CONTRACT}, --run DIR"
            )
        sign_folder(folder, signer, MODEL_SIGNATURE)
        written = str(folder / MODEL_SIGNATURE)
        line = f"{written}: signed by {signer.id[:12]}"
        answer(args, {"signature": written, "key": signer.id}, lambda: print_line(line))
        return 0
    evidence = _evidence(args)
    with bar("hashing") as told:
        result = sign_checkpoint(folder, evidence, signer, publish=args.publish, told=told)
    counts = ", ".join(f"{len(result[f'{word}Tests'])} {word}" for word in ("passed", "warned", "failed"))
    line = f"{folder / RECORD}: {result['result']} ({counts}), signed by {signer.id[:12]}"
    shown = (line, *(f"  {text}" for text in (*result["failedTests"], *result["warnedTests"])))
    answer(args, {"record": str(folder / RECORD), "key": signer.id, **result}, lambda: print_line(*shown))
    return 1 if result["result"] == "FAILED" else 0


class VerifyVerb:
    """`mpbridge verify FOLDER --key PUB`: checks a folder against its signed record, offline. Loads no framework."""

    SUMMARY = "check a checkpoint or a published folder against its signed record"
    ARGUMENTS = (
        arg("folder FOLDER", "a checkpoint with a record, or a published folder", Path),
        arg("--key PUB", "the public key (PEM) of who signed it", Path, required=True),
        JSON,
    )

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Prints what the record says. Returns 0 if the folder is what was signed and the verdict is not FAILED, else 1."""
        folder, signer = args.folder, read_key(args.key, private=False)
        if not folder.is_dir():
            raise BadValue(f"{folder}: expected a folder")
        if not (folder / RECORD).exists():
            if not (folder / MODEL_SIGNATURE).exists():
                raise Refused(
                    f"{folder} has no record ({RECORD}) and no signature ({MODEL_SIGNATURE}): nobody signed it"
                )
            if faults := check_folder(folder, signer, MODEL_SIGNATURE):
                raise Refused(f"{folder} is not what was signed: {faults[0]}")
            line = f"{folder}: unchanged since {signer.id[:12]} signed it ({MODEL_SIGNATURE}); it has no record of how it was trained"
            answer(args, {"folder": str(folder), "key": signer.id, "record": None}, lambda: print_line(line))
            return 0
        with bar("hashing") as told:
            found = verify_record(folder, signer, told)
        provenance, result = found["provenance"], found["result"]
        build, run_id = provenance["buildDefinition"], provenance["runDetails"]["metadata"]["invocationId"]
        inner = build["internalParameters"]
        lines = (
            f"{folder}: {found['files']} files, unchanged since {signer.id[:12]} signed them",
            f"{run_id}, recipe {build['externalParameters']['recipe']}, engine {inner['engine']}, {inner['realization']}",
            f"{result['result']}: {len(result['passedTests'])} audits passed, {len(result['failedTests'])} failed",
            *(f"  {text}" for text in (*result["failedTests"], *result["warnedTests"])),
        )
        answer(args, {"folder": str(folder), **found}, lambda: print_line(*lines))
        return 1 if result["result"] == "FAILED" else 0
