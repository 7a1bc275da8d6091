"""Everything that one seed decides before the first step: sizes, settings, which faults happen and how often.

Each seed switches whole features off, at random and more or fewer of them ("swarm testing", Groce et al. 2012): with
all of them on all the time, the loud ones would end every request before the quiet ones meet.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from core.batch.result import StepResult
from core.batch.spec_plan import Aim
from core.config import SchedulerConfig
from tests.proofs.sim.reference import EOS, VOCAB

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
    "priority": (0.3, 1.0),
    "eos": (0.3, 1.0),
    "shared_prefix": (0.3, 0.8),
    "too_big": (0.01, 0.05),
    # What happens to the engine.
    "clock_jump": (0.005, 0.05),
    "nan_row": (0.005, 0.05),
    "drain": (0.003, 0.01),
    "step_failure": (0.003, 0.006),
}
PER_REQUEST = (
    *("deadline", "queue_timeout", "group", "duplicate_id", "slow_reader", "stop_string", "options", "salt"),
    *("priority", "eos", "shared_prefix", "too_big"),
)
"""Of these the rate is per request, not per step."""

SHARES_ON = (0.2, 0.4, 0.7)
"""One of these, by seed, is how likely each feature is on."""
ONLY_SOMETIMES = {"step_failure": 0.15, "drain": 0.25, "abort": 0.6, "options": 0.6, "shared_prefix": 0.75, "eos": 0.6}
"""How likely these are, whatever the share of the others."""
REAL_STEPS = 8
"""One seed of so many runs the production StepRunner, FutureMap, table and history instead of their twins."""
STEPS, LONG_STEPS = 300, 5000
LONG_SHARE = 0.1
"""Of the seeds go on for `LONG_STEPS`."""
PACED_SHARE = 0.15
"""Of the seeds have long steps."""
TINY_SHARE = 0.15
"""Of the seeds have a single page in each pool, or two."""

KINDS = (0, 0, 1, 1, 1, 1, 3, 3)
"""How many kinds of pools and slots beside the KV pool a model has; one of these by seed. Three are recurrent states,
sliding windows and adapters: an encoder goes with none of them in an engine.
"""
ALONE = ("states", "windows", "cross", "adapters")
"""What the one kind may be."""
DRAFTS_SHARE = 0.6
"""Of the seeds that can verify drafts do. The engine refuses them beside encoders."""


@dataclass(frozen=True, slots=True)
class States:
    """Slots for recurrent states, and after how many decoded tokens one is kept."""

    slots: int
    interval: int


@dataclass(frozen=True, slots=True)
class Windows:
    """How many tokens a query sees, itself included, and window pages."""

    tokens: int
    pages: int


@dataclass(frozen=True, slots=True)
class Cross:
    """Pages for its output, the longest input, what every decoder starts from, and the tokens that are forced."""

    pages: int
    longest: int
    start_ids: tuple[int, ...]
    forced_first: tuple[int, ...]
    forced_last: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adapters:
    """Bytes for all of them, and how likely one is loaded or unloaded before a step."""

    room: int
    load_rate: float
    unload_rate: float


@dataclass(frozen=True, slots=True)
class Drafts:
    """The most drafts that a step verifies for each row, and how likely each is right. A `Depth` of the scheduler."""

    most: int
    right: float
    crowd: int
    """More rows than these verify none."""
    held: int = 1
    """Of so many rows the states behind all drafts have slots."""

    def aim(self, rows: int) -> Aim:
        """See `Depth`."""
        return Aim(self.most if rows <= self.crowd else 0)

    def observe(self, result: StepResult) -> None:
        """Changes nothing: a seed decides."""


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
    steps: int = STEPS
    """With input; then everybody may finish."""
    paced: bool = False
    """Whether most steps count as long."""
    weights: tuple[float, ...] = (1.0,)
    """Of each tenant; the first sends as much as all others together."""
    faults: dict[str, float] = field(default_factory=dict)
    states: States | None = None
    windows: Windows | None = None
    cross: Cross | None = None
    adapters: Adapters | None = None
    drafts: Drafts | None = None
    """None where nothing is guessed."""
    transfers: bool = False
    """Whether readers outside the FIFO hold leases. No seed draws it: `test_transfers` adds it to what seeds draw."""
    standstills: bool = False
    """Whether steps are held, and all is given up that was computed. `test_standstills` adds it likewise."""

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

    @property
    def window_pages(self) -> int:
        """Most window pages that one row can touch in a step: a chunk, and what its first token sees of the past. With
        drafts also what the steps in flight may bring.
        """
        assert self.windows is not None, "asked of a model with windows"
        return touched(self.windows.tokens - 1 + self.doubt + self.config.prompt_tokens, self.page_size)

    @property
    def doubt(self) -> int:
        """Most tokens that it is not known of whether a row will have them."""
        return 0 if self.drafts is None else self.drafts.most * self.depth

    @property
    def draft_room(self) -> int | None:
        """Slots for states behind drafts; None where there is no such limit."""
        if self.states is None:
            return None
        return 0 if self.drafts is None else self.drafts.most * min(self.drafts.held, self.rows)

    def room(self, prompt_len: int) -> int:
        """The longest output a prompt may ask for, by the formula of entry: its last token is never stored."""
        return min(self.context - prompt_len, self.slots - prompt_len + 1)


def touched(tokens: int, page_size: int) -> int:
    """Most pages that so many tokens in a row can lie in."""
    return tokens if page_size == 1 else (tokens - 2) // page_size + 2 if tokens > 1 else tokens


def draw(seed: int) -> Scenario:
    """The scenario of `seed`: the same on every machine and in every process."""
    # Not the generator of the run itself, so that a new choice here does not shift every fault of an old seed.
    rng = random.Random(seed * 2 + 1)
    # Not of the same, so that the choices below are what they were before there were these.
    classes = random.Random(f"classes of {seed}")
    tenants = random.Random(f"tenants of {seed}")
    page_size = rng.choice((1, 1, 2, 3, 4, 8))
    slots = rng.choice((4, 8, 10, 12, 16, 20, 24, 32, 64))
    tiny = rng.random() < TINY_SHARE
    policy = rng.choice(("fcfs", "fcfs", "lpm", "priority"))
    # Which cached prefix is the longest says something where many wait.
    crowded = policy == "lpm"
    config = SchedulerConfig(
        chunked_prefill_size=rng.choice((1, 2, 3, 5, 8, 16, 64)),
        mixed_chunk=rng.random() < 0.7,
        policy=policy,
        max_queued_requests=rng.choice((4, 16, 32) if crowded else (1, 4, 16, 32)),
        priority_preemption=classes.random() < 0.8,
        priority_preemption_threshold=classes.choice((1, 1, 2)),
    )
    drawn = Scenario(
        seed=seed,
        rows=rng.choice((1, 1, 2, 3, 4, 5, 8)),
        pages=rng.choice((1, 2)) if tiny else max(1, slots // page_size),
        page_size=page_size,
        context=rng.choice((4, 16, 33, 48, 64)),
        cache=rng.choice(("radix", "radix", "none")),
        depth=rng.choice((1, 2, 2, 2)),
        config=config,
        symbols=rng.choice((1, 2, 2, 3, 4)),
        arrivals=rng.choice((0.12, 0.3, 1.0) if crowded else (0.03, 0.06, 0.12, 0.3)),
        long_outputs=rng.random() < 0.7,
        speed=rng.choice((1.0, 0.5, 0.3, 0.15)),
        retract_every=rng.choice((0, 0, 0, 3, 5, 9)),
        real_steps=seed % REAL_STEPS == 7,
        steps=LONG_STEPS if rng.random() < LONG_SHARE else STEPS,
        faults=_faults(rng),
        weights=tuple(tenants.choice((1.0, 1.0, 2.0, 3.0)) for _ in range(tenants.choice((1, 1, 1, 2, 2, 3, 4)))),
        paced=tenants.random() < PACED_SHARE,
    )
    return _with_kinds(rng, drawn, tiny)


def _with_kinds(rng: random.Random, drawn: Scenario, tiny: bool) -> Scenario:
    """Kinds that the production step does not run are drawn for the twin only."""
    count, alone = rng.choice(KINDS), rng.choice(ALONE)
    if drawn.real_steps and count:
        count, alone = 1, rng.choice(("states", "cross"))
    chosen = {0: (), 1: (alone,), 3: ("states", "windows", "adapters")}[count]
    if "cross" not in chosen:
        # First: pages for windows allow for drafts.
        drawn = _with_drafts(drawn)
    if "states" in chosen:
        drawn = replace(drawn, states=_states(rng, drawn, tiny))
    if "windows" in chosen:
        drawn = replace(drawn, windows=_windows(rng, drawn))
    if "adapters" in chosen:
        drawn = replace(drawn, adapters=_adapters(rng))
    if "cross" in chosen:
        # As the engine is built: what the decoder makes of a prefix depends on the input, so none is kept.
        drawn = replace(drawn, cross=_cross(rng, drawn, tiny), cache="none")
    return drawn


def _with_drafts(drawn: Scenario) -> Scenario:
    """Drawn apart, so that all other seeds are what they were before there were drafts. Small steps hold few drafts."""
    rng = random.Random(f"drafts of {drawn.seed}")
    if rng.random() >= DRAFTS_SHARE:
        return drawn
    budget = rng.choice((2, 5, 8, 16, 64, 64, 64))
    drafts = Drafts(
        rng.choice((1, 2, 3, 4, 5, 6)),
        rng.choice((0.4, 0.7, 0.9, 1.0)),
        rng.choice((1, 2, 64, 64, 64)),
        rng.choice((1, 2, 4)),
    )
    return replace(drawn, drafts=drafts, config=replace(drawn.config, chunked_prefill_size=budget))


def _states(rng: random.Random, drawn: Scenario, tiny: bool) -> States:
    """Often fewer slots than rows, and rarely one too many: whoever takes a slot takes it from somebody."""
    rows = drawn.rows
    slots = rng.choice((1, 2, 2, 3, max(1, rows - 1), rows, rows + 1, rows + 1, rows + 1, 2 * rows))
    return States(rng.choice((1, 2)) if tiny else slots, drawn.page_size * rng.choice((1, 1, 2, 3)))


def _windows(rng: random.Random, drawn: Scenario) -> Windows:
    """As many pages as one request may need alone, or a few more: what fits the KV pool is let in at the door."""
    windows = Windows(rng.choice((1, 2, 3, 5, 8, 16)), 0)
    least = min(drawn.pages, replace(drawn, windows=windows).window_pages)
    return replace(windows, pages=min(drawn.pages, least + rng.choice((0, 0, 1, 1, 3))))


def _cross(rng: random.Random, drawn: Scenario, tiny: bool) -> Cross:
    """From a pool of one slot up; a decoder's start must leave room for an output."""
    slots = rng.choice((1, 2, 4, 8, 16, 24, 48, 64, 96))
    start = min(rng.choice((1, 1, 2, 3)), drawn.slots, drawn.context - 1)

    def forced() -> tuple[int, ...]:
        return tuple(rng.sample((*EOS, *range(VOCAB - len(EOS))), rng.choice((1, 1, 2)))) if rng.random() < 0.3 else ()

    return Cross(
        pages=rng.choice((1, 2)) if tiny else max(1, slots // drawn.page_size),
        longest=rng.choice((1, 3, 5, 9, 20, 40, 64)),
        start_ids=tuple(rng.randrange(VOCAB) for _ in range(start)),
        forced_first=forced(),
        forced_last=rng.choice((forced(), EOS[:1])) if rng.random() < 0.5 else (),
    )


def _adapters(rng: random.Random) -> Adapters:
    return Adapters(rng.choice((1, 5, 20, 50, 50)), rng.choice((0.05, 0.1, 0.3)), rng.choice((0.01, 0.02, 0.06)))


def _faults(rng: random.Random) -> dict[str, float]:
    chosen: dict[str, float] = {}
    share = rng.choice(SHARES_ON)
    for name, (low, high) in RATES.items():
        if rng.random() < ONLY_SOMETIMES.get(name, share):
            chosen[name] = low + (high - low) * rng.random()
    return chosen
