"""The main module of a process spawned by a played script: `multiprocessing` runs it and finds the script's names in it."""

from mpbridge.te_cpu.children import begin

globals().update({name: value for name, value in begin().items() if not name.startswith("__")})
