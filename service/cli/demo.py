"""`make demo`: starts a server, streams three completions at once, shows the pools, drains.

The server is a real subprocess on free ports, called over gRPC and HTTP like any other. The exit status is 0 only if
every stream ended and the server drained with status 0.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import urllib.request

from service.client import Chunk, End, SlipstreamClient

PROMPTS = ("27+45=", "Recall: lamp oak, river fig; river", "A story about Mia the fox:")
MAX_TOKENS = 48
START_SECONDS = 300.0
STOP_SECONDS = 60.0

_READY = re.compile(r"serving .* on (\S+:\d+), metrics on (http://\S+)")
_SHOWN = re.compile(r"^slipstream_(pool_|requests_(running|waiting|finished)|generation_|steps|device_|assert_)")


class Screen:
    """One line per stream, redrawn in place on a terminal. On any other output every piece is a line of its own."""

    def __init__(self, prompts: tuple[str, ...]) -> None:
        self._lines = [f"{prompt} " for prompt in prompts]
        self._live = sys.stdout.isatty()
        if self._live:
            print("\n".join(self._lines), flush=True)

    def add(self, at: int, text: str) -> None:
        """Show the new `text` of stream `at`."""
        text = text.replace("\n", " ")
        if not text:
            return
        self._lines[at] += text
        if not self._live:
            print(f"{at + 1} | {text}", flush=True)
            return
        up = len(self._lines) - at
        print(f"\x1b[{up}A\r\x1b[K{self._lines[at][:200]}\x1b[{up}B\r", end="", flush=True)

    def close(self) -> None:
        """Where pieces went to lines of their own, show each stream as a whole."""
        if not self._live:
            print("\n".join(f"{at + 1} = {line}" for at, line in enumerate(self._lines)), flush=True)


async def stream_one(client: SlipstreamClient, at: int, prompt: str, screen: Screen) -> End:
    """Stream one completion onto the screen. Returns its end. Raises RuntimeError for a stream without one."""
    async for event in client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0):
        if isinstance(event, End):
            return event
        assert isinstance(event, Chunk)
        screen.add(at, event.text)
    raise RuntimeError("the stream ended without a terminal")


async def start_server() -> tuple[asyncio.subprocess.Process, str, str]:
    """Start a server. Returns the process, its gRPC address and the address of its metrics. Raises SystemExit."""
    ports = ("--port", "0", "--metrics-port", "0", "--drain-linger", "0", "--log-level", "warning")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "service", "serve", *ports, *sys.argv[1:], stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None, "piped"
    try:
        async with asyncio.timeout(START_SECONDS):
            line = (await process.stdout.readline()).decode()
    except TimeoutError:
        process.kill()
        raise SystemExit(f"the server was not ready within {START_SECONDS:g} s") from None
    found = _READY.search(line)
    if found is None:
        raise SystemExit(f"the server did not start (status {await process.wait()})")
    print(line.strip(), flush=True)
    return process, found[1], found[2]


def scrape(address: str) -> list[str]:
    """The lines of /metrics that the demo shows, without checks that are 0."""
    with urllib.request.urlopen(address, timeout=5) as response:
        lines = response.read().decode().splitlines()
    return [line for line in lines if _SHOWN.match(line) and not ("assert" in line and line.endswith(" 0.0"))]


async def demo() -> int:
    """Run the demo. Returns the server's exit status."""
    process, address, metrics = await start_server()
    try:
        screen = Screen(PROMPTS)
        async with SlipstreamClient(address) as client:
            ends = await asyncio.gather(*(stream_one(client, at, prompt, screen) for at, prompt in enumerate(PROMPTS)))
        screen.close()
        for at, end in enumerate(ends):
            print(f"stream {at + 1}: {end.completion_tokens} tokens, ended by {end.reason}")
        print("\n".join(await asyncio.to_thread(scrape, metrics)))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_SECONDS):
            status = await process.wait()
        print(f"drained, exit status {status}")
        return status
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    raise SystemExit(asyncio.run(demo()))
