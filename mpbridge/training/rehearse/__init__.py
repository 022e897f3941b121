"""Rehearsals: the same run under several recipes with quantization statistics, and the report, page and plots of the results."""
