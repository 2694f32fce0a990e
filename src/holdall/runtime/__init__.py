"""CUDA graphs, packed batches, batch prefetching and stage timers."""
