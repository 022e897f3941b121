"""`mpbridge launch ... -- train ...`: a Slurm script for a run on many nodes, printed or submitted."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from typing import Any

from mpbridge.cli._slurm import Job, script
from mpbridge.cli.options import resolved, whole
from mpbridge.errors import BadValue, MpbridgeError

SUMMARY = "a Slurm script for a run on many nodes, printed or submitted: it goes on by itself after each time limit"
USAGE = "as in: mpbridge launch --nodes 2 --gpus-per-node 8 -- train --config llama3_8b checkpoint.save=DIR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("--nodes", type=whole, required=True, metavar="N", help="nodes")
    parser.add_argument(
        "--gpus-per-node", type=whole, required=True, metavar="M", help="GPUs of each node, a process for each of them"
    )
    parser.add_argument("--cpu", action="store_true", help="no GPUs: M processes on each node")
    parser.add_argument("--submit", action="store_true", help="hand the script to sbatch (default: print it)")
    parser.add_argument("--time", metavar="D-HH:MM:SS", help="the time limit (default: the partition's)")
    parser.add_argument(
        "--notice",
        type=whole,
        default=120,
        metavar="S",
        help="seconds before the limit in which the run finishes its step, saves and goes back into the queue (default: 120)",
    )
    parser.add_argument(
        "--retries",
        type=whole,
        default=0,
        metavar="K",
        help="how often a failed run goes back into the queue (default: 0)",
    )
    parser.add_argument("--name", default="mpbridge", metavar="NAME", help="the job's name")
    parser.add_argument(
        "--image",
        metavar="IMAGE",
        help="a container image for Slurm's pyxis plugin: [REGISTRY#]NAME[:TAG], or a squashfs file",
    )
    parser.add_argument("--mount", action="append", default=[], metavar="FROM:TO", help="a folder for the container")
    parser.add_argument(
        "--slurm", action="append", default=[], metavar="OPTION", help="another option of sbatch, as partition=long"
    )
    parser.add_argument(
        "--python", metavar="FILE", help="the interpreter there (default: this one; python in an image)"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- train ...",
        help="what runs: train with its arguments, or a script",
    )


def run(args: argparse.Namespace) -> int:
    """Checks the run on that many processes, and prints or submits the script."""
    if min(args.nodes, args.gpus_per_node, args.notice) < 1 or args.retries < 0:
        raise BadValue("--nodes, --gpus-per-node and --notice: at least 1; --retries: at least 0")
    _check_image(args.image or "")
    if args.mount and not args.image:
        raise BadValue(f"--mount {args.mount[0]} without --image: only a container has mounts")
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        raise BadValue(f"what is to run is missing: {USAGE}")
    if words[0] == "train":
        words = ["-m", "mpbridge", "train", *_resumable(words[1:], args.nodes * args.gpus_per_node)]
    elif not words[0].endswith(".py"):
        raise BadValue(f"{words[0]!r} cannot be launched, expected train or a .py file: {USAGE}")
    job = Job(
        nodes=args.nodes,
        per_node=args.gpus_per_node,
        command=words,
        python=args.python or ("python" if args.image else sys.executable),
        name=args.name,
        gpus=not args.cpu,
        time=args.time,
        notice=args.notice,
        retries=args.retries,
        image=args.image,
        mounts=args.mount,
        options=args.slurm,
    )
    _submit(script(job)) if args.submit else print(script(job), end="")
    return 0


def _check_image(image: str) -> None:
    """Raises BadValue for a registry written as for docker: pyxis would ask Docker Hub for an image of that name, on the node, after the queue."""
    first, slash, rest = image.partition("/")
    is_file = image.endswith((".sqsh", ".squashfs")) or not first or first.startswith(".")
    if slash and "#" not in image and not is_file and ("." in first or ":" in first or first == "localhost"):
        raise BadValue(f"--image {image}: expected --image {first}#{rest}: pyxis sets the registry off by #")


def _resumable(words: list[str], world: int) -> list[str]:
    """train's arguments with the setting that lets the same command go on. Raises Contradiction, BadValue: nothing waits in a queue to fail."""
    from mpbridge.cli.main import parser_of, with_way

    given: Any = parser_of("train", "mpbridge.cli.train").parse_intermixed_args(with_way(words))
    made = resolved(given, training=True, world_size=world)
    save, load = made.checkpoint.get("save"), made.checkpoint.get("load")
    if not save:
        raise BadValue("checkpoint.save is not set: without checkpoints a run starts anew after every time limit")
    return words if load else [*words, f"checkpoint.load={save}"]


def _submit(text: str) -> None:
    if shutil.which("sbatch") is None:
        raise MpbridgeError(
            "sbatch is not on this machine: print the script (without --submit) and submit it where Slurm is"
        )
    done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MpbridgeError(f"sbatch refused the script: {' '.join(done.stderr.split())}")
    print(done.stdout, end="")
