"""What `transformers` says of prompts with images: greedy outputs of `generate`, one prompt at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Idefics3Processor
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from tests.support.checkpoints import VOCAB_SIZE
from tests.support.vision_checkpoints import picture

MARGIN = 1e-3
"""Top-1 minus top-2 logit below which the oracle itself is undecided."""


TILED = ("idefics3", "smolvlm")


@dataclass(frozen=True)
class Seen:
    """A prompt as ids, with a run of tokens for each image, and the images."""

    ids: tuple[int, ...]
    images: tuple[bytes, ...]


class ImageOracle:
    """`transformers` on one checkpoint."""

    def __init__(self, directory: Path) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model: Any = AutoModelForImageTextToText.from_pretrained(directory, **options).eval()
        self.model.generation_config.eos_token_id = None
        self.images = AutoImageProcessor.from_pretrained(directory)
        self.kind = self.model.config.model_type
        self.token: int = self.model.config.image_token_id
        eye = self.model.config.vision_config
        self.side = eye.patch_size * getattr(self.model.config, "spatial_merge_size", 1)
        self.side = self.side if eye.model_type == "pixtral" else 0
        """Pixels of a token's side, where the processor does not know them."""

    def processed(self, images: tuple[bytes, ...]) -> Any:
        """What the processor of the checkpoint makes of them."""
        read = [Image.open(BytesIO(each)).convert("RGB") for each in images]
        more: dict[str, Any] = {"crop_to_patches": True} if self.kind == "internvl" else {}
        if self.side:
            more = {"patch_size": {"height": self.side, "width": self.side}}
        return self.images(read, return_tensors="pt", **more)

    def run(self, image: bytes) -> list[int]:
        """The ids that stand for `image`."""
        config = self.model.config
        if self.kind == "gemma3":
            return [config.boi_token_index, *[self.token] * config.mm_tokens_per_image, config.eoi_token_index]
        if self.kind == "gemma4":
            count = int(self.processed((image,))["num_soft_tokens_per_image"][0])
            return [config.boi_token_id, *[self.token] * count, config.eoi_token_id]
        if "image_sizes" in (given := self.processed((image,))):
            height, width = (int(side) // self.side for side in given["image_sizes"][0])
            return [*([*[self.token] * width, self.token + 1] * height)[:-1], self.token + 2]
        if self.kind == "llava":
            return [self.token] * 16
        if self.kind in TILED:
            return self._tiled(image)
        if self.kind == "internvl":
            return [self.token - 2, *[self.token] * 4 * len(self.processed((image,))["pixel_values"]), self.token - 1]
        count = int(self.processed((image,))["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2
        if self.kind.startswith("glm"):
            return [config.image_start_token_id, *[self.token] * count, config.image_end_token_id]
        return [config.vision_start_token_id, *[self.token] * count, config.vision_end_token_id]

    def _tiled(self, image: bytes) -> list[int]:
        tokenizer = AutoTokenizer.from_pretrained(self.model.config._name_or_path)
        processor = Idefics3Processor(self.images, tokenizer, image_seq_len=4)
        read = Image.open(BytesIO(image)).convert("RGB")
        ids: list[int] = processor(images=read, text="<image>", add_special_tokens=False)["input_ids"][0]
        return ids

    def prompt(self, rng: random.Random, *parts: int | bytes) -> Seen:
        """Random ids, as many as each number says, and images between them."""
        ids: list[int] = []
        for part in parts:
            ids += [rng.randrange(3, VOCAB_SIZE) for _ in range(part)] if isinstance(part, int) else self.run(part)
        return Seen(tuple(ids), tuple(part for part in parts if isinstance(part, bytes)))

    @torch.no_grad()
    def plain(self, seen: Seen, tokens: int) -> tuple[int, ...]:
        """As `greedy`, of a prompt whose image tokens belong to no image: step by step, through the plain model."""
        ids = list(seen.ids)
        for _ in range(tokens):
            best = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
            if float(best.values[0] - best.values[1]) <= MARGIN:
                break
            ids.append(int(best.indices[0]))
        return tuple(ids[len(seen.ids) :])

    @torch.no_grad()
    def greedy(self, seen: Seen, tokens: int) -> tuple[int, ...]:
        """The output, up to the first token that was chosen by no more than MARGIN."""
        ids = torch.tensor([seen.ids])
        given: dict[str, Any] = dict(self.processed(seen.images)) if seen.images else {}
        for told in ("num_crops", "num_soft_tokens_per_image", "num_patches"):
            given.pop(told, None)
        kinds = (ids == self.token).to(torch.int64)
        if self.kind not in ("internvl", "llava", "mistral3", *TILED):
            given["token_type_ids" if self.kind == "gemma3" else "mm_token_type_ids"] = kinds
        answer = self.model.generate(
            ids,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **given,
        )
        best = torch.cat(answer.logits).topk(2).values
        decided = int((best[:, 0] - best[:, 1] > MARGIN).cumprod(0).sum())
        return tuple(answer.sequences[0, len(seen.ids) :][:decided].tolist())


def prompts(oracle: ImageOracle, seed: int) -> list[Seen]:
    """Texts, one image and several, of several sizes; some begin as others do, or have the same image elsewhere."""
    rng = random.Random(seed)
    a, b, wide = picture(1), picture(2, 120, 90, "JPEG"), picture(3, 160, 40)
    first = oracle.prompt(rng, 3, a, 5)
    return [
        oracle.prompt(rng, 7),
        first,
        Seen((*first.ids, *oracle.prompt(rng, 6).ids), first.images),
        oracle.prompt(rng, 14, b, 2),
        oracle.prompt(rng, 1, wide, 1),
        oracle.prompt(rng, 3, a, 2, b, 9, wide, 4),
        Seen((*first.ids, *(more := oracle.prompt(rng, 2, b, 3)).ids), (*first.images, *more.images)),
        oracle.prompt(rng, 40),
        oracle.prompt(rng, 30, a, 20),
        oracle.prompt(rng, b, 1) if oracle.kind != "gemma3" else oracle.prompt(rng, 1, b, 1),
    ]
