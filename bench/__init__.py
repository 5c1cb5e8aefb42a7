"""Benchmarks. Each prints our figure beside a peer's, from one run on one machine, and the target for their ratio."""
