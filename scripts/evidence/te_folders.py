"""Transformer Engine's wheels that scripts/test.sh puts into .te: imported by the scripts here that play it, so that they find them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs in a checkout without installation

from mpbridge.common.transformer_engine import VARIABLE

FOLDERS = tuple(sorted(str(folder) for folder in ROOT.glob(".te/*") if folder.is_dir()))

os.environ[VARIABLE] = os.pathsep.join([part for part in (os.environ.get(VARIABLE, ""), *FOLDERS) if part])
