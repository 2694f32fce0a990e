"""Models: a config dataclass and an nn.Module each, and the named configurations of the papers."""

from __future__ import annotations

from holdall.common.errors import ConfigError, did_you_mean
from holdall.models.dcn import DCN, DCNConfig
from holdall.models.deepfm import DeepFM, DeepFMConfig
from holdall.models.din import DIN, DINConfig
from holdall.models.dlrm import DLRM, DLRMConfig
from holdall.models.model import Model, ModelConfig
from holdall.models.ncf import NCF, NCFConfig
from holdall.models.own import own_config
from holdall.models.tbsm import TBSM, TBSMConfig
from holdall.models.two_tower import TwoTower, TwoTowerConfig

CONFIGURATIONS: dict[str, ModelConfig] = {
    "dlrm": DLRMConfig(),
    "dcn": DCNConfig(),
    "deepfm": DeepFMConfig(),
    "din": DINConfig(),
    "ncf": NCFConfig(),
    "neumf": NCFConfig(),
    "gmf": NCFConfig(parts="gmf"),
    "ncf-mlp": NCFConfig(parts="mlp"),
    "tbsm": TBSMConfig(),
    "two-tower": TwoTowerConfig(),
    "rmc1": TBSMConfig(dim=16, bottom=(), event=(15, 15), top=(60,), length=20),  # Taobao
    "rmc2": DLRMConfig(dim=16, bottom=(512, 256, 64), top=(512, 256)),  # Criteo Kaggle
    "rmc3": DLRMConfig(dim=64, bottom=(512, 256), top=(512, 512, 256)),  # Criteo Terabyte
    "rmc4": DLRMConfig(dim=16, bottom=(512, 256, 64), top=(512, 256)),  # Avazu
    "dlrm-small": DLRMConfig(dim=128, bottom=(512, 256), top=(1024, 1024, 512, 256)),  # Criteo 1TB
    "dcn-mlperf": DCNConfig(  # Criteo 1TB
        dim=128, bottom=(512, 256), cross_layers=3, rank=512, top=(1024, 1024, 512, 256), structure="stacked"
    ),
    "syn-m1": DLRMConfig(dim=64, bottom=(), top=(512,)),
    "syn-m2": DLRMConfig(dim=64, bottom=(512,), top=(512, 256)),
    "syn-m3": DLRMConfig(dim=64, bottom=(1024, 512), top=(512, 1024, 256)),
    "syn-m4": DLRMConfig(dim=64, bottom=(1024, 512, 256), top=(512, 1024, 512, 256)),
}
"""Named configurations, by what `--model` takes."""


def configuration(name: str) -> ModelConfig:
    """The configuration of that name, or the default one of a model of one's own, `package.module:Config`."""
    if ":" in name:
        return own_config(name)()
    if name not in CONFIGURATIONS:
        own = "; a model of your own is named as package.module:Config"
        raise ConfigError(f"unknown model '{name}'{did_you_mean(name, CONFIGURATIONS)}{own}")
    return CONFIGURATIONS[name]


__all__ = [
    "CONFIGURATIONS",
    "DCN",
    "DIN",
    "DLRM",
    "NCF",
    "TBSM",
    "DCNConfig",
    "DINConfig",
    "DLRMConfig",
    "DeepFM",
    "DeepFMConfig",
    "Model",
    "ModelConfig",
    "NCFConfig",
    "TBSMConfig",
    "TwoTower",
    "TwoTowerConfig",
    "configuration",
]
