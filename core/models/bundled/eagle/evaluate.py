"""Marks a saved head: how many tokens a step of the target brings, on stories that the head has never seen.

    python -m core.models.bundled.eagle.evaluate

The target tells stories about pairs of hero and animal that were held out, greedily and with one random number for each
place. The head drafts as a server has it draft: its first choice, or what the same random number picks from its own
distribution. A draft counts where it is the very token of the story, up to the first that is not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from core.models.bundled import bundled_model_dir
from core.models.bundled.eagle import bundled_head_dir
from core.models.bundled.eagle.head import Head, Past, features
from core.models.bundled.eagle.texts import held_out_prompts
from core.models.bundled.evaluate import load
from core.models.hf.cache_argument import cache_argument

SEED = 990_018
MOST_NEW = 160
MOSTS = (4, 6)


@dataclass(frozen=True, slots=True)
class Story:
    """What the target said: `ids` of prompt and answer; `uniforms` picked each of them at `temperature`."""

    ids: torch.Tensor
    prompt: int
    uniforms: torch.Tensor
    temperature: float


def load_bundled_head(folder: Path, model: LlamaForCausalLM) -> Head:
    """The head as it was saved, in the target's dtype."""
    head = Head(model.config)
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.to(model.dtype).eval()


def pick(logits: torch.Tensor, temperature: float, uniforms: torch.Tensor) -> torch.Tensor:
    """int64[n]: the first choices of `logits` [n, V], or where the distribution first exceeds `uniforms` [n]."""
    if temperature == 0.0:
        return logits.argmax(-1)
    shares = (logits.double() / temperature).softmax(-1).cumsum(-1)
    return torch.searchsorted(shares, (uniforms.double() * shares[:, -1])[:, None], right=True)[:, 0].clamp_max_(
        logits.shape[1] - 1
    )


@torch.inference_mode()
def tell(model: LlamaForCausalLM, prompt: Sequence[int], temperature: float, seed: int) -> Story:
    """One story, through its stop token."""
    uniforms = torch.rand(len(prompt) + MOST_NEW, generator=torch.Generator().manual_seed(seed))
    ids, feed = list(prompt), torch.tensor([prompt])
    past = {cache_argument(model.forward): DynamicCache()}
    for _ in range(MOST_NEW):
        logits = model(input_ids=feed, use_cache=True, **past).logits[0, -1:].float()
        token = int(pick(logits, temperature, uniforms[len(ids) : len(ids) + 1]))
        ids.append(token)
        feed = torch.tensor([[token]])
        if token == model.config.eos_token_id:
            break
    return Story(torch.tensor(ids), len(prompt), uniforms[: len(ids)], temperature)


@torch.inference_mode()
def right_drafts(model: LlamaForCausalLM, head: Head, story: Story, most: int) -> list[int]:
    """By place p of the story: how many of `most` drafts behind token p + 1 are its next tokens."""
    caught = list[torch.Tensor]()
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    output = model(input_ids=story.ids[None], output_hidden_states=True)
    hook.remove()
    length = len(story.ids)
    feature = head.fc(features([*output.hidden_states[:-1], caught[0]]))
    past = Past(torch.ones(length, length, dtype=torch.bool).tril()[None, None])
    tokens = torch.cat([story.ids[1:], story.ids[-1:]])
    alive, right = torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.int64)
    for behind in range(most):
        embedded = model.model.embed_tokens(tokens)[None]
        feature = head.midlayer(embedded, feature, torch.arange(length) + behind, past)
        place = torch.arange(length) + behind + 2
        inside = place.clamp_max(length - 1)
        tokens = pick(head.logits(feature)[0].float(), story.temperature, story.uniforms[inside])
        alive &= (place < length) & (tokens == story.ids[inside])
        right += alive
    return right.tolist()


def accepted_lengths(story: Story, right: Sequence[int], most: int) -> list[int]:
    """Tokens of each step, accepted drafts and one more, from the first token behind the prompt to the last."""
    found, newest = list[int](), story.prompt
    while newest < len(story.ids) - 1:
        step = min(right[newest - 1], most) + 1
        step = min(step, len(story.ids) - 1 - newest)
        found.append(step)
        newest += step
    return found


def mean_accepted_lengths(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    head: Head,
    temperature: float,
    mosts: Sequence[int],
    stories: int,
) -> list[float]:
    """For each number of drafts, over `stories` behind the held-out prompts, of different seeds behind the same one."""
    prompts, dice = held_out_prompts(), random.Random(SEED)
    lengths: list[list[int]] = [[] for _ in mosts]
    for number in range(stories):
        story = tell(model, tokenizer(prompts[number % len(prompts)])["input_ids"], temperature, dice.randrange(2**31))
        right = right_drafts(model, head, story, max(mosts))
        for most, found in zip(mosts, lengths, strict=True):
            found += accepted_lengths(story, right, most)
    return [sum(found) / len(found) for found in lengths]


def report(folder: Path) -> list[str]:
    """One line per mark."""
    model, tokenizer = load(bundled_model_dir(), torch.bfloat16)
    head, lines = load_bundled_head(folder, model), list[str]()
    for temperature, stories in ((0.0, 16), (0.8, 48)):
        means = mean_accepted_lengths(model, tokenizer, head, temperature, MOSTS, stories)
        for most, mean in zip(MOSTS, means, strict=True):
            lines.append(f"temperature {temperature}, {most} drafts: {mean:.2f} tokens a step over {stories} stories")
    return lines


def main() -> None:
    """Mark the head in the repository."""
    torch.set_num_threads(1)
    for line in report(bundled_head_dir()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
