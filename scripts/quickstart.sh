#!/usr/bin/env bash
# Creates .venv in this checkout, installs mpbridge (a download of torch and the rest, once), and pretrains a small GPT on real text with bf16_mixed: 200 steps of 2,048
# tokens: half a minute on two free cores that multiply BF16 numbers themselves (15,000 tokens/s), one to five minutes on two that do not (1,600 to 5,300).
# Extra arguments go to the training run: bash scripts/quickstart.sh train.train_iters=50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment
exec "$python" scripts/pretrain.py --recipe bf16_mixed --config configs/gpt_tiny.yaml logger.log_dir=runs/quickstart "$@"
