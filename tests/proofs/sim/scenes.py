"""Scripted runs for mutants that seeds meet too rarely. Without a mutant nothing in them is wrong."""

from __future__ import annotations

from tests.proofs.sim.reference import VOCAB
from tests.proofs.sim.scenario import Cross, Drafts
from tests.proofs.sim.stage import Stage

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


def two_long_prompts() -> None:
    """Of two tenants, each of many steps: both get on."""
    stage = Stage(rows=2, pages=400, context=800, depth=1, weights=(1.0, 1.0))
    prompts = [stage.add([number] * 700, 2, tenant=f"t{number}") for number in range(2)]
    stage.finish()
    stage.complete(*prompts)


def every_row_is_taken() -> None:
    """By one tenant, when another comes."""
    stage = Stage(rows=4, pages=400, context=200, depth=1, weights=(1.0, 1.0))
    many = [stage.add([number], 150, tenant="t0") for number in range(4)]
    for _ in range(3):
        stage.step()
    one = stage.add([9, 8], 3, tenant="t1")
    stage.finish()
    stage.complete(*many, one)
    assert one.ended_at < many[0].ended_at


def pages_run_out() -> None:
    """Between a tenant that holds most of them and one that came last."""
    stage = Stage(rows=4, pages=24, page_size=2, cache="none", depth=1, weights=(1.0, 1.0))
    many = [stage.add([number], 24, tenant="t0") for number in range(3)]
    for _ in range(6):
        stage.step()
    one = stage.add([9, 8], 16, tenant="t1")
    stage.finish()
    stage.complete(*many, one)
    assert one.gave_way == 0 < sum(client.gave_way for client in many)


def neighbours_come_and_go() -> None:
    """Beside them nothing is guessed, and alone the one that stays has drafts: those of its newest step only."""
    stage = Stage(rows=2, real_steps=True, drafts=Drafts(most=3, right=1.0, crowd=1))
    stays = stage.add([1, 2], 60)
    guests = []
    for _ in range(4):
        for _ in range(3):
            stage.step()
        guests.append(stage.add([3, 4], 1))
    stage.finish()
    assert stage.hits["draft_accepted"]
    stage.complete(stays, *guests)
