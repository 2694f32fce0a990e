"""Settings that name and shape a model, shared by the commands that build one.

Imports neither torch nor the models until one is configured: `--help` needs the settings alone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from holdall.common.errors import ConfigError, did_you_mean
from holdall.common.settings import check_types, name_and_value, overlay, plain_value

if TYPE_CHECKING:
    from holdall.models import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Model: a named configuration, and changes to its sizes."""

    model: str = "dlrm"
    """Model: dlrm, dcn, deepfm, din, ncf, tbsm, two-tower, or a named configuration such as rmc2, gmf, syn-m1.
    Or a model of your own as package.module:Config, which is imported; the current folder is searched, too."""
    dim: int | None = None
    """Numbers in a table row; the model's own when absent."""
    bottom: tuple[int, ...] | None = None
    """Widths of the hidden layers of the bottom MLP; the model's own when absent."""
    top: tuple[int, ...] | None = None
    """Widths of the hidden layers of the top MLP; the model's own when absent."""
    interaction: Literal["dot", "concat"] | None = None
    """Interaction of the feature vectors; the model's own when absent."""
    model_setting: tuple[str, ...] = ()
    """Further settings of the model, such as factors=16 (ncf), rank=64 (dcn) or event=15,15 (tbsm)."""
    model_scale: float = 1.0
    """Factor on the widths of the hidden layers of the named configuration."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):  # a config, or its class, from a call
            name, settings = _as_settings(self.model)
            object.__setattr__(self, "model", name)
            object.__setattr__(self, "model_setting", (*settings, *self.model_setting))
        elif ":" in self.model:
            from holdall.models.own import own_config

            object.__setattr__(self, "model", own_config(self.model).family)
        check_types(self)
        if any(getattr(self, field.name) != field.default for field in fields(self)):
            self.model_config()

    def model_config(self) -> ModelConfig:
        """The named configuration, scaled, with the given sizes in place of its own."""
        from holdall.models import configuration

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
        """The settings that were given, as JSON has them."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in given.items() if v not in (None, ())}


def _as_settings(model: ModelConfig | type[ModelConfig]) -> tuple[str, tuple[str, ...]]:
    """Name and `model_setting` of a config or of its class."""
    from holdall.models import ModelConfig
    from holdall.models.own import changed_settings, register_model

    if not isinstance(model, ModelConfig):
        return register_model(model).family, ()
    name, settings = register_model(type(model)).family, changed_settings(model)
    with suppress(ConfigError):
        if ModelSettings(model=name, model_setting=settings).model_config() == model:
            return name, settings
    raise ConfigError(
        f"{model} cannot be kept in run.json: its fields may be numbers, texts without commas, bools and tuples"
    )
