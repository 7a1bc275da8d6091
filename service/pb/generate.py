"""Generates `service/pb/slipstream/` from `protos/`, or checks that what is committed is what would be generated.

The imports of the generated files are rewritten from `slipstream.v1` to `service.pb.slipstream.v1`, so that no
top-level package named `slipstream` has to be on the path. The versions of protobuf and grpcio that the generator
stamps into the files are left out of the comparison: another release of the tools with equal content is no difference.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTOS = HERE.parent.parent / "protos"

_IMPORT = re.compile(r"^(from|import) slipstream\.", re.MULTILINE)
_STAMPS = re.compile(
    r"^# Protobuf Python Version: .*$"
    r"|^    \d+,$"  # the arguments of ValidateProtobufRuntimeVersion, one a line
    r"|^GRPC_GENERATED_VERSION = .*$",
    re.MULTILINE,
)


def generate(protos: Path = PROTOS) -> dict[str, str]:
    """Text of every generated file, by its path relative to this folder. Needs `grpcio-tools`."""
    sources = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        # In a process of its own: a process that has loaded its library ends when it loads NIXL's.
        status = subprocess.call([sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", *outputs, *sources])
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        made = sorted(path for path in Path(folder).rglob("*.py*") if path.is_file())
        return {str(path.relative_to(folder)): _rewrite(path.read_text()) for path in made}


def differences(protos: Path = PROTOS, target: Path = HERE) -> list[str]:
    """Generated files that are missing from `target` or differ from it, version stamps aside; empty when current."""
    return [name for name, text in generate(protos).items() if not _same(target / name, text)]


def _rewrite(text: str) -> str:
    return _IMPORT.sub(r"\1 service.pb.slipstream.", text)


def _same(path: Path, text: str) -> bool:
    return path.is_file() and _STAMPS.sub("", path.read_text()) == _STAMPS.sub("", text)


def main(argv: list[str] | None = None) -> int:
    """Write the files, or with `--check` report what is out of date; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m service.pb.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a committed file is out of date")
    if parser.parse_args(argv).check:
        stale = differences()
        for name in stale:
            print(f"out of date: service/pb/{name}; run python -m service.pb.generate", file=sys.stderr)
        return 1 if stale else 0
    for name, text in generate().items():
        path = HERE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote service/pb/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
