"""What is in the image: this tree's server, none but its packages, nothing that a newer package of Debian mends."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.image.podman import Podman
from tests.support.repository import ROOT
from tests.support.tools import trivy

pytestmark = pytest.mark.soak

DIGESTS = """
import hashlib, json, pathlib, sysconfig
site = pathlib.Path(sysconfig.get_paths()["purelib"])
files = [path for name in ("core", "service", "slipstream") for path in (site / name).rglob("*") if path.is_file()]
kept = {str(path.relative_to(site)): path for path in files if path.suffix != ".pyc"}
print(json.dumps({name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in kept.items()}))
"""
# The mirror of the base image may be older than Debian's. Root, because the lists of packages are written.
OUTSTANDING = "apt-get update -qq >&2 && apt-get -s -o Debug::NoLocking=1 upgrade | grep ^Inst || true"


def in_image(podman: Podman, image: str, *command: str, flags: tuple[str, ...] = ()) -> str:
    """Standard output of a command in a container of its own."""
    return podman.ok("run", "--rm", *flags, f"--entrypoint={command[0]}", image, *command[1:])


def test_the_server_in_it_is_that_of_this_tree(podman: Podman, image: str) -> None:
    """A builder that takes an old step from its cache is seen here."""
    packed = json.loads(in_image(podman, image, "python", "-c", DIGESTS))
    listed = subprocess.run(
        ["git", "ls-files", "core", "service"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = [each for each in listed.stdout.split() if not each.endswith(".md") and (ROOT / each).exists()]
    assert len(tracked) > 500
    ours = {name.removeprefix("service/exported/"): (ROOT / name).read_bytes() for name in tracked}
    assert packed == {name: hashlib.sha256(content).hexdigest() for name, content in ours.items()}


def test_its_packages_agree_with_each_other(podman: Podman, image: str) -> None:
    assert "No broken requirements found" in in_image(podman, image, "pip", "check")


def test_no_package_of_debian_has_an_update_outstanding(podman: Podman, image: str) -> None:
    """What Debian has mended, security fixes included, is mended in the image; no build can mend what it has not."""
    told = podman.run("run", "--rm", "--user=0", "--entrypoint=sh", image, "-c", OUTSTANDING)
    if told.returncode != 0 or "Failed to fetch" in told.stderr:
        pytest.skip("Debian's lists of packages cannot be fetched")
    assert told.stdout == "", "built too long ago, or from old layers: make image IMAGE_FLAGS=--no-cache"


def trivy_of_image(podman: Podman, image: str, folder: Path, *flags: str) -> list[Any]:
    """What Trivy finds in the image: one object for each kind of package or file that it looked at."""
    archive = folder / "image.tar"
    podman.ok("save", "--quiet", "--format=docker-archive", f"--output={archive}", image, within=300)
    command = [str(trivy()), "image", "--input", str(archive), "--quiet", "--format", "json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    archive.unlink()
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout).get("Results") or [])


@pytest.mark.timeout(900)
def test_no_layer_holds_a_secret(podman: Podman, image: str, tmp_path: Path) -> None:
    found = trivy_of_image(podman, image, tmp_path, "--scanners=secret", "--skip-version-check")
    assert [each for one in found for each in one.get("Secrets", ())] == []


@pytest.mark.timeout(1200)
def test_trivy_knows_no_critical_that_has_a_fix(podman: Podman, image: str, tmp_path: Path) -> None:
    fetched = [str(trivy()), "image", "--download-db-only", "--quiet"]
    try:
        done = subprocess.run(fetched, capture_output=True, text=True, timeout=120, check=False)
        reached = done.returncode == 0
    except subprocess.TimeoutExpired:
        reached = False
    if not reached:
        pytest.skip("Trivy's database of vulnerabilities cannot be fetched")
    found = trivy_of_image(podman, image, tmp_path, "--scanners=vuln", "--severity=CRITICAL", "--ignore-unfixed")
    named = [(each["VulnerabilityID"], each["PkgName"]) for one in found for each in one.get("Vulnerabilities", ())]
    assert named == []
