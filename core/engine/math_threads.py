"""How many threads compute on a CPU."""

from __future__ import annotations

import torch

from core.config import EngineConfig
from core.machine import usable_cpus
from core.models.config import read_checkpoint_config
from core.models.loader import is_encoder


def use_threads(config: EngineConfig) -> None:
    """Have torch compute with as many threads as `config` asks for, else as are fastest for its checkpoint.

    An engine of tokens leaves a core to its event loop, which has work at every step of a few milliseconds. That of an
    encoder has none for most of a step: with all cores a step of two cores takes two thirds of the time. Raises
    ModelLoadError for a configuration that cannot be read.
    """
    asked = config.executor.cpu_threads
    if asked is None and is_encoder(read_checkpoint_config(config.model.path)):
        torch.set_num_threads(usable_cpus())
    else:
        torch.set_num_threads(config.executor.threads())
