"""Which settings must not be combined, and why: one table of rules, the size checks of quantized GEMMs, and advice on recipes. Checking is read-only and loads no framework."""
