"""CUDA graphs, worker threads, packed batches, stage timers."""
