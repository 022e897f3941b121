"""Precision configs, their meaning, and the registry of recipes. Framework-independent."""
