"""A Prometheus of its own for one test: it scrapes one server twice a second and evaluates the alerts."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.support.ports import free_port

PATIENCE = 30.0


class Prometheus:
    """Started in `folder`, which keeps its data and its log; `close` ends it."""

    def __init__(self, folder: Path, target: str, rules: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(rules, folder / "rules.yaml")
        scrape = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        jobs = [{"job_name": "slipstream", "static_configs": [{"targets": [target]}]}]
        settings = {"global": scrape, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.folder = folder

    def wait_ready(self) -> Prometheus:
        """Block until it answers."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its HTTP API. Raises AssertionError with its words for an error."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=PATIENCE) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def values(self, expr: str) -> list[float]:
        """What an instant query returns, without labels."""
        return [float(each["value"][1]) for each in self.ask("query", query=expr)["result"]]

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)
        self._log.close()
