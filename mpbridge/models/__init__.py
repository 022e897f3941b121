"""The GPT of a run and the modules that a CPU needs in it."""
