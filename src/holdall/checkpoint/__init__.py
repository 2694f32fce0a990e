"""Checkpoints that are whole or absent: `FOLDER/step-00001000/{shard-00000.safetensors, ..., manifest.json}`.

A checkpoint is written under another name: shards, fsync, a manifest with their sizes and SHA-256 hashes, fsync, then
one rename. Killed at any moment, the last complete checkpoint is still there and `latest` finds it. Nothing in it can
execute code. docs/formats.md describes the files.

Tensors larger than a shard are cut along their first dimension, so that neither saving nor loading allocates a second
copy: at most one shard is copied at a time (tensors on a GPU or not contiguous), none otherwise. A shard is read back
and hashed while the next one is written; loading with `verify` reads and hashes everything once before it copies.
`benchmarks/checkpoint.py` measures the cost.

Several processes write their parts at the same time. A checkpoint of any number of processes loads at any other number.
"""

from holdall.checkpoint.background import BackgroundSaver
from holdall.checkpoint.folder import latest, newest
from holdall.checkpoint.hot_checkpoint import latest_hot, load_hot_into, save_hot
from holdall.checkpoint.loading import latest_sound, load, load_into, load_newest, read
from holdall.checkpoint.manifest import DTYPES, FORMAT, MANIFEST, VERSION, Checkpoint
from holdall.checkpoint.partial_tensors import HotPart
from holdall.checkpoint.protocols import TensorByRows
from holdall.checkpoint.saving import save

__all__ = [
    "DTYPES",
    "FORMAT",
    "MANIFEST",
    "VERSION",
    "BackgroundSaver",
    "Checkpoint",
    "HotPart",
    "TensorByRows",
    "latest",
    "latest_hot",
    "latest_sound",
    "load",
    "load_hot_into",
    "load_into",
    "load_newest",
    "newest",
    "read",
    "save",
    "save_hot",
]
