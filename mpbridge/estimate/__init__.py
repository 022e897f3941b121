"""How long a step takes: one list of the operations that a rank issues, priced by a few fitted constants. Loads no framework."""
