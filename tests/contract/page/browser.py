"""A headless Chromium, spoken to over its own pipe: no port to find, no driver to match, no library to install.

With `--remote-debugging-pipe` Chromium reads commands of the DevTools protocol from its file descriptor 3 and writes
answers and events to 4, as JSON that ends with a NUL. It goes when the pipe is closed, whatever becomes of the test.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.within import within

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
INSTALL = "no Chromium here: apt-get install chromium-headless-shell"
PATIENCE = 30.0
"""Seconds after which what should have happened counts as missing."""

KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowLeft": (37, ""), "Escape": (27, "")}
"""Keys that can be pressed, with their number and what they write."""

_FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--disable-extensions", "--mute-audio"),
)
_ON_FDS_3_AND_4 = "import os, sys; os.dup2({0}, 3); os.dup2({1}, 4); os.execvp(sys.argv[1], sys.argv[1:])"
_ANSWER_BYTES = 1 << 26

Event = dict[str, Any]


def program() -> str | None:
    """The Chromium of this machine; None if there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """One browser process and its connection."""

    def __init__(self, reader: asyncio.StreamReader, commands: int) -> None:
        self._reader, self._commands = reader, commands
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """The result of one command. Raises AssertionError with the browser's words for an error."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(PATIENCE):
            return await answer

    async def open(self, width: int, height: int, *, dark: bool = False) -> Tab:
        """An empty tab of this size, in pixels of a screen with two to the point."""
        target = await self.ask("Target.createTarget", url="about:blank")
        attached = await self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.ask(f"{domain}.enable")
        await tab.resize(width, height)
        await tab.colours(dark=dark)
        return tab

    async def close(self) -> None:
        """Stop listening."""
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            answer = self._answers.pop(message.get("id", 0), None)
            if answer is None:
                if (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                    tab.heard(message)
            elif "error" in message:
                answer.set_exception(AssertionError(message["error"]["message"]))
            else:
                answer.set_result(message["result"])


class Tab:
    """One page. `complaints` are errors and warnings of its console, exceptions, and loads that failed."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.events: list[str] = []
        """Data of server-sent events, as they came over the wire."""

    async def ask(self, method: str, **parameters: Any) -> Any:
        """The result of one command to this tab."""
        return await self._browser.ask(method, self._session, **parameters)

    async def resize(self, width: int, height: int) -> None:
        """Change the size of the window."""
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": mobile}
        await self.ask("Emulation.setDeviceMetricsOverride", **size)

    async def colours(self, *, dark: bool) -> None:
        """What the person prefers."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[feature])

    async def visit(self, address: str) -> None:
        """Load `address`. Raises AssertionError for what cannot be reached."""
        went = await self.ask("Page.navigate", url=address)
        assert "errorText" not in went, went
        await self.until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, as JSON has it. Raises AssertionError if it throws."""
        told = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, f"{expression}: {told['exceptionDetails']}"
        return told["result"].get("value")

    async def text(self, selector: str) -> str:
        """The text of the first element that `selector` finds."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def press(self, key: str) -> None:
        """Press one key of `KEYS` and let it go."""
        number, text = KEYS[key]
        told = {"key": key, "code": key, "windowsVirtualKeyCode": number}
        await self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **told)
        await self.ask("Input.dispatchKeyEvent", type="keyUp", **told)

    async def until(self, expression: str) -> Any:
        """Wait until the expression is true; its value."""
        async with within(PATIENCE, expression):
            while not (seen := await self.run(expression)):
                await asyncio.sleep(0.05)
            return seen

    async def shoot(self, file: Path) -> None:
        """A picture of the whole page, as PNG."""
        size = (await self.ask("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def heard(self, message: Event) -> None:
        """Something happened in the tab."""
        method, told = message["method"], message["params"]
        if method == "Network.eventSourceMessageReceived":
            self.events.append(told["data"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """A browser with nothing in it; `profile` is an empty folder for what it keeps."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    with (profile / "stderr").open("wb") as said, os.fdopen(ours_in, "rb") as answers:
        process = _start(profile, (theirs_in, theirs_out), said)
        reader = asyncio.StreamReader(limit=_ANSWER_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), answers
        )
        opened = Browser(reader, ours_out)
        try:
            yield opened
        finally:
            await opened.close()
            os.close(ours_out)
            transport.close()
            await asyncio.to_thread(_end, process)


def _start(profile: Path, pipes: tuple[int, int], said: IO[bytes]) -> subprocess.Popen[bytes]:
    """The browser with `pipes` as its ends of the connection, which are its alone from here on."""
    found = program()
    assert found is not None, INSTALL
    bridge = (sys.executable, "-c", _ON_FDS_3_AND_4.format(*pipes))
    command = [*bridge, found, *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(command, pass_fds=pipes, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    for each in pipes:
        os.close(each)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its pipe is closed, so it goes; or it is made to."""
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
