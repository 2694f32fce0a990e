"""Launches that come again on the same memory: captured as a CUDA graph, and replayed as one.

Launching a dozen small kernels takes the host longer than it takes a GPU to run them, and each launch is a chance for
another thread to take the interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from holdall.runtime.cuda_graph import captured, replay

MOST_KEYS = 256
"""Keys that are remembered. What lies at ever new addresses is launched as usual, and graphs of what is gone are
forgotten."""


class GraphCache:
    """Runs launches as they are while it is `off`, and as graphs otherwise.

    The first time that a key comes its launches run as usual, which compiles their kernels; then they are captured.
    Threads take turns. What takes memory for a while is run on one stream only: all graphs have that memory in common.
    """

    def __init__(self, device: torch.device):
        self.device, self.off = device, True
        self._stream: torch.cuda.Stream | None = None
        """Of captures: the default one cannot be captured, and memory is of one stream."""
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        """By key; None where launches came once."""
        self._turns = threading.Lock()

    def run(self, key: Hashable | None, launch: Callable[[], None]) -> None:
        """`key` holds all addresses, sizes and numbers that `launch` depends on; None if they will not come again."""
        if self.off or key is None:
            launch()
            return
        with self._turns:
            if key not in self._graphs:
                if len(self._graphs) == MOST_KEYS:
                    torch.cuda.synchronize(self.device)
                    self.forget()
                self._graphs[key] = None
                launch()
                return
            graph = self._graphs[key]
            if graph is None:
                graph = self._graphs[key] = self._captured(launch)
            replay(graph)

    def forget(self) -> None:
        """Capture everything again; nothing may be under way on the device, since graphs take their memory along."""
        self._graphs.clear()

    @property
    def num_graphs(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def _captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        other = next((graph for graph in self._graphs.values() if graph is not None), None)
        return captured(launch, stream=self._stream, beside=other)


def where(*tensors: Tensor | None) -> Hashable:
    """What of tensors belongs to a key."""
    return tuple(None if tensor is None else (tensor.data_ptr(), *tensor.shape) for tensor in tensors)
