#!/usr/bin/env bash
# Everything that needs a CUDA device, in one command: installs, runs the GPU tests, the comparison with the emulation and the benchmark, writes a report.
#   bash scripts/gpu_check.sh [--wheels DIR] [--out DIR] [--quick]
# --wheels: install Transformer Engine, megatron-core and the rest from DIR, offline, alongside the installed torch; otherwise from PyPI into .venv.
# --out:    folder for report.md, bench.json and the test log (default runs/gpu_check). --quick: tests without the 500-step runs, benchmark with one round.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheels="" out="runs/gpu_check" quick=""
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="$2"; shift 2 ;;
    --out) out="$2"; shift 2 ;;
    --quick) quick=1; shift ;;
    *) echo "gpu_check.sh: unknown argument $1 (expected --wheels DIR, --out DIR or --quick)" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "gpu_check.sh: no CUDA device here (nvidia-smi finds none): nothing was run" >&2
  exit 1
fi
if [ -n "$wheels" ]; then
  python=python3
  site="${TMPDIR:-/tmp}/mpbridge-gpu-site"
  $python -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl || exit 2
  export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
else
  source scripts/environment.sh
  make_environment dev,te
fi
failed=0
select="slow or not slow"; [ -n "$quick" ] && select="not slow"
"$python" -m pytest tests/gpu -m "$select" -q -rs --timeout 560 -p no:cacheprovider 2>&1 | tee "$out/tests.log" || failed=1
"$python" scripts/evidence/gpu_agreement.py --out "$out/agreement.json" 2>&1 | tee "$out/agreement.log" || failed=1
rounds=2; [ -n "$quick" ] && rounds=1
"$python" scripts/evidence/bench_gpu.py --rounds "$rounds" --profile --out "$out/bench.json" 2>&1 | tee "$out/bench.log" || failed=1
"$python" scripts/evidence/gpu_report.py "$out" >"$out/report.md" || failed=1
cat "$out/report.md"
exit $failed
