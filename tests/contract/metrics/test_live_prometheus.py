"""A real Prometheus scrapes a server under load, and every panel and alert gets its data from there."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.cli.cli import cli
from service.client import CallFailed, SlipstreamClient
from service.metrics import names
from tests.chaos.device import Faults
from tests.chaos.process import ServerProcess
from tests.contract.metrics.dashboard import RULES, metrics_named, queries, rule_expressions
from tests.contract.metrics.prometheus import PATIENCE, Prometheus
from tests.contract.metrics.test_spans import SAMPLED, TRACE, open_metrics

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"
    ),
]
WINDOW = "6s"


@asynccontextmanager
async def load(server: ServerProcess, seed: int) -> AsyncIterator[None]:
    """Clients that decode, one of them traced, one that leaves early and one that asks for nonsense, until the end."""
    rng, stop = random.Random(seed), asyncio.Event()

    async def completing(client: SlipstreamClient) -> None:
        while not stop.is_set():
            prompt = [rng.randrange(3, 200) for _ in range(rng.randint(4, 80))]
            # The same prompt again is a cache hit, and its output was said before.
            for _ in range(2):
                await client.complete(prompt, max_tokens=rng.randint(2, 60), temperature=0.0, ignore_eos=True)

    async def leaving(client: SlipstreamClient) -> None:
        while not stop.is_set():
            stream = client.generate([5, 6, 7], max_tokens=150, temperature=0.0, ignore_eos=True)
            await anext(stream)
            await stream.aclose()
            with suppress(CallFailed):
                await client.complete([5], temperature=-1.0)
            await client.embed([3, 4, 5])

    async with server.client() as client, server.client() as traced, server.client() as rude:
        traced.metadata = (SAMPLED,)
        tasks = [asyncio.create_task(completing(each)) for each in (*[client] * 12, traced)]
        tasks.append(asyncio.create_task(leaving(rude)))
        try:
            yield
            assert not any(task.done() for task in tasks), [task for task in tasks if task.done()]
        finally:
            stop.set()
            await asyncio.gather(*tasks)


@pytest.mark.parametrize("frontends", [0, 2])
async def test_every_panel_has_data_under_load(frontends: int, tmp_path: Path, seed: int) -> None:
    server = ServerProcess(
        Faults(step_seconds=0.004),
        frontends=frontends,
        speculative="ngram",
        max_running_requests=8,
        max_total_tokens=1024,
        page_size=16,
    )
    prometheus = None
    try:
        target = server.wait_ready().metrics_address.removeprefix("http://").removesuffix("/metrics")
        prometheus = Prometheus(tmp_path / "prometheus", target, RULES)
        await asyncio.to_thread(prometheus.wait_ready)
        async with load(server, seed):
            await asyncio.to_thread(all_panels, prometheus)
            checked = await asyncio.to_thread(promtool_check, await classic(server))
            assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
            assert await asyncio.to_thread(steps_traced, server, tmp_path / "trace.json") > 0
            exported = await asyncio.to_thread(names_in, prometheus)
            exemplars = await asyncio.to_thread(traced_examples, prometheus)
            assert f'trace_id="{TRACE}"' in await open_metrics(server.metrics_address)
        # Of a server without certificates nothing says when they end.
        assert metrics_named() - exported == {names.CERTIFICATE_EXPIRY.exported}
        assert exemplars == {TRACE}
        await asyncio.to_thread(healthy, prometheus)
        assert ("slipstream_frontends_running", frontends) in (await server.metrics()).items()
    finally:
        if prometheus is not None:
            prometheus.close()
        server.close()


def all_panels(prometheus: Prometheus) -> None:
    """Every query of the dashboard has a finite number in its answer, within some scrapes."""
    left = queries()
    assert len({query.group for query in left}) == 7
    until = time.monotonic() + PATIENCE
    while left and time.monotonic() < until:
        left = [query for query in left if not any(map(math.isfinite, prometheus.values(query.over(WINDOW))))]
        time.sleep(0.2)
    assert not left, "\n".join(f"{query.group} / {query.panel}: {query.over(WINDOW)}" for query in left)


def steps_traced(server: ServerProcess, out: Path) -> int:
    """Steps in a trace of the process that serves metrics, which is the one that computes."""
    address = server.metrics_address.removesuffix("/metrics")
    ran = CliRunner().invoke(cli, ["trace", "--seconds", "0.2", "--metrics", address, "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    return int(json.loads(out.read_text())["otherData"]["steps"])


def promtool_check(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)


async def classic(server: ServerProcess) -> str:
    import urllib.request

    def fetch() -> str:
        with urllib.request.urlopen(server.metrics_address, timeout=PATIENCE) as response:
            return str(response.read().decode())

    return await asyncio.to_thread(fetch)


def names_in(prometheus: Prometheus) -> set[str]:
    """The metrics that Prometheus has stored of the server."""
    return set(prometheus.ask("label/__name__/values"))


def traced_examples(prometheus: Prometheus) -> set[str]:
    """Trace ids that Prometheus keeps beside the latency histograms; the only traced client has one."""
    found: set[str] = set()
    for name in ("time_to_first_token", "e2e_request_latency", "queue_time", "request_time_per_output_token"):
        until = time.monotonic() + PATIENCE
        answers: list[str] = []
        while not answers and time.monotonic() < until:
            now = time.time()
            query = {"query": f"slipstream_{name}_seconds_bucket", "start": str(now - 600), "end": str(now + 60)}
            series = prometheus.ask("query_exemplars", **query)
            answers = [each["labels"]["trace_id"] for one in series for each in one["exemplars"]]
            time.sleep(0.1)
        assert answers, name
        found.update(answers)
    return found


def healthy(prometheus: Prometheus) -> None:
    """The target is up, the rules are evaluated, and nothing of them fires."""
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert target["health"] == "up", target
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {alert for alert, _ in rule_expressions()}
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
