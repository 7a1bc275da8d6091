"""`slipstream trace`: have a running server record what scheduler, forward thread and device do, as a picture."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from service.cli.seconds import Seconds

DEFAULT_ADDRESS = "http://127.0.0.1:9464"
LENGTH = Seconds(0, 60, min_open=True)
FILE = click.Path(dir_okay=False, path_type=Path)
ANSWER_SECONDS = 60.0
"""Seconds that the server may take after the recording, to write a long one."""


@click.command()
@click.option("--seconds", type=LENGTH, default=5.0, show_default=True, help="How long to record.")
@click.option("--metrics", metavar="URL", default=DEFAULT_ADDRESS, show_default=True, help="The server's metrics port.")
@click.option("--out", type=FILE, metavar="FILE", default=Path("trace.json"), show_default=True, help="Where to write.")
def trace(seconds: float, metrics: str, out: Path) -> None:
    """Record what a running server's scheduler and device do, into a file for ui.perfetto.dev.

    Run it on the server's machine (in its container) as its user, while there is load; elsewhere the server needs
    --trace-endpoint any. Scheduler slices above forward slices are the overlap.
    """
    body = _fetch(f"{metrics.removesuffix('/').removesuffix('/metrics')}/trace?seconds={seconds:g}", seconds)
    found: dict[str, Any] = json.loads(body)["otherData"]
    out.write_bytes(body)
    work, beside = found["scheduler_seconds"], found["scheduler_seconds_beside_device"]
    share = f"{beside / work:.0%} of the scheduler's {work * 1e3:.1f} ms beside it" if work else "no scheduler work"
    click.echo(f"{out}: {found['steps']} steps, device at work {found['device_seconds']:.2f} s, {share}")


def _fetch(address: str, seconds: float) -> bytes:
    if not address.startswith(("http://", "https://")):
        raise click.BadParameter("must begin with http:// or https://", param_hint="--metrics")
    request = urllib.request.Request(address, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=seconds + ANSWER_SECONDS) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        raise click.ClickException(f"the server refused ({error.code}): {error.read().decode().strip()}") from None
    except (urllib.error.URLError, OSError) as error:
        raise click.ClickException(f"no answer from {address}: {getattr(error, 'reason', error)}") from None
