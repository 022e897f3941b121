"""Output: tables, the progress line, metrics files."""
