"""Choice of a path: `auto` may choose, a named path that is unavailable is an error."""

from __future__ import annotations

import pytest
import torch

from holdall.common.errors import ConfigError
from holdall.kernels import dispatch as paths
from holdall.kernels.dispatch import kernel_path
from holdall.kernels.interaction import dot_interaction


def test_auto_takes_torch_on_a_cpu() -> None:
    assert not paths.takes_triton("x", torch.ones(1))


def test_triton_by_name_needs_triton_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "INTERPRETED", False)
    monkeypatch.setattr(paths, "HAS_TRITON", False)
    with pytest.raises(ConfigError, match=r"dot_interaction was asked to use Triton.*pip install 'holdall\[triton\]'"):
        dot_interaction(torch.ones(1, 2, 3), path="triton")
    monkeypatch.setattr(paths, "HAS_TRITON", True)
    with pytest.raises(ConfigError, match="needs a GPU: its tensors are on cpu"), kernel_path("triton"):
        dot_interaction(torch.ones(1, 2, 3))
    monkeypatch.setattr(paths, "INTERPRETED", True)
    with pytest.raises(ConfigError, match=r"do not take a torch\.float64 tensor"):
        dot_interaction(torch.ones(1, 2, 3, dtype=torch.float64), path="triton")


def test_an_unknown_path_is_refused_and_the_old_one_comes_back() -> None:
    with pytest.raises(ConfigError, match="auto, triton or torch, not 'cuda'"), kernel_path("cuda"):  # type: ignore[arg-type]
        pass
    with kernel_path("torch"):
        assert paths.plain_torch()
    assert not paths.plain_torch()
