"""What must not be combined, and why: one table of rules, the sizes of quantized GEMMs, and advice on recipes. Checking edits nothing and loads no framework."""
