"""What has to be tried again: mutants that changed, whose file or test changed, and some that did not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.proofs.mutants import proved
from tests.proofs.mutants.catalogue import MUTANTS
from tests.proofs.mutants.mutant import Mutant
from tests.proofs.mutants.proved import LEDGER, Ledger, due, ledger_of
from tests.support.repository import ROOT


def mutant(name: str, after: str = "b") -> Mutant:
    return Mutant(name, "a law", "product.py", "a", after, "test_product.py::test[one]")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "product.py").write_text("a")
    (tmp_path / "test_product.py").write_text("def test(): ...")
    return tmp_path


def test_a_kill_holds_until_mutant_product_or_test_change(root: Path) -> None:
    ledger = Ledger(root=root)
    assert not ledger.holds(mutant("first"))
    ledger.record(mutant("first"), killed=True, tree=root)
    again = Ledger(ledger.text([mutant("first")]), root)
    assert again.holds(mutant("first")) and not again.holds(mutant("second"))
    assert not again.holds(mutant("first", after="c"))
    for name in ("product.py", "test_product.py"):
        before = (root / name).read_text()
        (root / name).write_text(before + "\nb = 1")
        assert not again.holds(mutant("first"))
        (root / name).write_text(before)
    assert again.holds(mutant("first"))


def test_a_move_is_no_change_and_another_name_is_one(root: Path) -> None:
    """Files move, and what they import moves: what was killed is what it was. What an import binds is part of it."""
    (root / "product.py").write_text("from old.room import law\nfrom old.room import other\n\n\na = law(other)\n")
    ledger = Ledger(root=root)
    ledger.record(mutant("first"), killed=True, tree=root)
    moved = Mutant("first", "a law", "room/moved.py", "a", "b", "room/test_moved.py::test[one]")
    (root / "room").mkdir()
    (root / "room/test_moved.py").write_text("def test(): ...")
    new = "from another.house import (\n    other,\n)\nfrom new.room import law\n\na = law(other)\n"
    (root / "room/moved.py").write_text(new)
    assert ledger.holds(moved)
    assert not ledger.holds(replace(moved, test="room/test_moved.py::test[two]"))
    for other in (
        new.replace("law\n", "law as law\n", 1),
        new.replace("law", "lax"),
        new.replace("law(", "lax("),
        new.replace("law\n", "other_law as law\n", 1),
    ):
        (root / "room/moved.py").write_text(other)
        assert ledger.holds(moved) == ("import law as law" in other)


def test_prose_is_no_change(root: Path) -> None:
    code = (
        'class A:\n    """One."""\n    x: int = 1\n    """Two."""\n\n    def f(self):\n        return "three"  # four\n'
    )
    (root / "product.py").write_text(code)
    ledger = Ledger(root=root)
    ledger.record(mutant("first"), killed=True, tree=root)
    for told in ("One", "Two", "four"):
        (root / "product.py").write_text(code.replace(told, "other words"))
        assert ledger.holds(mutant("first")), told
    for seen, other in (("three", "five"), ("= 1", "= 2"), ("def f", "def g")):
        (root / "product.py").write_text(code.replace(seen, other))
        assert not ledger.holds(mutant("first")), seen


def test_a_survivor_is_taken_out(root: Path) -> None:
    ledger = Ledger(root=root)
    ledger.record(mutant("first"), killed=True, tree=root)
    ledger.record(mutant("first"), killed=False, tree=root)
    assert not ledger.holds(mutant("first")) and ledger.text([mutant("first")]) == ""


def test_what_was_edited_during_the_run_was_not_tried(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    tree = tmp_path_factory.mktemp("copy")
    for name in ("product.py", "test_product.py"):
        (tree / name).write_text((root / name).read_text())
    (root / "product.py").write_text("edited")
    ledger = Ledger(root=root)
    ledger.record(mutant("first"), killed=True, tree=tree)
    assert not ledger.holds(mutant("first"))


def test_ledgers_of_two_branches_are_one_ledger(root: Path) -> None:
    """Git keeps the lines of both, in whatever order; the next run leaves one of each and none of what is gone."""
    ledger = Ledger(root=root)
    for each in (mutant("first"), mutant("second"), mutant("gone")):
        ledger.record(each, killed=True, tree=root)
    text = ledger.text([mutant("gone"), mutant("second"), mutant("first")])
    assert text.splitlines() == sorted(text.splitlines())
    merged = Ledger(f"first 0123456789abcdef\n{text}second 0123456789abcdef\n", root)
    assert merged.holds(mutant("first")) and merged.holds(mutant("second"))
    assert merged.text([mutant("first"), mutant("second")]) == ledger.text([mutant("first"), mutant("second")])


def test_the_changed_come_first_and_the_seed_draws_the_rest(root: Path) -> None:
    all_of_them = [mutant(f"m{number}") for number in range(40)]
    now, before = Ledger(root=root), Ledger(root=root)
    for each in all_of_them[2:]:
        now.record(each, killed=True, tree=root)
    for each in all_of_them[5:]:
        before.record(each, killed=True, tree=root)
    chosen = due(all_of_them, [now, before], draw=6, seed=7)
    assert set(chosen[:2]) == set(all_of_them[:2]), "no ledger has seen these die"
    assert set(chosen[2:5]) == set(all_of_them[2:5]), "these are what the last change says it has killed"
    assert len(set(chosen)) == 11 and due(all_of_them, [now, before], draw=6, seed=7) == chosen
    drawn = {each for seed in range(99) for each in due(all_of_them, [now], draw=6, seed=seed)[2:]}
    assert drawn == set(all_of_them[2:]), "each has its turn"
    assert due(all_of_them, [before, before], draw=0, seed=1) == due(all_of_them, [before], draw=0, seed=1)


def test_the_ledger_of_a_revision_and_none_without_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger_of("no-such-revision") is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "proved.txt").write_text("first 0123\n")
    for command in (("init", "-q"), ("add", "proved.txt"), ("commit", "-qm", "a")):
        subprocess.run([*git, *command], check=True, timeout=60)
    (tmp_path / "proved.txt").write_text("first 4567\n")
    monkeypatch.setattr(proved, "ROOT", tmp_path)
    monkeypatch.setattr(proved, "LEDGER", tmp_path / "proved.txt")
    found = ledger_of("HEAD")
    assert found is not None and found._digests["first"] == {"0123"}
    assert ledger_of("HEAD^") is None, "a clone of one commit"


def test_the_ledger_names_mutants_that_exist() -> None:
    names = {line.split()[0] for line in LEDGER.read_text().splitlines()}
    gone = names - {each.name for each in MUTANTS}
    assert not gone, f"`python -m tests.proofs.mutants --changed` takes these out of {LEDGER.name}: {gone}"


def test_the_help_says_what_to_do() -> None:
    command = [sys.executable, "-m", "tests.proofs.mutants", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "before you commit" in shown and "--changed" in shown and LEDGER.name in shown
