"""The named places do nothing unless a test says so, each is where it is said to be, and nothing else can say so."""

from __future__ import annotations

import ast

import pytest

from core import buggify
from tests.tidy.source import python


class Ear:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def point(self, name: str) -> None:
        self.heard.append(name)

    async def pause(self, name: str) -> None:
        self.heard.append(name)


async def test_a_place_speaks_to_the_hook_while_there_is_one() -> None:
    ear = Ear()
    buggify.point("planned")
    await buggify.pause("closed")
    with pytest.raises(KeyError), buggify.hooked(ear):
        buggify.point("planned")
        await buggify.pause("closed")
        raise KeyError
    buggify.point("planned")
    assert ear.heard == ["planned", "closed"]


def test_without_a_hook_a_pause_does_not_give_up_its_turn() -> None:
    waiting = buggify.pause("closed")
    with pytest.raises(StopIteration):
        waiting.send(None)


def test_every_place_is_in_production_once_and_nothing_there_hooks() -> None:
    named: list[tuple[str, str]] = []
    for source in [*python("core"), *python("service")]:
        if source.path == "core/buggify.py":
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "buggify":
                assert node.attr in ("point", "pause"), f"{source.path}:{node.lineno} reaches for {node.attr}"
            if isinstance(node, ast.ImportFrom):
                assert node.module != "core.buggify", f"{source.path}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found = node.func
                if isinstance(found.value, ast.Name) and found.value.id == "buggify":
                    (name,) = node.args
                    assert isinstance(name, ast.Constant)
                    named.append((found.attr, str(name.value)))
    places = [("point", name) for name in buggify.POINTS] + [("pause", name) for name in buggify.PAUSES]
    assert sorted(named) == sorted(places)
