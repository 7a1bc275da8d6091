"""Scripted runs for mutants that seeds meet too rarely. Without a mutant nothing in them is wrong."""

from __future__ import annotations

from tests.sim.reference import VOCAB
from tests.sim.scenario import Cross
from tests.sim.stage import Stage

HOT = [1, 2, 3, 4]


def the_device_is_ahead() -> None:
    """It reads a forced token before the scheduler has seen it."""
    cross = Cross(pages=8, longest=8, start_ids=(1,), forced_first=(7,), forced_last=())
    stage = Stage(rows=1, cache="none", cross=cross)
    client = stage.add([VOCAB, VOCAB + 1], 6)
    stage.step(execute=2, deliver=0)
    stage.finish()
    stage.complete(client)


def younger_ones_pass() -> None:
    """One row, and forty requests whose beginning is cached, behind one that is alone with its own."""
    stage = Stage(rows=1, pages=32, page_size=2, depth=1, policy="lpm")
    stage.add(HOT, 1)
    for _ in range(3):
        stage.step()
    old = stage.add([9, 8, 7, 6], 1)
    young = [stage.add([*HOT, number], 1) for number in range(10, 50)]
    stage.finish()
    stage.complete(old, *young)
    assert stage.hits["lpm_out_of_patience"] and old.ended_at < young[-1].ended_at


def two_tenants_wait() -> None:
    """What the one has cached is nothing to the other."""
    stage = Stage(rows=1, pages=32, page_size=2, depth=1, policy="lpm")
    stage.add(HOT, 1, salt="a")
    for _ in range(3):
        stage.step()
    first, second = stage.add([9, 8, 7, 6], 1, salt="b"), stage.add([*HOT, 5], 1, salt="b")
    stage.finish()
    stage.complete(first, second)
    assert first.ended_at < second.ended_at


def a_prefix_is_shared() -> None:
    """In a pool that never runs short, by a request that ends, and in which no row ever fails."""
    stage = Stage(rows=1, pages=32, page_size=2)
    first = stage.add([*HOT, 5], 2)
    for _ in range(6):
        stage.step()
    second = stage.add([*HOT, 6], 2)
    stage.finish()
    assert stage.hits["prefix_hit"]
    stage.complete(first, second)
