"""The GPT model of a run, and the modules that it needs on a CPU."""
