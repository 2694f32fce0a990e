"""One script a claim. `python -m benchmarks` runs them all; each writes a run card into `benchmarks/results`."""
