"""Ranks of several tunings, one after the other, whatever their verdicts. Arguments: JSON lists of the command's arguments, one list a tuning."""

from __future__ import annotations

import json
import sys

import torch

from mpbridge.cli.main import main

if __name__ == "__main__":
    for arguments in sys.argv[1:]:
        with torch._dynamo.config.patch(disable=True):
            code = main(["tune", *json.loads(arguments)])
        if code not in (0, 1):
            sys.exit(code)
