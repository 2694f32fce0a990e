"""The TorchRec library, which is imported when something of it is needed."""

from __future__ import annotations

from typing import Any

import torch

from holdall.common.errors import ConfigError, MissingDependencyError


def load_torchrec() -> Any:
    try:
        import torchrec
    except (ImportError, OSError) as error:  # OSError: fbgemm's library was built for another torch
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torchrec":
            raise MissingDependencyError("torchrec", "torchrec", "the bridge to TorchRec") from None
        raise ConfigError(
            f"torchrec is installed but does not import ({str(error).splitlines()[0]}): its fbgemm-gpu must fit torch "
            f"{torch.__version__}, see docs/torchrec.md"
        ) from error
    return torchrec
