"""CUDA graphs of small groups of kernel launches that repeat on the same memory, kept by their addresses.

Launching a dozen small kernels takes the host longer than it takes a GPU to run them, and each launch is a chance for
another thread to take the interpreter lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from holdall.runtime.cuda_graph import capture, replay

MAX_KEYS = 256
"""Keys in the cache. When it is full it is cleared, so launches at ever new addresses do not fill the memory."""


class LaunchGraphs:
    """Graphs of launches by key; while it is `off`, launches run directly.

    The launches of a key run directly the first time, which compiles their kernels, and are captured the second time.
    Thread-safe. All graphs share one memory pool: launches that allocate must all run on one stream.
    """

    def __init__(self, device: torch.device):
        self.device, self.off = device, True
        self._stream: torch.cuda.Stream | None = None
        """Stream of captures: the default one cannot be captured, and the memory pool belongs to one stream."""
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        """Graph of each key; None after its first run."""
        self._lock = threading.Lock()

    def run(self, key: Hashable | None, launch: Callable[[], None]) -> None:
        """Run `launch`; `key` has all addresses, sizes and numbers it depends on, or is None if it will not repeat."""
        if self.off or key is None:
            launch()
            return
        with self._lock:
            if key not in self._graphs:
                if len(self._graphs) == MAX_KEYS:
                    torch.cuda.synchronize(self.device)
                    self.clear()
                self._graphs[key] = None
                launch()
                return
            graph = self._graphs[key]
            if graph is None:
                graph = self._graphs[key] = self._capture(launch)
            replay(graph)

    def clear(self) -> None:
        """Drop all graphs and their memory; the device must be idle."""
        self._graphs.clear()

    @property
    def num_graphs(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def _capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        other = next((graph for graph in self._graphs.values() if graph is not None), None)
        return capture(launch, stream=self._stream, pool_of=other)


def address_key(*tensors: Tensor | None) -> Hashable:
    """Part of a key: addresses and shapes of tensors."""
    return tuple(None if tensor is None else (tensor.data_ptr(), *tensor.shape) for tensor in tensors)
