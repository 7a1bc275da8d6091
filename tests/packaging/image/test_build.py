"""`make image` finds a builder, says in a line what is missing, tells what each layer weighs. Builders are fakes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from helm import image as building
from helm.layers import Layer, read_layers

MIB = 1 << 20
HISTORY = [
    {"created_by": "/bin/sh -c #(nop) ADD file:1 in / "},
    {"created_by": "ENV A=1", "empty_layer": True},
    {"created_by": "RUN /bin/sh -c apt-get  install g++ # buildkit"},
]
BUILD = 'printf "%s\\n" "$@" > "$HERE/build.args"'


def archive(sizes: dict[str, int], layers: list[str], linked: dict[str, str] | None = None) -> bytes:
    """What `docker save` writes: files of these sizes, and links to some of them."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, size in sizes.items():
            member = tarfile.TarInfo(name)
            member.size = size
            tar.addfile(member, io.BytesIO(bytes(size)))
        for name, target in (linked or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
        manifest = [{"Config": "blobs/sha256/c", "RepoTags": ["x"], "Layers": layers}]
        for name, text in (("blobs/sha256/c", {"history": HISTORY}), ("manifest.json", manifest)):
            content = json.dumps(text).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


class Programs:
    """A folder of fake programs that is all of PATH but for what a shell needs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setenv("HERE", str(folder))
        # The real ones, where they are installed, are out of the way.
        monkeypatch.setattr(building.shutil, "which", lambda name: str(folder / name) if self.has(name) else None)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def add(self, name: str, **subcommands: str) -> None:
        """A program with these subcommands, each a line of shell; any other fails and says so."""
        cases = "".join(f"{each}) {line} ;;\n" for each, line in subcommands.items())
        file = self.folder / name
        file.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}*) echo "no engine at $1" >&2; exit 3 ;;\nesac\n')
        file.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


def test_layers_of_an_archive() -> None:
    saved = archive({"a/layer.tar": 5 * MIB, "b/layer.tar": 10240}, ["a/layer.tar", "b/layer.tar"])
    assert read_layers(io.BytesIO(saved)) == [
        Layer(5 * MIB, "ADD file:1 in /"),
        Layer(10240, "RUN apt-get install g++"),
    ]


def test_equal_layers_that_are_linked_weigh_the_same() -> None:
    saved = archive({"a/layer.tar": 10240}, ["a/layer.tar", "b/layer.tar"], {"b/layer.tar": "../a/layer.tar"})
    assert [each.bytes for each in read_layers(io.BytesIO(saved))] == [10240, 10240]


def test_what_is_no_image_has_no_layers() -> None:
    assert read_layers(io.BytesIO(b"")) == []
    assert read_layers(io.BytesIO(b"Error: no such image\n")) == []


def test_a_history_that_does_not_match_is_an_error() -> None:
    saved = archive({"a/layer.tar": 10240}, ["a/layer.tar"])
    with pytest.raises(ValueError, match="1 layers, and a history of 2"):
        read_layers(io.BytesIO(saved))


def test_without_a_builder_one_line_says_what_to_install(programs: Programs) -> None:
    with pytest.raises(SystemExit) as ended:
        building.main([])
    assert ended.value.code == f"image: {building.NO_BUILDER}"


def test_a_client_without_its_engine_is_passed_over(programs: Programs, capfd: pytest.CaptureFixture[str]) -> None:
    saved = programs.folder / "saved.tar"
    saved.write_bytes(archive({"a/layer.tar": 5 * MIB, "b/layer.tar": 10240}, ["a/layer.tar", "b/layer.tar"]))
    programs.add("docker")
    programs.add("podman", info="true", build=BUILD, save='cat "$HERE/saved.tar"')
    building.main(["--variant", "cuda", "--build-arg", "TORCH_INDEX=https://mirror.example/simple"])
    arguments = (programs.folder / "build.args").read_text().splitlines()
    image = building.image_name("cuda")
    assert arguments[:4] == ["build", "--layers", "--format=docker", f"--tag={image}"]
    assert arguments[4:8] == ["--build-arg", "VARIANT=cuda", "--build-arg", "TORCH_INDEX=https://mirror.example/simple"]
    told = capfd.readouterr().out
    assert f"{image}: 5 MB in 2 layers, unpacked\n       5.2 MB  ADD file:1 in /\n" in told


def test_an_engine_that_does_not_answer_is_named(programs: Programs) -> None:
    programs.add("docker")
    with pytest.raises(building.CannotBuild, match="docker: no engine at version"):
        building.find_builder()


@pytest.mark.parametrize(
    ("subcommands", "reason"),
    [
        ({"build": "exit 4"}, "podman could not build .* it ended with 4"),
        ({"build": "true"}, "could not read it: it ended with 3"),
        ({"build": "true", "save": "true"}, "could not read it: it ended with 0"),
    ],
)
def test_a_failure_ends_with_a_line(programs: Programs, subcommands: dict[str, str], reason: str) -> None:
    programs.add("podman", info="true", **subcommands)
    with pytest.raises(SystemExit, match=reason):
        building.main([])
