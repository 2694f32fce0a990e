"""Pinned (page-locked) host memory, which a GPU can read and write.

Pinning takes a second for every few gigabytes, and allocates all pages, whether or not rows were ever written.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

from holdall.common.errors import TierError
from holdall.common.sizes import readable_bytes

MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


def pin(tensor: Tensor, owner: object) -> None:
    """Pin the memory of a host tensor for as long as `owner` lives."""
    address, num_bytes = tensor.data_ptr(), tensor.nbytes
    if num_bytes == 0 or tensor.is_pinned():
        return
    _use_large_pages(address, num_bytes)
    # Allocate the pages with all threads: the driver would do it with one.
    flat = tensor.view(-1).view(torch.uint8)
    flat[:: mmap.PAGESIZE].bitwise_or_(0)
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if error:
        raise TierError(
            f"{readable_bytes(num_bytes)} of host memory could not be pinned for the GPU (CUDA error {error}): use "
            f"--fetch-by copy, or raise the limit on locked memory"
        )
    weakref.finalize(owner, _unpin, address)


def _unpin(address: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)


def _use_large_pages(address: int, num_bytes: int) -> None:
    """Ask for pages of 2 MB: fewer to allocate, to pin and to look up. A system that has none ignores it."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(MADV_HUGEPAGE))
