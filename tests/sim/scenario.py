"""Everything that one seed decides before the first step: sizes, settings, which faults happen and how often.

Each seed switches on its own few faults ("swarm testing"): with all of them on all the time, the loud ones would end
every request before the quiet ones meet it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from core.config import SchedulerConfig
from core.memory.window_bounds import WindowBounds
from tests.sim.reference import EOS, VOCAB

RATES: dict[str, tuple[float, float]] = {
    # What happens to clients: probability per step while it is switched on, low and high end.
    "abort": (0.02, 0.3),
    "abort_late": (0.01, 0.1),
    "deadline": (0.05, 0.5),
    "queue_timeout": (0.05, 0.5),
    "group": (0.1, 0.6),
    "duplicate_id": (0.1, 0.5),
    "slow_reader": (0.1, 0.5),
    "stop_string": (0.1, 0.5),
    "options": (0.2, 1.0),
    "salt": (0.2, 0.7),
    # What happens to the engine.
    "clock_jump": (0.005, 0.05),
    "nan_row": (0.005, 0.05),
    "drain": (0.003, 0.01),
    "step_failure": (0.003, 0.006),
}
PER_REQUEST = ("deadline", "queue_timeout", "group", "duplicate_id", "slow_reader", "stop_string", "options", "salt")
"""Of these the rate is per request, not per step."""

SHARE_ON = 0.4
ONLY_SOMETIMES = {"step_failure": 0.15, "drain": 0.25, "abort": 0.6, "options": 0.6}
REAL_STEPS = 40
"""One seed of so many runs the production StepRunner, FutureMap, table and history instead of their twins."""


STATES_SHARE = 0.3
"""Of the seeds have a model with recurrent states."""


@dataclass(frozen=True, slots=True)
class States:
    """Slots for recurrent states, and after how many decoded tokens one is kept."""

    slots: int
    interval: int


WINDOWS_SHARE = 0.2
"""Of the seeds have a model with sliding windows, unless they run the production step."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How many tokens a query sees, itself included, and window pages."""

    tokens: int
    pages: int


CROSS_SHARE = 0.25
"""Of the seeds that have neither have an encoder, whose output all tokens of the decoder read."""


@dataclass(frozen=True, slots=True)
class Cross:
    """Pages for its output, the longest input, what every decoder starts from, and the tokens that are forced."""

    pages: int
    longest: int
    start_ids: tuple[int, ...]
    forced_first: tuple[int, ...]
    forced_last: tuple[int, ...]


ADAPTERS_SHARE = 0.25
"""Of the seeds that have neither states nor an encoder have adapters, unless they run the production step."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Bytes for all of them, and how likely one is loaded or unloaded before a step."""

    room: int
    load_rate: float
    unload_rate: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a seed means. Sizes are small on purpose: bugs of reuse and of full pools need little to show."""

    seed: int
    rows: int
    pages: int
    page_size: int
    context: int
    cache: str
    depth: int
    config: SchedulerConfig
    symbols: int
    """Prompts use so many different tokens: 1 makes every prompt a prefix of every longer one."""
    arrivals: float
    """Requests per step, on average."""
    long_outputs: bool
    speed: float
    """How likely the device finishes a step between two steps of the scheduler."""
    retract_every: int
    """Force a retraction every so many plans; 0 for never."""
    real_steps: bool
    faults: dict[str, float] = field(default_factory=dict)
    states: States | None = None
    windows: Windows | None = None
    cross: Cross | None = None
    adapters: Adapters | None = None

    @property
    def slots(self) -> int:
        """Tokens that an empty pool can hold."""
        return self.pages * self.page_size

    @property
    def pools(self) -> int:
        """How many pools the model reads that hold the decoder's tokens."""
        return 1 + (self.states is not None) + (self.windows is not None)

    @property
    def width(self) -> int:
        """Entries of a table row: whole pages."""
        return -(-self.context // self.page_size) * self.page_size

    def room(self, prompt_len: int) -> int:
        """The longest output a prompt may ask for, by the formula of entry: its last token is never stored."""
        return min(self.context - prompt_len, self.slots - prompt_len + 1)


def draw(seed: int) -> Scenario:
    """The scenario of `seed`: the same on every machine and in every process."""
    # Not the generator of the run itself, so that a new choice here does not shift every fault of an old seed.
    rng = random.Random(seed * 2 + 1)
    # Not of the same, so that the choices below are what they were before there were these.
    classes = random.Random(f"classes of {seed}")
    page_size = rng.choice((1, 1, 2, 3, 4, 8))
    slots = rng.choice((1, 4, 8, 10, 12, 16, 20, 24, 32, 64))
    pages = max(1, slots // page_size)
    config = SchedulerConfig(
        chunked_prefill_size=rng.choice((1, 2, 3, 5, 8, 16, 64)),
        mixed_chunk=rng.random() < 0.7,
        policy=rng.choice(("fcfs", "fcfs", "lpm", "priority")),
        max_queued_requests=rng.choice((1, 4, 16, 32)),
        priority_preemption=classes.random() < 0.8,
        priority_preemption_threshold=classes.choice((1, 1, 2)),
    )
    drawn = Scenario(
        seed=seed,
        rows=(rows := rng.choice((1, 1, 2, 3, 4, 5, 8))),
        pages=pages,
        page_size=page_size,
        context=rng.choice((4, 16, 33, 48, 64)),
        cache=rng.choice(("radix", "radix", "none")),
        depth=rng.choice((1, 2, 2, 2)),
        config=config,
        symbols=rng.choice((1, 2, 2, 3, 4)),
        arrivals=rng.choice((0.03, 0.06, 0.12, 0.3)),
        long_outputs=rng.random() < 0.7,
        speed=rng.choice((1.0, 0.5, 0.3, 0.15)),
        retract_every=rng.choice((0, 0, 0, 3, 5, 9)),
        real_steps=seed % REAL_STEPS == 7,
        faults=_faults(rng),
        # Last, so that everything before it is what the seed drew before there were states.
        states=_states(rng, rows, page_size),
        windows=_windows(rng, pages, page_size, config.chunked_prefill_size) if seed % REAL_STEPS != 7 else None,
    )
    if drawn.states is not None:
        return drawn
    if drawn.windows is None and rng.random() < CROSS_SHARE:
        # As the engine is built: what the decoder makes of a prefix depends on the input, so none is kept.
        return replace(drawn, cross=_cross(rng, drawn), cache="none")
    if drawn.real_steps or rng.random() >= ADAPTERS_SHARE:
        return drawn
    return replace(drawn, adapters=_adapters(rng))


def _states(rng: random.Random, rows: int, page_size: int) -> States | None:
    """Often fewer slots than rows, and rarely one too many: whoever takes a slot takes it from somebody."""
    if rng.random() >= STATES_SHARE:
        return None
    slots = rng.choice((1, 2, 2, 3, max(1, rows - 1), rows, rows + 1, rows + 1, rows + 1, 2 * rows))
    return States(slots, page_size * rng.choice((1, 1, 2, 3)))


def _windows(rng: random.Random, pages: int, page_size: int, chunk: int) -> Windows | None:
    """As many pages as one request may need alone, or a few more: what fits the KV pool is let in at the door."""
    if rng.random() >= WINDOWS_SHARE:
        return None
    tokens = rng.choice((1, 2, 3, 5, 8, 16))
    least = min(pages, WindowBounds(tokens, page_size, chunk).alone)
    return Windows(tokens, min(pages, least + rng.choice((0, 0, 0, 1, 3))))


def _cross(rng: random.Random, drawn: Scenario) -> Cross:
    """From a pool of one slot up; a decoder's start must leave room for an output."""
    slots = rng.choice((1, 2, 4, 8, 16, 24, 48, 64, 96))
    start = min(rng.choice((1, 1, 2, 3)), drawn.slots, drawn.context - 1)

    def forced() -> tuple[int, ...]:
        return tuple(rng.sample((*EOS, *range(VOCAB - len(EOS))), rng.choice((1, 1, 2)))) if rng.random() < 0.3 else ()

    return Cross(
        pages=max(1, slots // drawn.page_size),
        longest=rng.choice((1, 3, 5, 9, 20, 40, 64)),
        start_ids=tuple(rng.randrange(VOCAB) for _ in range(start)),
        forced_first=forced(),
        forced_last=rng.choice((forced(), EOS[:1])) if rng.random() < 0.5 else (),
    )


def _adapters(rng: random.Random) -> Adapters:
    return Adapters(rng.choice((1, 5, 20, 50, 50)), rng.choice((0.05, 0.1, 0.3)), rng.choice((0.01, 0.02, 0.06)))


def _faults(rng: random.Random) -> dict[str, float]:
    chosen: dict[str, float] = {}
    for name, (low, high) in RATES.items():
        if rng.random() < ONLY_SOMETIMES.get(name, SHARE_ON):
            chosen[name] = low + (high - low) * rng.random()
    return chosen
