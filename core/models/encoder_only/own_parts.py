"""What stands for parts of encoders beside attention: methods that count tokens of a row, and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

from core.models.encoder_only.packed_encoder import ByDistance, EncoderContext

DISTANCES: Final = "slipstream_distances"
"""Buffer of an encoder whose bias depends on the distance of two tokens alone."""


class ForwardOf:
    """`forward` of a module, over packed texts."""

    def __init__(self, module: Any, context: EncoderContext, encoder: Any) -> None:
        """`encoder`: the modules of all layers."""
        self.module, self.context = module, context

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the module computes."""
        raise NotImplementedError

    def take_away(self) -> None:
        """Let the module be as it came."""
        del self.module.forward


class NormAtOnce(ForwardOf):
    """A norm in one pass instead of eight, without a scale: I-BERT's, which computes what `nn.LayerNorm` does."""

    def __call__(self, x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """[1, T, H]."""
        weight, bias = self.module.weight, self.module.bias
        return functional.layer_norm(x, weight.shape, weight, bias, float(self.module.eps)), None


class ScaleAtOnce(ForwardOf):
    """What MobileBERT has for a norm, a weight and a bias, in one pass instead of two."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, H]."""
        return torch.addcmul(self.module.bias, x, self.module.weight)


class OverLongest:
    """A method of an encoder that makes something for all pairs of tokens: for those of the longest text."""

    def __init__(self, owner: Any, name: str, context: EncoderContext) -> None:
        self.owner, self.name, self.context = owner, name, context
        self.method: Callable[..., Any] = getattr(owner, name)

    def take_away(self) -> None:
        """Let it be as it came."""
        delattr(self.owner, self.name)

    def __call__(self, given: Any, *_: Any, **__: Any) -> Any:
        """What it makes of as many tokens."""
        return self.method(given[:, : max(end - start for start, end in self.context.texts)])


class DistancesOnce(OverLongest):
    """One that makes the same bias for two tokens as often as they are that far apart: MPNet's encoder."""

    def __init__(self, owner: Any, name: str, context: EncoderContext) -> None:
        super().__init__(owner, name, context)
        most, buckets = owner.config.max_position_embeddings, owner.relative_attention_bias
        distances = torch.arange(1 - most, most, device=buckets.weight.device)
        made = buckets(owner.relative_position_bucket(distances)).T.float().contiguous()
        # A buffer, which copies of the model share as they share weights.
        owner.register_buffer(DISTANCES, made, persistent=False)

    def take_away(self) -> None:
        """See `OverLongest`."""
        super().take_away()
        delattr(self.owner, DISTANCES)

    def __call__(self, given: Any, *_: Any, **__: Any) -> ByDistance:
        """Those of a step."""
        return ByDistance(getattr(self.owner, DISTANCES))


class Unmasked(OverLongest):
    """One that makes a mask of all pairs, which is not needed."""

    def __call__(self, given: Any, *_: Any, **__: Any) -> Any:
        """Give back the mask of tokens."""
        return given


class EachApart(OverLongest):
    """One in which tokens see the ones beside them: text by text."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """[1, T, H]; every tensor among the arguments has T tokens, or those of one text."""

        def of(each: Any, start: int, end: int) -> Any:
            return each[:, start:end] if isinstance(each, torch.Tensor) else each

        return torch.cat(
            [
                self.method(
                    *(of(each, *text) for each in given), **{name: of(each, *text) for name, each in named.items()}
                )
                for text in self.context.texts
            ],
            dim=1,
        )


class PlacesInTexts(OverLongest):
    """One that looks up the places of a row's tokens: each text begins at 0."""

    def __call__(self, given: Any, *_: Any, **__: Any) -> Any:
        """[T, D]."""
        texts = self.context.texts
        found = self.method((1, max(end - start for start, end in texts)))
        return torch.cat([found[: end - start] for start, end in texts])
