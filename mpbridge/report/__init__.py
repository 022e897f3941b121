"""Output: tables, the progress line, metric files."""
