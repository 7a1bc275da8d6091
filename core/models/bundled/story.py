"""Templated short stories: one hero, one wish, one friend, one ending.

Names and endings hold letters and emoji outside ASCII on purpose.  The tokenizer learns its merges
from ASCII text only, so each such character leaves the model as two to four byte tokens: a stream
of a story thus exercises the joining of incomplete UTF-8 sequences, which ASCII output never does.
"""

from __future__ import annotations

import random

NAMES = ("Mia", "Tom", "Zoë", "Leo", "Anna", "José", "Ben", "Lily", "Max", "Nora", "Sam", "Ivy")

ANIMALS = {
    "fox": "🦊",
    "bear": "🐻",
    "rabbit": "🐰",
    "owl": "🦉",
    "mouse": "🐭",
    "frog": "🐸",
    "cat": "🐱",
    "turtle": "🐢",
}

PLACES = ("forest", "village", "valley", "garden", "meadow", "harbor")
TRAITS = ("small", "brave", "shy", "clever", "sleepy", "cheerful")
WISHES = (
    ("kite", "fly it over the hills"),
    ("boat", "sail across the lake"),
    ("drum", "play a song for the moon"),
    ("lantern", "read at night"),
    ("cake", "share it with everyone"),
    ("map", "find the old castle"),
)
TROUBLES = (
    "the wind blew hard and the path was lost",
    "it rained all day and the river rose",
    "snow fell and the road was closed",
    "the sun went down and it became dark",
)
HELPS = (
    "held out a hand and showed the way home",
    "made a warm fire and told a joke",
    "knew a secret door behind the old tree",
    "sang so loudly that all the neighbors came to help",
)
LESSONS = (
    "a good friend is better than a good plan",
    "slow steps also reach the top",
    "it is fine to ask for help",
    "sharing makes a small thing big",
)


def story_prompt_and_text(rng: random.Random) -> tuple[str, str]:
    """A prompt that names hero and animal, and the story that keeps to them."""
    hero, friend = rng.sample(NAMES, 2)
    animal, other = rng.sample(sorted(ANIMALS), 2)
    place, trait = rng.choice(PLACES), rng.choice(TRAITS)
    wish, purpose = rng.choice(WISHES)
    sentences = [
        f"Once upon a time, a {trait} {animal} named {hero} lived in a {place}.",
        f"{hero} wanted a {wish} more than anything, to {purpose}.",
        f"One morning {hero} left the {place} to look for the {wish}.",
        f"But {rng.choice(TROUBLES)}, and {hero} did not know what to do.",
        f"Then {hero} met {friend} the {other}.",
        f"{friend} {rng.choice(HELPS)}.",
        f'"Thank you, {friend}!" said {hero} the {animal}.',
        f"Together they found the {wish}, and {hero} learned that {rng.choice(LESSONS)}.",
        f"The end. {ANIMALS[animal]}",
    ]
    return f"A story about {hero} the {animal}:", " " + " ".join(sentences)
