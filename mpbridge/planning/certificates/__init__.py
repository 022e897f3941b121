"""Closed forms of what rounding does to scales, updates and optimizer states."""
