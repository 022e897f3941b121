#!/usr/bin/env bash
# Creates .venv in this checkout, installs mpbridge, and pretrains a small GPT on real text with bf16_mixed (two to three minutes on two cores, once installed).
# Extra arguments go to the training run: bash scripts/quickstart.sh train.train_iters=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment
exec "$python" scripts/pretrain.py --recipe bf16_mixed --config configs/gpt_tiny.yaml logger.log_dir=runs/quickstart "$@"
