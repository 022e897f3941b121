"""Observation: how a GEMM, a collective and a parameter update are seen while they run. One table of operators, one dispatch mode; it never changes a result."""
