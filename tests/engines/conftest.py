"""Small runs for the engines' tests."""

from __future__ import annotations
