"""The torchrun entry point: `torchrun --nproc-per-node 2 scripts/pretrain.py --recipe bf16_mixed key=value ...`, or plain python for one process.

The same as `mpbridge train`, with the same options and exit codes: 0 done, 1 negative result, 2 misuse, 3 stopped before the end (torchrun itself then exits with 1).
"""

from __future__ import annotations

import sys
from pathlib import Path

# so that it also runs in a checkout without installation
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpbridge.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
