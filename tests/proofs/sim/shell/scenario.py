"""Everything that one seed decides before the first callback: sizes, doors, limits, which faults happen and how often.

As in the scheduler's simulation, each seed switches on its own few faults, so that loud ones do not end every request
before a quiet one meets it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from core.config import SchedulerConfig
from tests.proofs.sim.scenario import Adapters
from tests.proofs.sim.scenario import Scenario as Sizes
from tests.proofs.sim.shell.pipe import PipeScenario

RATES: dict[str, tuple[float, float]] = {
    # Per request, low and high end.
    "cancel": (0.1, 0.6),
    "abort": (0.1, 0.5),
    "deadline": (0.1, 0.6),
    "queue_timeout": (0.1, 0.5),
    "duplicate": (0.1, 0.5),
    "slow_reader": (0.1, 0.5),
    "dead_reader": (0.05, 0.3),
    "group": (0.1, 0.6),
    "stop_string": (0.2, 0.8),
    "options": (0.2, 0.8),
    "bad_request": (0.05, 0.2),
    "embed": (0.1, 0.6),
    "resumable": (0.3, 1.0),
    "leaves": (0.2, 0.8),
    "takeover": (0.1, 0.5),
    # Per moment of trouble.
    "nan_row": (0.1, 0.5),
    "front_end_loss": (0.1, 0.6),
    "unload": (0.1, 0.4),
    "buggify": (0.05, 0.4),
}
SHARE_ON = 0.45
OFTENER = {"resumable": 0.7, "buggify": 0.8, "cancel": 0.6}

ENDINGS = ("calm", "calm", "calm", "drain", "drain", "stop", "step_fails", "hang")
"""How the engine's life ends: when everybody has left, or earlier."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The limits of one tenant, as its file has them."""

    rate: float | None
    at_once: int | None


@dataclass(frozen=True, slots=True)
class ShellScenario:
    """What a seed means. Times are virtual seconds."""

    seed: int
    sizes: Sizes
    clients: int
    span: float
    """Over which clients arrive."""
    front_ends: int
    local_share: float
    """Of clients that ask the engine's own process."""
    pipe: PipeScenario
    tenants: dict[str, Tenant]
    max_concurrent: int | None
    admission_wait: float
    resume_seconds: float
    resume_bytes: int
    resume_tenant_bytes: int
    max_pending: int
    turnstile: int
    ending: str
    ends_at: float
    grace: float
    troubles: int
    """Moments at which something may happen to the engine or to a front end."""
    faults: dict[str, float] = field(default_factory=dict)


def draw(seed: int) -> ShellScenario:
    """The scenario of `seed`: the same on every machine and in every process."""
    rng = random.Random(seed * 2 + 1)
    span = rng.choice((0.05, 0.3, 1.0, 3.0))
    kernel = rng.choice((64, 400, 4000, 60_000))
    front_ends = rng.choice((0, 1, 1, 2, 3))
    return ShellScenario(
        seed=seed,
        sizes=_sizes(rng),
        clients=rng.choice((4, 8, 12, 20, 30)),
        span=span,
        front_ends=front_ends,
        local_share=rng.choice((0.0, 0.3, 0.6)) if front_ends else 1.0,
        pipe=PipeScenario(
            kernel=kernel,
            high=rng.choice((0, 100, 1000, 100_000)),
            piece=rng.choice((16, 100, 70_000)),
            delay=rng.choice((0.001, 0.003, 0.02)) if kernel > 400 else 0.001,
        ),
        tenants=_tenants(rng),
        max_concurrent=rng.choice((None, None, 2, 6)),
        admission_wait=rng.choice((0.05, 0.5, 2.0)),
        resume_seconds=rng.choice((0.0, 0.05, 0.5, 5.0)),
        resume_bytes=rng.choice((8192, 20_000, 48_000, 1 << 20)),
        resume_tenant_bytes=rng.choice((8192, 20_000, 1 << 20)),
        max_pending=rng.choice((3, 8, 50, 1000)),
        turnstile=rng.choice((1, 2, 16)),
        ending=rng.choice(ENDINGS),
        ends_at=span * rng.choice((0.3, 0.8, 1.2)) + rng.choice((0.0, 0.05, 0.3)),
        grace=rng.choice((0.0, 0.01, 0.2, 5.0)),
        troubles=rng.choice((2, 5, 10)),
        faults=_faults(rng),
    )


def _sizes(rng: random.Random) -> Sizes:
    page_size = rng.choice((1, 2, 4))
    slots = rng.choice((16, 32, 64, 128))
    return Sizes(
        seed=0,
        rows=rng.choice((1, 2, 4, 8)),
        pages=slots // page_size,
        page_size=page_size,
        context=rng.choice((24, 48, 64)),
        cache=rng.choice(("radix", "radix", "none")),
        depth=rng.choice((1, 2, 2)),
        config=SchedulerConfig(
            chunked_prefill_size=rng.choice((2, 8, 64)),
            mixed_chunk=rng.random() < 0.7,
            policy=rng.choice(("fcfs", "lpm", "priority")),
            max_queued_requests=rng.choice((1, 4, 16, 64)),
            default_queue_timeout=rng.choice((None, None, None, 0.5)),
        ),
        symbols=4,
        arrivals=0.0,
        long_outputs=False,
        # Seconds that a step takes at most.
        speed=rng.choice((0.001, 0.005, 0.02, 0.05)),
        retract_every=0,
        real_steps=False,
        adapters=Adapters(100, 0.0, 0.0) if rng.random() < 0.4 else None,
    )


def _tenants(rng: random.Random) -> dict[str, Tenant]:
    if rng.random() < 0.5:
        return {}
    return {
        name: Tenant(rng.choice((None, None, 5.0, 50.0)), rng.choice((None, 1, 2, 5)))
        for name in ("alice", "bob", "*")
        if rng.random() < 0.7
    }


def _faults(rng: random.Random) -> dict[str, float]:
    chosen: dict[str, float] = {}
    for name, (low, high) in RATES.items():
        if rng.random() < OFTENER.get(name, SHARE_ON):
            chosen[name] = low + (high - low) * rng.random()
    return chosen
