"""Steps of models that see images, for compiled code: their towers go on in torch, and all that reads tokens does not.

An image's features come in the place of embeddings, its tokens are turned by angles of their own places (M-RoPE,
Qwen2-VL, arXiv 2409.12191), and where they see each other in both directions (Gemma 3) attention is told from where to
where.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from core.batch.forward_batch import ForwardBatch
from core.models.native.parts import StepImages
from core.models.native.reading import NotDense, half_of
from core.models.vision.families import TOWERS
from core.models.vision.tower import VisionTower, vision_spec


def text_body(model: PreTrainedModel) -> Any:
    """What of `model` has the layers that read tokens, or is the base model that does."""
    # The prefix of Llama 4's text model names a module that it has not.
    base: Any = model.model if model.base_model is model else model.base_model
    return next((getattr(base, name) for name in ("language_model", "text_model") if hasattr(base, name)), base)


class ImageSteps:
    """Made from a module tree that was proved, of which `keep_tower` leaves what sees. Used on the forward thread."""

    def __init__(self, model: PreTrainedModel, tower: VisionTower) -> None:
        self._model, self._tower = model, tower
        self._rotary = text_body(model).rotary_emb
        spec = vision_spec(model.config)
        assert spec is not None, "it has a tower"
        if spec.places and self._angles(torch.zeros(3, 1, dtype=torch.int64))[0].dim() != 2:
            raise NotDense("its rotary embedding leaves angles of three axes to its layers")

    def keep_tower(self) -> None:
        """Let go of the matrices that compiled code has packed. Nothing may compute with the tree afterwards."""
        text = text_body(self._model)
        text.layers = nn.ModuleList()
        for name, part in self._model.base_model.named_children():
            if name not in TOWERS and part is not text:  # It hears: no request brings sound.
                setattr(self._model.base_model, name, None)
        head: Any = self._model.get_output_embeddings()
        # One that came in four bits has no matrix.
        if getattr(head, "weight", None) is not self._model.get_input_embeddings().weight:
            self._model.set_output_embeddings(nn.Identity())

    def of(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, StepImages | None]:
        """int64[T] each, ids and positions of `batch`, and what it has of images: None in almost every step."""
        vision, ids = batch.vision, self._tower.ids(batch)
        if vision is None:
            return ids, batch.positions, None
        places, angles = self._tower.positions(batch), None
        if vision.places is not None:
            angles = self._angles(places)
        both = [(each.place, each.end) for each in self._tower.both_ways(batch)]
        positions = places if places.dim() == 1 else places[0].contiguous()
        embeddings = self._tower.embeddings(batch)
        return ids, positions, StepImages(embeddings, angles, both, self._tower.in_windows, self._tower.deep)

    @torch.inference_mode()
    def _angles(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[T, R / 2], cosines and sines of `places`, int64[3, T]."""
        made = self._rotary(torch.zeros(1, 1, 1), places[:, None])
        cos, sin = (half_of(table[0]).contiguous() for table in made)
        return cos, sin
