"""Flockstep's promises in figures: `python -m benchmarks` (Linux only)."""
