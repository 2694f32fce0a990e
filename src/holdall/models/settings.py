"""The settings that name a model and shape it, shared by every command that is told about one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.settings import name_and_value, overlay, plain_value
from holdall.models import ModelConfig, configuration


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A named configuration, and what is different from it."""

    model: str = "dlrm"
    """Model to train: dlrm, dcn, ncf, tbsm, or a named configuration such as rmc2, dlrm-small, gmf, syn-m1."""
    dim: int | None = None
    """Numbers in a table's row; the model's own when absent."""
    bottom: tuple[int, ...] | None = None
    """Hidden layers of the bottom MLP; the model's own when absent."""
    top: tuple[int, ...] | None = None
    """Hidden layers of the top MLP; the model's own when absent."""
    interaction: Literal["dot", "concat"] | None = None
    """How vectors meet; the model's own when absent."""
    model_setting: tuple[str, ...] = ()
    """Further settings of the model, such as factors=16 (ncf), rank=64 (dcn) or event=15,15 (tbsm)."""
    model_scale: float = 1.0
    """Factor by which the hidden layers of the named configuration are made wider or narrower."""

    def model_config(self) -> ModelConfig:
        """The named configuration, scaled, with the sizes that were given in its place."""
        named = configuration(self.model).scaled(self.model_scale)
        known = {field.name for field in fields(named)}  # type: ignore[arg-type]
        given = {name: getattr(self, name) for name in ("dim", "bottom", "top", "interaction")}
        given = {name: value for name, value in given.items() if value is not None}
        for pair in self.model_setting:
            name, value = name_and_value(pair, "--model-setting")
            several = "," in value or isinstance(getattr(named, name, None), tuple)
            given[name] = tuple(plain_value(v) for v in value.split(",") if v) if several else plain_value(value)
        for name in given:
            if name not in known:
                raise ConfigError(f"{named.family} has no '{name}'{did_you_mean(name, known)}")
        return overlay(named, given, f"model {self.model}")

    def model_settings(self) -> dict[str, Any]:
        """What was said about the model, as JSON has it; what was not is left out."""
        given = {field.name: getattr(self, field.name) for field in fields(ModelSettings)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in given.items() if v not in (None, ())}
