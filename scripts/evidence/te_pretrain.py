"""Megatron-LM's own training scripts, unchanged, on Transformer Engine's Python without a GPU: `python scripts/evidence/te_pretrain.py CHECKOUT --te 2.11`.

CHECKOUT: a clone of Megatron-LM; it is read, never written. pretrain_gpt.py trains five iterations of two layers on mock data under `mpbridge on-cpu`: each
--fp8-recipe and NVFP4, with and without --fp8-param-gather, in one process and in two over gloo; then examples/run_simple_mcore_train_loop.py, which asks for
two. Prints a row a run with its losses; exit code 1 if one does not reach its end. Needs psutil beside mpbridge: megatron-core's checkpoint writer asks it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 5
SMALL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 "
    f"--train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-4 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --distributed-backend gloo "
    "--attention-backend unfused --no-gradient-accumulation-fusion --no-masked-softmax-fusion --log-interval 1 --eval-iters 0 --eval-interval 100 "
    "--use-distributed-optimizer --transformer-impl transformer_engine"
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
GATHER = "--fp8-param-gather"
RUNS = {
    "delayed": ("h100", "--fp8-format hybrid --fp8-recipe delayed"),
    "delayed, FP8 parameter gather": ("h100", f"--fp8-format hybrid --fp8-recipe delayed {GATHER}"),
    "tensorwise": ("h100", "--fp8-format hybrid --fp8-recipe tensorwise"),
    "tensorwise, FP8 parameter gather": ("h100", f"--fp8-format hybrid --fp8-recipe tensorwise {GATHER} {OVERLAP}"),
    "blockwise": ("h100", "--fp8-format e4m3 --fp8-recipe blockwise"),
    "blockwise, FP8 parameter gather": ("h100", f"--fp8-format e4m3 --fp8-recipe blockwise {GATHER}"),
    "mxfp8": ("b200", "--fp8-format e4m3 --fp8-recipe mxfp8"),
    "mxfp8, FP8 parameter gather": (
        "b200",
        f"--fp8-format e4m3 --fp8-recipe mxfp8 {GATHER} --reuse-grad-buf-for-mxfp8-param-ag {OVERLAP}",
    ),
    "nvfp4": ("b200", "--fp4-format e2m1 --fp4-recipe nvfp4"),
    "tensorwise, experts": (
        "h100",
        "--fp8-format hybrid --fp8-recipe tensorwise --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear",
    ),
}
"""Name -> machine, and what pretrain_gpt.py is told beside SMALL."""
SIMPLE = "examples/run_simple_mcore_train_loop.py"


def losses(said: str) -> list[str]:
    """Of the iterations that a log of pretrain_gpt.py shows, in order."""
    return re.findall(rf"iteration +\d+/ +{ITERATIONS} .*?lm loss: ([0-9.E+-]+)", said)


def run(script: Path, machine: str, arguments: list[str], processes: int, options: argparse.Namespace) -> str:
    """Everything that a run said. Raises subprocess.SubprocessError if it fails or takes too long."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "mpbridge", "on-cpu", "--target", machine, "--te", options.te, str(script), *arguments]
    # the checkout's megatron.core, as its own launch scripts have it, not an installed one
    path = os.pathsep.join(filter(None, [str(ROOT), str(options.checkout), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=options.timeout,
            check=False,
        )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done.stdout


def attempt(
    name: str, script: Path, machine: str, arguments: list[str], processes: int, options: argparse.Namespace
) -> bool:
    """Prints the row of a run; whether it reached its end."""
    try:
        said = run(script, machine, arguments, processes, options)
    except subprocess.SubprocessError as error:
        output = error.output or ""
        print(f"| {name} | {machine} | {processes} | failed |", flush=True)
        print((output if isinstance(output, str) else output.decode())[-3000:] or error, file=sys.stderr)
        return False
    found = losses(said) if arguments else re.findall(r"Losses reduced: .*?([0-9]+[.][0-9]+)", said)
    ended = len(found) >= ITERATIONS
    print(
        f"| {name} | {machine} | {processes} | {f'{found[0]}, {found[-1]}' if ended else 'failed: ' + said[-300:]} |",
        flush=True,
    )
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--te", default="2.11", help="the Transformer Engine release")
    parser.add_argument("--only", default="", help="runs whose name has this text")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a run")
    options = parser.parse_args()
    checkout = options.checkout = options.checkout.resolve()
    print(
        f"Transformer Engine {options.te}\n\n| run | machine | processes | loss at the first and the last iteration |\n|---|---|---|---|",
        flush=True,
    )
    ended = [
        attempt(name, checkout / "pretrain_gpt.py", machine, [*SMALL.split(), *told.split()], processes, options)
        for processes in options.processes
        for name, (machine, told) in RUNS.items()
        if options.only in name
    ]
    if options.only in SIMPLE and 2 in options.processes:
        ended.append(attempt(Path(SIMPLE).stem, checkout / SIMPLE, "h100", [], 2, options))
    return 0 if ended and all(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
