"""Tests that run inside of a played machine: `test_inside.py` starts them in processes of their own."""
