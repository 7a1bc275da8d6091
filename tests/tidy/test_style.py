"""Sizes, names, words, calls, docstrings: the house rules, and for each a snippet that breaks it."""

from __future__ import annotations

import statistics

import pytest

from tests.tidy import calls, clocks, docs, sizes, tenants, words
from tests.tidy.source import Source, python, report, texts

PRODUCT = python("core", "service")
ALL = [*PRODUCT, *python("docs", "helm", "tests")]


def snippet(text: str, path: str = "core/room.py") -> list[Source]:
    return [Source(path, text)]


def test_files_are_rooms() -> None:
    report(sizes.long_files(ALL))


def test_functions_fit_a_screen() -> None:
    lengths = sorted(lines for source in PRODUCT for _, lines in sizes.functions(source))
    if lengths:
        print(
            f"{len(lengths)} functions: median {statistics.median(lengths):.0f} lines, "
            f"90 % have at most {lengths[int(len(lengths) * 0.9)]}, longest {lengths[-1]}"
        )
    report(sizes.long_functions(ALL))


def test_no_file_is_a_grab_bag() -> None:
    report(sizes.grab_bags(ALL))


def test_nothing_is_mixed_in() -> None:
    report(sizes.mixins(ALL))


def test_nothing_is_left_for_later() -> None:
    report(words.unfinished(texts()))


def test_no_code_from_data_and_no_jumping_clock() -> None:
    report(calls.banned(PRODUCT))


def test_tests_that_share_the_machine_do_not_bound_elapsed_time() -> None:
    report(clocks.elapsed_bounds(python("tests")))


def test_the_rule_of_clocks_can_fail() -> None:
    body = "import time\ndef test_x(began, end):\n    "
    for bad in (
        "assert time.monotonic() - began < 5",
        "assert 5 >= time.perf_counter() - began",
        "seconds = loop.time() - began\n    assert 0 < seconds < 5",
        "seconds = loop.time() - began\n    scorecard(12, 'ms', seconds * 1e3, at_most=5)",
    ):
        assert clocks.elapsed_bounds(snippet(body + bad, "tests/room/test_x.py")), bad
        marked = body.replace("def test_x", "@pytest.mark.alone\ndef test_x") + bad
        assert not clocks.elapsed_bounds(snippet(marked, "tests/room/test_x.py")), "runs alone"
        assert clocks.elapsed_bounds(snippet(marked + "\n" + body + bad, "tests/room/test_x.py")), "the other does not"
        for marks in ("pytest.mark.alone", "[pytest.mark.alone, pytest.mark.soak]"):
            assert not clocks.elapsed_bounds(snippet(f"pytestmark = {marks}\n{body + bad}", "tests/room/test_x.py"))
    for good in (
        "assert time.monotonic() < end",
        "assert time.monotonic() - began > 0.1",
        "assert time.process_time() - began < 5",
        "seconds = loop.time() - began\n    print(seconds)",
        "seconds = loop.time() - began\n    scorecard(12, 'ms', seconds)",
    ):
        assert not clocks.elapsed_bounds(snippet(body + good, "tests/room/test_x.py")), good


def test_ids_and_salts_become_their_tenants_in_one_file() -> None:
    report(tenants.scoped_elsewhere(PRODUCT))
    report(tenants.round_the_calls(PRODUCT))


@pytest.mark.parametrize(
    "text",
    [
        "async def Generate(self, request, context):\n    await self._calls.engine.generate(asked)",
        "async def Embed(self, request, context):\n    engine = self._handle.require()\n    await engine.embed(asked)",
        "async def Abort(self, request, context):\n    self._handle.require().abort(request.id)",
        "async def Follow(self, request, context):\n    await engine.prefixes.watch('')",
    ],
)
def test_a_dialect_that_forgets_tenants_is_found(text: str) -> None:
    assert tenants.round_the_calls(snippet(text, "service/gateway/another.py"))
    assert not tenants.round_the_calls(snippet(text, "service/frontends/host.py"))
    through = text.replace("engine", "calls").replace("require()", "calls").replace("prefixes.watch", "watch_prefixes")
    assert not tenants.round_the_calls(snippet(through, "service/gateway/another.py"))


def test_scoping_elsewhere_is_found() -> None:
    text = "from service.tenant_ids import tenant_salt\nsalt = tenant_salt('', caller)"
    assert tenants.scoped_elsewhere(snippet(text, "service/gateway/another.py"))
    assert not tenants.scoped_elsewhere(snippet(text, "service/calls/open_calls.py"))


def test_public_names_are_described() -> None:
    report(docs.missing_docs(PRODUCT))


def test_public_functions_say_what_they_return() -> None:
    report(docs.missing_returns(PRODUCT))


def test_the_length_rules_can_fail() -> None:
    line = "x = 1\n"
    assert not sizes.long_files(snippet(line * 350))
    assert sizes.long_files(snippet(line * 351))
    assert not sizes.long_functions(snippet("def f():\n" + "    x = 1\n" * 59))
    assert sizes.long_functions(snippet("class A:\n    async def f():\n" + "        x = 1\n" * 60))


@pytest.mark.parametrize("name", ["utils.py", "common.py", "misc.py", "helpers.py"])
def test_the_rule_on_file_names_can_fail(name: str) -> None:
    assert sizes.grab_bags(snippet("", f"core/memory/{name}"))
    assert not sizes.grab_bags(snippet("", f"core/memory/the_{name}"))


def test_the_rule_on_mixins_can_fail() -> None:
    assert sizes.mixins(snippet("class OutputMixin: ..."))
    assert not sizes.mixins(snippet("class Mixing: ..."))


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"])
def test_the_rule_on_words_can_fail(word: str) -> None:
    assert words.unfinished(snippet(f"x = 1  # {word}: later"))
    assert words.unfinished(snippet(f"- {word}(me)", "core/README.md"))
    assert not words.unfinished(snippet(word.lower() + " " + word + "S"))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import marshal",
        "import torch\nw = torch.load(path)",
        "import torch as t\nw = t.load(path)",
        "from torch import load\nw = load(path)",
        "eval(text)",
        "exec(text)",
        "run = eval",
        "import builtins\nbuiltins.exec(text)",
        "import yaml\nyaml.load(text, Loader=L)",
        "from yaml import unsafe_load as u\nu(text)",
        "import time\nnow = time.time()",
        "import time\nclock = time.time",
        "from time import time\nnow = time()",
        "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=flag)",
    ],
)
def test_the_rule_on_calls_can_fail(text: str) -> None:
    assert calls.banned(snippet(text))


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "import yaml\nyaml.safe_load(text)",
        "import time\ntime.monotonic()",
        "from safetensors.torch import load_file\nload_file(path)",
        "asyncio.create_subprocess_exec('ls')",
        "load(path, trust_remote_code=False)",
        "request.timing.time",
    ],
)
def test_calls_that_look_alike_are_fine(text: str) -> None:
    assert not calls.banned(snippet(text))


DOCUMENTED_BASE = 'class Base:\n    """B."""\n\n    def run(self) -> None:\n        """R."""\n'


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("x = 1", ["module"]),
        ('"""M."""\ndef f() -> None:\n    pass', ["f"]),
        ('"""M."""\nasync def f() -> None:\n    pass', ["f"]),
        ('"""M."""\nclass A:\n    x = 1', ["A"]),
        ('"""M."""\nclass A:\n    """A."""\n    def g(self) -> int:\n        return 1', ["g"]),
        (
            f'"""M."""\n{DOCUMENTED_BASE}class A(Base):\n    """A."""\n    def other(self) -> None:\n        pass',
            ["other"],
        ),
        ('"""M."""\nclass A(Protocol):\n    """A."""\n    def g(self) -> int:\n        return 1', ["g"]),
        (f'"""M."""\n{DOCUMENTED_BASE}class A(Base):\n    """A."""\n    def run(self) -> None:\n        pass', []),
        ('"""M."""\nimport grpc\nclass A(grpc.Thing):\n    """A."""\n    def g(self) -> int:\n        return 1', []),
        ('"""M."""\nclass A(Protocol):\n    """A."""\n    def g(self) -> int: ...', []),
        ('"""M."""\nclass _A:\n    def g(self) -> int:\n        return 1\ndef _f(): ...', []),
        ("", []),
    ],
)
def test_the_rule_on_docstrings_can_fail(text: str, missing: list[str]) -> None:
    findings = docs.missing_docs(snippet(text))
    assert len(findings) == len(missing)
    for finding, name in zip(findings, missing, strict=True):
        assert name in finding


def test_the_rule_on_return_types_can_fail() -> None:
    assert docs.missing_returns(snippet("def f(): ..."))
    assert docs.missing_returns(snippet("class A:\n    async def f(self): ..."))
    assert not docs.missing_returns(snippet("class A:\n    def __init__(self): ...\ndef _f(): ..."))


def test_findings_name_file_and_line() -> None:
    assert calls.banned(snippet("\n\nimport pickle")) == ["core/room.py:3: pickle is banned"]
