"""What torchtitan 0.3 asks of a way to checkpoint activations, without torchtitan.

The trainer builds the policy from its configuration, and applies it to the model:
`config.build(dump_folder=...).apply(model)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import nn


class Configurable:
    """A component whose nested `Config` builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[Any] = None

        def build(self, **given: Any) -> Any:
            assert not {field.name for field in fields(self)} & given.keys()
            return self._owner(config=replace(self), **given)

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        config: Any = cls.__dict__.get("Config")
        if config is not None:
            assert "__slots__" in config.__dict__
            assert all(field.kw_only for field in fields(config) if field.init)
            config._owner = cls


class ActivationCheckpointing(Configurable):
    """The base class of torchtitan's policies."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False

    def __init__(self, config: Config, dump_folder: str = ""):
        self.config = config
        self.dump_folder = dump_folder

    def apply(self, model: nn.Module) -> None:
        raise NotImplementedError
