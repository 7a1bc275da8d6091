"""What the product code must not contain, beyond the house rules: processes, outgoing connections, open templates,
weak digests, and settings that listen to the world by default."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from service.config.server_config import ServerConfig
from tests.support.scorecard import Scorecard
from tests.tidy.source import Source, python, report

MODULES = {
    "subprocess": "starts processes",
    "multiprocessing": "pickles what it sends",
    "requests": "connects out",
    "httpx": "connects out",
    "aiohttp": "connects out",
    "urllib.request": "connects out",
    "http.client": "connects out",
    "huggingface_hub": "downloads",
    "ftplib": "connects out",
    "telnetlib": "connects out",
    "zmq": "pickles what it sends",
    "xmlrpc": "connects out",
    "code": "runs code from data",
    "ctypes": "reaches around the interpreter",
    "joblib": "reads pickles",
}

CALLS = {
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "compile": "makes code from data",
    "__import__": "imports by a name from data",
    "tempfile.mktemp": "can be raced",
    "socket.create_connection": "connects out",
    "hashlib.md5": "is broken",
    "hashlib.sha1": "is broken",
    "ssl._create_unverified_context": "trusts anyone",
    "torch.hub.load": "downloads and runs code",
    "jinja2.Environment": "is no sandbox",
    "jinja2.Template": "is no sandbox",
}

EVERYWHERE = ("0.0.0.0", "::", "[::]")

TOOLS = ("service/pb/generate.py", "service/bench/", "service/cli/demo.py", "core/models/bundled/evaluate.py")
"""Run by developers; a server never imports them."""

ALLOWED = {
    ("core/device/given_back.py", "ctypes"): "finds the pages of a tensor, which Linux is to take",
    ("core/engine/wakeup.py", "ctypes"): "wakes the loop without letting go of the interpreter",
    ("core/models/hf/mtp.py", "from_pretrained"): "takes the model and no such arguments; reads its directory",
    ("core/machine.py", "ctypes"): "asks the allocator of the C library to give freed memory back",
    ("core/native/compile_process.py", "subprocess"): "runs the compiler over our own source, without a shell",
    ("core/native/library.py", "subprocess"): "runs our own module, in which the compiler runs",
    ("core/text/chat_renderer.py", "subprocess"): "runs our own module, in which chat templates can be ended",
    (
        "service/cli/commands/trace.py",
        "urllib.request",
    ): "asks the metrics port that its user names; in no server",
    ("core/disagg/tcp_giver.py", "::"): "compares what an operator has given with it",
    ("core/distributed/meeting.py", "socket.create_connection"): "waits for the first machine, which an operator names",
    (
        "core/engine/ranks.py",
        "multiprocessing",
    ): "starts ranks of this machine; what they say is no pickle",
    ("core/parent.py", "ctypes"): "has the kernel end a process with its parent",
    ("service/checkpoints/download.py", "huggingface_hub"): "fetches the model that an operator names ORG/NAME",
    ("service/checkpoints/partial.py", "huggingface_hub"): "goes on with files of that model",
}
"""By file and module or call: what is on the list all the same, and why."""

LOCAL_ONLY = {"local_files_only": True, "trust_remote_code": False}


def findings(source: Source) -> Iterator[str]:
    """Everything in one file that is on a list."""
    for node in ast.walk(source.tree):
        for name in imported(node):
            banned = next((each for each in MODULES if name == each or name.startswith(each + ".")), None)
            if banned and (source.path, banned) not in ALLOWED:
                yield source.at(node, f"imports {name}, which {MODULES[banned]}")
        if isinstance(node, ast.Call):
            shown = ast.unparse(node.func)
            if shown in CALLS and (source.path, shown) not in ALLOWED:
                yield source.at(node, f"calls {shown}, which {CALLS[shown]}")
            if shown.endswith(".from_pretrained") and (source.path, "from_pretrained") not in ALLOWED:
                yield from loads_remotely(source, node)
            if any(each.arg == "allow_pickle" for each in node.keywords):
                yield source.at(node, "lets numpy read pickles")
        if isinstance(node, ast.Constant) and node.value in EVERYWHERE and (source.path, node.value) not in ALLOWED:
            yield source.at(node, f"names {node.value}: only an operator may say that")


def imported(node: ast.AST) -> list[str]:
    """Modules that a statement imports, with the names from them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def loads_remotely(source: Source, node: ast.Call) -> Iterator[str]:
    """A library call that may download, or run what it finds, unless both are ruled out by a literal."""
    given = {each.arg: each.value for each in node.keywords}
    for name, wanted in LOCAL_ONLY.items():
        value = given.get(name)
        if not (isinstance(value, ast.Constant) and value.value is wanted):
            yield source.at(node, f"from_pretrained without {name}={wanted}")


def test_nothing_on_the_lists_is_in_the_product(scorecard: Scorecard) -> None:
    sources = [each for each in python("core", "service") if not each.path.startswith(TOOLS)]
    found = [finding for source in sources for finding in findings(source)]
    report(found)
    scorecard(33, f"in {len(sources)} files of the product, banned things", len(found), equals=0)


def test_the_defaults_listen_on_this_machine_only() -> None:
    config = ServerConfig()
    assert (config.host, config.metrics_host, config.reflection) == ("127.0.0.1", "127.0.0.1", False)


@pytest.mark.parametrize(
    "text",
    [
        "import subprocess",
        "from urllib import request",
        "from urllib.request import urlopen",
        "import http.client",
        "import huggingface_hub.utils",
        "os.system('ls')",
        "jinja2.Environment()",
        "hashlib.md5(x)",
        "np.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(path)",
        "AutoModel.from_pretrained(path, local_files_only=True)",
        "AutoModel.from_pretrained(path, local_files_only=flag, trust_remote_code=False)",
        "host = '0.0.0.0'",
    ],
)
def test_the_lists_can_fail(text: str) -> None:
    assert list(findings(Source("core/room.py", text)))


@pytest.mark.parametrize(
    "text",
    [
        "import urllib.parse",
        "import asyncio.subprocess as s",
        "AutoModel.from_pretrained(path, local_files_only=True, trust_remote_code=False)",
        "re.compile(x)",
    ],
)
def test_what_looks_alike_is_fine(text: str) -> None:
    assert not list(findings(Source("core/room.py", text)))
