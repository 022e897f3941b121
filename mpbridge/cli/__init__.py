"""The command line. Each module here is a verb (`resume_check.py` -> `mpbridge resume-check`), except main, options, text and those whose names begin with an underscore; verbs of one
subject share a module (`main.BESIDE`).

A verb has `SUMMARY` (a line of text), `ARGUMENTS` (rows of `options.arg`) and `run(args) -> int`, and is imported only when it is called.
"""
