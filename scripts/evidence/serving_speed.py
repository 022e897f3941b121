"""What `convert --quantization` costs on a core: CPU seconds by stage for each format, beside this machine's rates of SHA-256, of torch's cast to FP8 and of copying.

    python scripts/evidence/serving_speed.py [--layers 12] [--hidden 2048] [--folder DIR] [METHOD:RECIPE ...]

Makes a Llama with random BF16 weights (12 layers of 2048 features: 0.8 G parameters, a checkpoint of 1.7 GB), and converts it in a process for each format with one thread. Rates are
bytes of codes per second of CPU time: of all of it, and with every stage at the rate of the fastest quarter of its calls, which is what another program on the machine disturbs least. The
peak is that of resident memory (Linux), above what there was when the first tensor was read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = (
    "mxfp8:bf16_with_mxfp8_mixed",
    "fp8:bf16_with_fp8_subchannel_scaling_mixed",
    "compressed-tensors:bf16_with_fp8_current_scaling_mixed",
    "compressed-tensors:bf16_with_nvfp4_mixed",
)
VOCABULARY = 32000


def checkpoint(root: Path, layers: int, hidden: int) -> Path:
    """A checkpoint of a Llama with random weights; its folder is written layer by layer and removed."""
    import torch
    from safetensors.torch import save_file

    from mpbridge.settings.container import ConfigContainer
    from mpbridge.training.serving.convert import to_checkpoint

    heads, wide = hidden // 128, 4 * hidden
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "head_dim": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    keys = 128 * config["num_key_value_heads"]
    sizes = {
        "input_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "post_attention_layernorm": (hidden,), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    source, random = root / "bf16", torch.Generator().manual_seed(1)
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config))
    noise = (torch.randn(wide * hidden, generator=random) * 0.02).bfloat16()
    ends = (torch.randn(VOCABULARY, hidden, generator=random) * 0.02).bfloat16()
    held = {
        "model.embed_tokens.weight": ends,
        "lm_head.weight": ends.clone(),
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    places = {}
    for layer in range(layers):
        for name, size in sizes.items():
            turn = int(torch.randint(0, hidden, (1,), generator=random))
            held[f"model.layers.{layer}.{name}.weight"] = noise.roll(turn)[: math.prod(size)].view(size).clone()
        file = f"model-{layer + 1:05d}.safetensors"
        save_file(held, source / file)
        places |= dict.fromkeys(held, file)
        held = {}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    made = to_checkpoint(source, root / "run", ConfigContainer.load(f"hf:{source}").resolved(training=False)).path
    for file in source.glob("*.safetensors"):
        file.unlink()
    return made


def rates() -> dict[str, float]:
    """This machine, in ns per element or byte on one core: the best of five, of pieces that fit the cache and (copy) of ones that do not."""
    import torch

    torch.set_num_threads(1)
    x, room = torch.randn(1 << 18), torch.empty(1 << 18, dtype=torch.float8_e4m3fn)
    data, large = torch.zeros(1 << 20, dtype=torch.uint8), torch.ones(1 << 28, dtype=torch.uint8)
    other = torch.zeros_like(large)
    return {
        "cast FP32 to E4M3, an element": _best(lambda: room.copy_(x), 50) / x.numel(),
        "SHA-256, a byte": _best(lambda: hashlib.sha256(data.numpy()).digest(), 20) / data.numel(),
        "copy in memory, a byte": _best(lambda: other.copy_(large), 1) / large.numel(),
    }


def _best(work: Callable[[], Any], times: int) -> float:
    """CPU nanoseconds."""
    found = []
    for _ in range(5):
        began = time.process_time_ns()
        for _ in range(times):
            work()
        found.append((time.process_time_ns() - began) / times)
    return min(found)


def measure(path: Path, target: Path, method: str, recipe: str) -> dict[str, Any]:
    """One conversion: CPU seconds in all and by stage, bytes of codes, peak memory."""
    warnings.simplefilter("ignore")
    import torch

    from mpbridge.training.checkpoint import store
    from mpbridge.training.checkpoint.reader import Contents
    from mpbridge.training.serving import cast, files
    from mpbridge.training.serving.convert import to_folder

    torch.set_num_threads(1)
    calls: dict[str, list[tuple[float, int]]] = {}
    start: list[int] = []

    def timed(place: Any, name: str, label: str, size: Callable[[Any, Any], int]) -> None:
        own = getattr(place, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if label == "read" and label not in calls:
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
                start.append(_peak())
            began = time.process_time()
            made = own(*args, **kwargs)
            spent = time.process_time() - began
            calls.setdefault(label, []).append((spent, size(args, made)))
            return made

        setattr(place, name, call)

    timed(store, "check", "checksums of the checkpoint", lambda args, made: 1)
    timed(Contents, "tensor", "read", lambda args, made: made.numel())
    timed(cast, "stored", "quantize", lambda args, made: made.codes.numel())
    timed(files, "facts_of", "SHA-256", lambda args, made: args[0].nbytes)
    timed(files, "_write", "write", lambda args, made: len(args[1]))
    began = time.process_time()
    to_folder(path, target, method=method, recipe=recipe)
    total = time.process_time() - began
    written = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    stages = {label: sum(spent for spent, _ in made) for label, made in calls.items()}
    quiet = {label: _quiet(made) for label, made in calls.items()}
    codes = sum(size for _, size in calls["quantize"])
    return {
        "seconds": total,
        "stages": stages,
        "quiet": quiet,
        "codes": codes,
        "peak": _peak() - start[0],
        "written": written,
    }


def _peak() -> int:
    """Bytes of the largest resident memory of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _quiet(calls: list[tuple[float, int]]) -> float:
    """Seconds of all calls at the rate of their fastest quarter, of those that are large."""
    rates = sorted(spent / size for spent, size in calls if size >= max(size for _, size in calls) // 8)
    return rates[len(rates) // 4] * sum(size for _, size in calls)


def main() -> None:
    """Prints the rates, and a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="METHOD:RECIPE")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made, and kept")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        path, target, method, recipe = args.one
        print(json.dumps(measure(Path(path), Path(target), method, recipe)))
        return
    with tempfile.TemporaryDirectory() as place:
        root = args.folder or Path(place) / "model"
        done = root / "run" / "step_00000000"
        path = done if done.is_dir() else checkpoint(root, args.layers, args.hidden)
        print(f"largest parameter: {max(8 * args.hidden, VOCABULARY) * args.hidden * 2 / 1e6:.0f} MB")
        print("\n".join(f"{name}: {nanoseconds:.3f} ns" for name, nanoseconds in rates().items()), flush=True)
        for number, case in enumerate(args.cases):
            target = Path(place) / f"{number}"
            command = [sys.executable, "-W", "ignore", __file__, "--one", str(path), str(target), *case.split(":")]
            found = json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            )
            codes, stages, quiet = found["codes"] / 1e9, found["stages"], found["quiet"]
            checked = "checksums of the checkpoint"
            own, least = found["seconds"] - stages[checked], sum(quiet.values()) - quiet[checked]
            print(
                f"{case}: {codes:.2f} GB of codes, {found['written'] / 1e9:.2f} GB written in {found['seconds']:.2f} s"
            )
            print(
                "  " + ", ".join(f"{name} {spent:.2f} s (quiet: {quiet[name]:.2f})" for name, spent in stages.items())
            )
            print(
                f"  {codes / own:.2f} GB/s of codes (quiet: {codes / least:.2f}) without the checkpoint's own checksums; quantized alone {codes / quiet['quantize']:.2f}"
            )
            print(f"  peak {found['peak'] / 1e6:.0f} MB", flush=True)
            for file in target.glob("*"):
                file.unlink()


if __name__ == "__main__":
    main()
