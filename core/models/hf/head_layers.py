"""Which weights of a checkpoint are heads for multi-token prediction: layers behind those of the model itself.

`transformers` has lists of them, which name the first head of published models and no other.
"""

from __future__ import annotations

from typing import Any, Final

MTP_TYPES: Final = ("deepseek_v3", "glm4_moe")
"""Model types whose heads are proved here."""


def head_layers(config: Any) -> tuple[str, ...]:
    """What names of weights of each head begin with, for a model of `config`, its text's; none for other types."""
    if config.model_type not in MTP_TYPES:
        return ()
    first = config.num_hidden_layers
    return tuple(f"model.layers.{layer}." for layer in range(first, first + config.num_mtp_layers))
