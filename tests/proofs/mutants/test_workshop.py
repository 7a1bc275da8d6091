"""A mutant is killed by an assertion of its named test, and by nothing else that makes a test fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proofs.mutants import workshop as workshops
from tests.proofs.mutants.mutant import Mutant, Verdict
from tests.proofs.mutants.workshop import Workshop

PRODUCT = """
class InvariantViolation(AssertionError):
    pass

def double(number):
    return number * 2

def checked(number):
    assert number
    return number
"""
TESTS = """
import asyncio, sys, time
import pytest
from core import product

@pytest.fixture
def four():
    assert product.double(2) == 4
    return 4

def test_asserts():
    assert (
        product.double(2)
        == 4
    ), "of two"

def test_expects_an_error():
    with pytest.raises(TypeError):
        product.double(None)

def test_fails_by_a_call():
    if product.double(2) != 4:
        pytest.fail("not four")

async def test_asserts_in_a_task():
    async def look():
        assert product.double(2) == 4
    async with asyncio.TaskGroup() as group:
        group.create_task(look())

def test_of_a_fixture(four):
    assert four == 4

def test_of_a_checked_number():
    assert product.checked(product.double(2) - 3) == 1

def test_that_crashes():
    assert product.double("2").upper() == "22"

async def test_that_waits():
    if product.double(2) != 4:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

def test_that_sleeps():
    while product.double(2) != 4:
        time.sleep(0.01)

def test_that_never_ends():
    while product.double(2) != 4:
        try:
            time.sleep(0.01)
        except BaseException:
            pass

def test_that_dies():
    if product.double(2) != 4:
        import os
        os._exit(1)

@pytest.mark.skipif(True, reason="no device")
def test_that_is_skipped():
    assert product.double(2) == 4

@pytest.mark.parametrize("number", [0, 3])
def test_many(number):
    assert product.double(number) == number + number

def test_that_notices_nothing():
    assert product.double(0) == 0
"""
CONFIGURATION = """
[tool.pytest.ini_options]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
pythonpath = ["."]
filterwarnings = ["error"]
"""
ADDS = ("number * 2", "number + 3")
FILE = "tests/test_product.py"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    source = tmp_path_factory.mktemp("source")
    for name in ("core", "service", "docs", "protos", "tests", "tests/proofs", "tests/proofs/mutants"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    (source / "pyproject.toml").write_text(CONFIGURATION)
    (source / "core" / "product.py").write_text(PRODUCT)
    (source / FILE).write_text(TESTS)
    shutil.copy(Path(workshops.__file__).with_name("witness.py"), source / "tests" / "proofs" / "mutants")
    made = Workshop(tmp_path_factory.mktemp("workshop"), source, warm=("hypothesis",))
    yield made
    made.close()


def broken(test: str, line: tuple[str, str] = ADDS, **declared: str) -> Mutant:
    return Mutant("m", "doubling", "core/product.py", *line, f"{FILE}::{test}", **declared)


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ("test_asserts", 'assert ( product.double(2) == 4 ), "of two" # assert 5 == 4'),
        ("test_fails_by_a_call", 'pytest.fail("not four") # Failed: not four'),
        ("test_asserts_in_a_task", "assert product.double(2) == 4 # assert 5 == 4"),
        ("test_many", "assert product.double(number) == number + number # assert 3 == (0 + 0)"),
    ],
)
def test_an_assertion_of_the_test_kills_and_is_named(workshop: Workshop, test: str, text: str) -> None:
    trial = workshop.try_one(broken(test))
    assert trial.verdict is Verdict.KILLED and trial.text.startswith(text)
    assert trial.test.removesuffix("[0]") == f"{FILE}::{test}"
    path, line = trial.where.split(":")
    assert path == FILE and TESTS.splitlines()[int(line) - 1].strip() in text.replace("( ", "(")


def test_an_error_that_does_not_come_kills(workshop: Workshop) -> None:
    trial = workshop.try_one(broken("test_expects_an_error", ("number * 2", "str(number) * 2")))
    assert trial.verdict is Verdict.KILLED
    assert trial.text == "with pytest.raises(TypeError): # Failed: DID NOT RAISE TypeError"


@pytest.mark.parametrize(
    ("test", "line", "text"),
    [
        ("test_of_a_fixture", ADDS, "setup: "),
        ("test_of_a_checked_number", ("number * 2", "number + 1"), "AssertionError"),
        ("test_that_crashes", ("number * 2", "len(number)"), "AttributeError: 'int' object has no attribute 'upper'"),
        ("test_asserts", ("def double", "def treble"), "AttributeError: "),
        ("test_asserts", ("def double", "import nothing_that_exists\ndef double"), "collect: ModuleNotFoundError: "),
        ("test_that_dies", ADDS, "exit status 1: "),
        ("test_that_is_skipped", ADDS, "0 passed"),
        ("test_that_is_not_there", ADDS, "0 passed, exit status 4"),
        ("test_asserts", ("number * 5", "number"), "m: 'number * 5' occurs 0 times in core/product.py"),
    ],
)
def test_any_other_failure_proves_nothing(workshop: Workshop, test: str, line: tuple[str, str], text: str) -> None:
    trial = workshop.try_one(broken(test, line))
    assert (trial.verdict, trial.text[: len(text)]) == (Verdict.BROKEN, text)


@pytest.mark.parametrize("test", ["test_that_waits", "test_that_sleeps", "test_that_never_ends"])
def test_a_hang_is_a_death_only_where_the_mutant_says_so(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, test: str
) -> None:
    monkeypatch.setattr(workshops, "TEST_SECONDS", 1)
    if test == "test_that_never_ends":
        monkeypatch.setattr(workshops, "RUN_SECONDS", 5)
    assert workshop.try_one(broken(test)).verdict is Verdict.HANGS
    assert broken(test, dies_by="timeout").verdict("timeout") is Verdict.KILLED


def test_an_assertion_of_the_product_is_a_death_only_where_the_mutant_says_so(workshop: Workshop) -> None:
    line = ("return number * 2", "raise InvariantViolation('page_conservation')")
    trial = workshop.try_one(broken("test_asserts", line))
    assert (trial.verdict, trial.how) == (Verdict.BROKEN, "invariant")
    assert workshop.try_one(broken("test_asserts", line, dies_by="invariant")).verdict is Verdict.KILLED


def test_a_test_that_notices_nothing_lets_it_survive(workshop: Workshop) -> None:
    assert (
        workshop.try_one(broken("test_that_notices_nothing", ("number * 2", "number * 3"))).verdict is Verdict.SURVIVED
    )


def test_mutants_of_one_length_in_one_second_are_told_apart(workshop: Workshop) -> None:
    """Compiled files are found again by the second and the length of their source."""
    for _ in range(2):
        assert "assert 6 == 4" in workshop.try_one(broken("test_asserts", ("number * 2", "number * 3"))).text
        assert "assert 8 == 4" in workshop.try_one(broken("test_asserts", ("number * 2", "number * 4"))).text
        assert workshop.passes(f"{FILE}::test_asserts")
