"""Models of one's own, given on the command line (`--model package.module:Config`) or in a call.

Files name such a model by module and class. They never import it: reading them raises an `OwnModelError` unless the
model was given in this process.
"""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

from holdall.common.errors import ConfigError, OwnModelError, did_you_mean
from holdall.models.model import ModelConfig

_GIVEN: dict[str, type[ModelConfig]] = {}
"""Config classes that were given in this process, by name."""


def register_model(model: str | type[ModelConfig]) -> type[ModelConfig]:
    """Import and check the config class of a model of one's own; runs and bundles that name it can then be read.

    `model` is the class, or its place as `package.module:Config`, which is imported. Training with the class in
    `TrainConfig.of(model=Config)` registers it as well.
    """
    if isinstance(model, str):
        kind = _checked(_imported(model), model)
        _GIVEN[model] = kind
    else:
        kind = _checked(model, getattr(model, "__qualname__", repr(model)))
    if not is_built_in(kind):
        _GIVEN[kind.family] = kind
    return kind


def own_config(name: str) -> type[ModelConfig]:
    """The config class of that name, `package.module:Config`; an `OwnModelError` if it was not given."""
    if name not in _GIVEN:
        raise OwnModelError(name)
    return _GIVEN[name]


def is_built_in(kind: type[ModelConfig]) -> bool:
    """Whether a config is of Holdall."""
    return kind.__module__.partition(".")[0] == "holdall"


def changed_settings(config: ModelConfig) -> tuple[str, ...]:
    """The fields of a config that are not the defaults of its class, as `--model-setting` takes them."""
    default = type(config)()
    names = [field.name for field in fields(config)]  # type: ignore[arg-type]
    return tuple(
        f"{name}={_text(getattr(config, name))}" for name in names if getattr(config, name) != getattr(default, name)
    )


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _imported(place: str) -> Any:
    """The attribute at `package.module:Config`."""
    name, _, attribute = place.partition(":")
    if not all(part.isidentifier() for part in (*name.split("."), *attribute.split("."))):
        raise ConfigError(f"--model {place}: a model of your own is named as package.module:Config")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"--model {place}: module '{name}' needs '{error.name}', which is not installed"
            ) from error
        raise ConfigError(
            f"--model {place}: there is no module '{error.name}': run the command in its folder, or install it"
        ) from None
    except Exception as error:
        raise ConfigError(f"--model {place}: module '{name}' cannot be imported ({_described(error)})") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [other for other in vars(found) if not other.startswith("_")]
            raise ConfigError(f"--model {place}: '{name}' has no '{part}'{did_you_mean(part, known)}")
        found = getattr(found, part)
    return found


def _described(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _checked(kind: Any, place: str) -> type[ModelConfig]:
    """`kind`, if it is the config class of a model; `place` names it in errors."""
    if isinstance(kind, ModelConfig):
        raise ConfigError(f"{place} is an instance: name its class, {type(kind).__name__}, and give --model-setting")
    if not (isinstance(kind, type) and issubclass(kind, ModelConfig)):
        raise ConfigError(f"{place} is not the config of a model: it must be a class derived from holdall.ModelConfig")
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"{place} lacks {' and '.join(missing)}: a config has a field such as dim: int = 16, and with_tables"
        )
    if "__dataclass_fields__" not in vars(kind):
        raise ConfigError(f"{place} is not a dataclass: put @dataclass(frozen=True, kw_only=True) above it")
    if not is_built_in(kind) and kind.family != kind.own_name():
        raise ConfigError(f"{place} has a family, {kind.family!r}, which only models of Holdall have: leave it out")
    try:
        kind()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{place}() fails ({_described(error)}): give every field a default that works") from error
    return kind
