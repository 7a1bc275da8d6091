"""The vision tower of a loaded model: embeddings in the place of image tokens, and the places of all tokens."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from core.batch.forward_batch import ForwardBatch
from core.batch.vision_batch import StepImage
from core.models.vision.families import TOWERS, VISION_FAMILIES, VisionFamily
from core.types.image import ReadImage
from core.types.vision_spec import VisionSpec

logger = logging.getLogger(__name__)

ATTENTION: Final = "sdpa"
"""How the tower attends: it sees one image at a time, and has no cache."""


class VisionTower:
    """Runs on the forward thread. It looks at an image in the step that computes its tokens."""

    def __init__(self, model: PreTrainedModel, family: VisionFamily, spec: VisionSpec) -> None:
        self._model: Any = model
        self._family = family
        self._spec = spec
        self._table: Any = model.get_input_embeddings()
        self.deep: tuple[torch.Tensor, torch.Tensor] | None = None
        """What `embeddings` has found besides: tokens int64[n], and what is added to their states behind each of the
        first layers, [layers, n, hidden]."""

    def embeddings(self, batch: ForwardBatch) -> torch.Tensor | None:
        """[T, hidden]: of all tokens of `batch`; None where none of them belongs to an image."""
        self.deep = None
        if batch.vision is None or not batch.vision.images:
            return None
        ids = self.ids(batch)
        # The token may be outside of the table, which has none that is looked at.
        found: torch.Tensor = self._table(ids.masked_fill(ids == self._spec.image_token, 0))
        plain = torch.tensor([self._spec.image_token], device=ids.device)
        if self._spec.filler is None and self._spec.image_token < self._table.weight.shape[0]:
            # An image token that no image belongs to is a token like any other.
            found = torch.where((ids == plain)[:, None], self._table(plain), found)
        deep = list[torch.Tensor]()
        for each in batch.vision.images:
            features = self._features(each, found.shape[1] * (1 + self._spec.deep)).to(found.dtype)
            own = found[each.place : each.end]
            if self._spec.deep:
                features, *more = features.split(found.shape[1], dim=-1)
                deep.append(torch.stack(more))
            if each.image.own is None:
                own[:] = features
            else:  # Text between them keeps its own.
                own[torch.from_numpy(each.image.own).to(own.device)] = features
        if deep:
            places = [torch.arange(each.place, each.end, device=ids.device) for each in batch.vision.images]
            self.deep = torch.cat(places), torch.cat(deep, dim=1).contiguous()
        return found

    def deepen(self, number: int, _: nn.Module, inputs: Any, states: torch.Tensor) -> torch.Tensor | None:
        """A hook of layer `number`: its states, [1, T, hidden], with what the step's images add to them."""
        if self.deep is None:
            return None
        places, added = self.deep
        return states.index_add(1, places, added[number][None])

    def ids(self, batch: ForwardBatch) -> torch.Tensor:
        """int64[T]: ids of all tokens of `batch`, as the text side reads them."""
        ids, filler = batch.input_ids, self._spec.filler
        if filler is not None:
            for each in self._spec.filled:
                ids = ids.masked_fill(ids == each, filler)
        return ids

    def beside(self, batch: ForwardBatch) -> dict[str, torch.Tensor]:
        """What the modules of the model want to be given besides embeddings."""
        return self._family.beside(self._model, self.ids(batch))

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        """int64[T], or [3, T] where images have moved them."""
        vision = batch.vision
        if vision is None or not self._spec.places:
            return batch.positions
        found = batch.positions.expand(3, -1).clone()
        if vision.places is not None:
            found[:, : vision.places.shape[1]] = torch.from_numpy(vision.places).to(found.device)
        if vision.deltas is not None:
            found[:, -len(vision.deltas) :] += torch.from_numpy(vision.deltas).to(found.device)
        return found

    @property
    def in_windows(self) -> bool:
        """Whether images are seen in both directions in layers with windows alone."""
        return self._spec.in_windows

    def both_ways(self, batch: ForwardBatch) -> tuple[StepImage, ...]:
        """Images of `batch` whose tokens see each other in both directions."""
        return batch.vision.images if self._spec.both_ways and batch.vision is not None else ()

    @torch.inference_mode()
    def misfit(self, image: ReadImage) -> str:
        """Why tokens and features of `image` do not fit; empty if they do. Not while a step is computed.

        A step takes it for granted, whatever the files of a checkpoint say about its processor.
        """
        try:
            found = self._seen(image).shape[0]
        except Exception as error:  # whatever a tower makes of pixels that are not for it
            return str(error).partition("\n")[0] or type(error).__name__
        wanted = image.pieces
        return "" if found == wanted else f"an image has {wanted} tokens, and the vision tower makes {found} of it"

    def _seen(self, image: ReadImage) -> torch.Tensor:
        pixels = torch.from_numpy(image.pixels).to(self._model.device, self._model.dtype)
        return self._family.features(self._model, image, pixels)

    def _features(self, each: StepImage, width: int) -> torch.Tensor:
        """[n, width]: NaN for an image that the tower fails at. So its request fails, and no other of the step."""
        wanted = each.image.pieces
        try:
            found = self._seen(each.image)
            if found.shape == (wanted, width):
                return found
            logger.error("the vision tower made %s of an image of %d tokens", tuple(found.shape), wanted)
        except Exception:  # as in `misfit`; and memory that one image is too large for
            logger.exception("the vision tower failed at an image of %d tokens", wanted)
        return torch.full((wanted, width), torch.nan, device=self._model.device)


def vision_tower(model: PreTrainedModel) -> VisionTower | None:
    """The tower of `model`; None for a model that sees nothing. Its attention is set to what towers use."""
    spec = vision_spec(model.config)
    if spec is None:
        return None
    config: Any = model.config
    config.vision_config._attn_implementation = ATTENTION
    tower, base = VisionTower(model, VISION_FAMILIES[config.model_type], spec), cast(Any, model.base_model)
    for number, layer in enumerate(base.language_model.layers[: spec.deep] if spec.deep else ()):
        layer.register_forward_hook(partial(tower.deepen, number))
    return tower


def towers_of(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The parts of `model` that see."""
    return tuple(part for name, part in model.base_model.named_children() if name in TOWERS)


def vision_spec(config: Any) -> VisionSpec | None:
    """Facts about how a model of `config` sees; None if it does not."""
    family = VISION_FAMILIES.get(config.model_type)
    return None if family is None or getattr(config, "vision_config", None) is None else family.spec(config)
