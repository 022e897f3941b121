"""The walks of docs/serving.md: gpt_tiny trained emulated, converted, compared, measured and loaded by transformers, for MXFP8, blockwise FP8 and NVFP4; prints each command and what it said.

    python scripts/evidence/serving_walk.py [--folder DIR] [--iters 20] [mxfp8 blockwise nvfp4]

Loading needs transformers 5 with accelerate and, for compressed-tensors' folders, compressed-tensors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WALKS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "mxfp8": ("bf16_with_mxfp8_mixed", (), ("compressed-tensors",)),
    # heads of 128 rows, so that 128 x 128 blocks end where queries, keys and values do
    "blockwise": (
        "bf16_with_fp8_subchannel_scaling_mixed",
        ("model.num_attention_heads=2",),
        ("fp8", "compressed-tensors"),
    ),
    "nvfp4": ("bf16_with_nvfp4_mixed", (), ("compressed-tensors",)),
}
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
method = sys.argv[2]
more = {}
if method == "compressed-tensors":
    from transformers import CompressedTensorsConfig
    more["quantization_config"] = CompressedTensorsConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, **more)
tokens = torch.arange(1, 129)[None]
with torch.no_grad():
    logits = model(tokens).logits
print(type(model).__name__, sum(p.numel() for p in model.parameters()), "parameters; loss", round(float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])), 4))
"""


def say(*words: str, place: Path) -> None:
    """Runs a command of mpbridge in `place`, and prints it with its output. Its last line of training is enough."""
    print("$ mpbridge " + " ".join(words), flush=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mpbridge", *words],
        cwd=place,
        capture_output=True,
        text=True,
    )
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    print("\n".join(lines[-2:] if words[0] == "train" else lines), flush=True)
    if done.returncode:
        sys.exit(f"exit status {done.returncode}\n{done.stderr[-3000:]}")


def walk(name: str, place: Path, iters: int) -> None:
    """One recipe from training to loading."""
    recipe, words, methods = WALKS[name]
    text = str(ROOT / "LICENSE")
    say(
        "train",
        "--recipe",
        recipe,
        "--emulate",
        "--config",
        "gpt_tiny",
        f"train.train_iters={iters}",
        f"checkpoint.save={name}",
        *words,
        place=place,
    )
    for method in methods:
        folder = f"{name}-{method}"
        say("convert", f"ckpt:{name}", f"hf:{folder}", "--quantization", method, place=place)
        say("contract", folder, "--run", name, "--engine", "vllm", place=place)
        say("mismatch", name, folder, "--tokens", text, place=place)
        print(f"# transformers: {folder}", flush=True)
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LOAD, folder, method],
            cwd=place,
            check=True,
            stderr=subprocess.DEVNULL,
        )


def main() -> None:
    """Runs the walks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WALKS), metavar="NAME")
    parser.add_argument("--folder", type=Path, help="where runs and folders are made, and kept")
    parser.add_argument("--iters", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = args.folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        for name in args.names:
            walk(name, place, args.iters)


if __name__ == "__main__":
    main()
