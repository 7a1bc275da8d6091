"""Certificates for a test, made with the openssl program: authorities, and leaves that they signed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl program is not installed")

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Pair:
    """Files of one certificate and its key; `serial` as `ssl` shows it."""

    cert: Path
    key: Path
    serial: str


class Authority:
    """A self-signed authority in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.cert = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        self._issued = 0x1000
        out = ("-keyout", self._key, "-out", self.cert, "-days", "2", "-subj", f"/CN={name}")
        _openssl("req", "-x509", *CURVE, *out)

    def issue(self, name: str, *, days: int = 2, names: tuple[str, ...] = ("localhost",)) -> Pair:
        """A certificate for 127.0.0.1 and these names, good as server and as client; `days=0` has expired already."""
        self._issued += 1
        key, request, cert = (self.folder / f"{self.name}-{name}.{end}" for end in ("key", "csr", "crt"))
        reached = ",".join(("IP:127.0.0.1", *(f"DNS:{each}" for each in names)))
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={reached}")
        _openssl("req", *CURVE, "-keyout", key, "-out", request, *subject)
        signer = ("-CA", self.cert, "-CAkey", self._key, "-set_serial", hex(self._issued), "-days", str(days))
        _openssl("x509", "-req", "-in", request, *signer, "-copy_extensions", "copy", "-out", cert)
        return Pair(cert, key, f"{self._issued:X}")


def _openssl(*args: object) -> None:
    done = subprocess.run(["openssl", *map(str, args)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
