"""The main module of a process that a played script has spawned: `multiprocessing` runs it, and finds the names of the script in it."""

from mpbridge.te_cpu.children import begin

globals().update({name: value for name, value in begin().items() if not name.startswith("__")})
