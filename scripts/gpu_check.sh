#!/usr/bin/env bash
# Everything that needs a CUDA device, as steps in the order of their worth. Each has a time limit, a failing one does not end the others, and the report is
# written again after each. The first three take ten minutes.
#   bash scripts/gpu_check.sh [--wheels DIR] [--out DIR] [--only STEP ...] [--dry-run]
# --wheels:  install Transformer Engine, megatron-core and the rest from DIR, offline, alongside the installed torch; otherwise from PyPI into .venv.
# --out:     folder for report.md and each step's log (default runs/gpu_check).
# --only:    kernels, audits, speed, tests, agreement, profile.
# --dry-run: on a CPU that plays an H100, with toy sizes: whether every step works, not what a GPU gives.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheels="" out="runs/gpu_check" only="" dry=""
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="$2"; shift 2 ;;
    --out) out="$2"; shift 2 ;;
    --only) shift; while [ $# -gt 0 ] && [[ "$1" != --* ]]; do only="$only $1"; shift; done ;;
    --dry-run) dry=1; shift ;;
    *) echo "gpu_check.sh: unknown argument $1 (expected --wheels DIR, --out DIR, --only STEP ... or --dry-run)" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
if [ -z "$dry" ] && { ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; }; then
  echo "gpu_check.sh: no CUDA device here (nvidia-smi finds none): nothing was run (--dry-run plays one)" >&2
  exit 1
fi
if [ -n "$wheels" ]; then
  python=python3
  site="${TMPDIR:-/tmp}/mpbridge-gpu-site"
  $python -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl || exit 2
  export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
else
  source scripts/environment.sh
  if [ -z "$dry" ]; then make_environment dev,te; else make_environment dev; make_te_folders; fi
fi
failed=0
: >>"$out/steps.tsv"
step() {
  # a name, its limit in seconds, a command: its log is written as it runs
  local name=$1 limit=$2 began=$SECONDS rc
  shift 2
  [ -z "$dry" ] || limit=$((4 * limit)) # two busy cores are no GPU
  if [ -n "$only" ] && [[ " $only " != *" $name "* ]]; then return; fi
  echo "== $name (at most $limit s)"
  timeout -k 20 "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  [ $rc -eq 0 ] || failed=1
  printf '%s\t%s\t%s\t%s\n' "$name" "$rc" "$((SECONDS - began))" "$limit" >>"$out/steps.tsv"
  tail -n 5 "$out/$name.log"
  "$python" scripts/evidence/gpu_report.py "$out" >"$out/report.md"
}
script() { "$python" "$@"; }
tests() { "$python" -m pytest tests/gpu -v --tb short -rs --timeout 560 -p no:cacheprovider "$@"; }
emulate="" shapes="1.2b" more="1.2b 8b" sizes="train.train_iters=8"
if [ -n "$dry" ]; then
  export MPBRIDGE_TE_PATH="${MPBRIDGE_TE_PATH:-.te/2.11}"
  script() { "$python" -m mpbridge on-cpu --target h100 "$@"; }
  tests() { "$python" -m pytest -p mpbridge.te_cpu.pytest_plugin --played h100 tests/gpu -v --tb short -rs --timeout 560 -p no:cacheprovider "$@"; }
  emulate="--emulate te" shapes="smoke" more="smoke"
  sizes="train.train_iters=3 model.num_layers=6 model.hidden_size=128 model.ffn_hidden_size=256 model.num_attention_heads=2 data.seq_length=64 train.global_batch_size=2"
fi
kernels() {
  # Transformer Engine's kernels, and the same calls of its Python over the kernels that play them on a CPU
  script scripts/evidence/gpu_kernels.py --write "$out/real.pt" &&
    CUDA_VISIBLE_DEVICES="" "$python" -m mpbridge on-cpu --target h100 scripts/evidence/gpu_kernels.py --write "$out/played.pt" &&
    "$python" scripts/evidence/gpu_kernels.py --compare "$out/real.pt" "$out/played.pt"
}
audits() {
  local recipe bad=0 scale
  for recipe in bf16_mixed fp16_mixed bf16_with_fp8_delayed_scaling_mixed bf16_with_fp8_current_scaling_mixed \
    bf16_with_fp8_subchannel_scaling_mixed nanov2_bf16_with_fp8_current_scaling_mixed; do
    rm -rf "$out/runs/$recipe"
    # FP16's first steps overflow under its usual scale, and an audit of moments needs an update
    scale=""; [ $recipe = fp16_mixed ] && scale="mixed_precision.initial_loss_scale=4096"
    "$python" scripts/pretrain.py --recipe "$recipe" --config gpt_tiny $emulate model.num_layers=6 $sizes $scale ddp.use_distributed_optimizer=true \
      "logger.log_dir=$out/runs/$recipe" logger.progress=false || bad=1
    "$python" -m mpbridge audit "$out/runs/$recipe" || bad=1
  done
  return $bad
}
export -f script tests kernels audits
export python out emulate sizes
step kernels 180 bash -c kernels
step audits 240 bash -c audits
step speed 180 bash -c "script scripts/evidence/bench_gpu.py --shapes $shapes --rounds 1 --out $out/speed.json"
step tests 590 bash -c "tests -m 'gpu and not slow or not gpu'"
step agreement 400 bash -c "script scripts/evidence/gpu_agreement.py --out $out/agreement.json${dry:+ --layers 4 --steps 1 --hidden 128 --sequence 32}"
step profile 590 bash -c "script scripts/evidence/bench_gpu.py --shapes $more --profile --out $out/profile.json"
cat "$out/report.md"
exit $failed
