"""The API as Markdown: services, messages and enums of `protos/`, each with the comment that stands above it there."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PROTOS = Path(__file__).resolve().parents[1] / "protos"
PACKAGE = ".slipstream.v1."

Comments = dict[tuple[int, ...], str]
"""Path of an element in its file, as `SourceCodeInfo` numbers it -> the comment above it."""

# Numbers of fields in descriptor.proto, of which such paths consist.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, NESTED, NESTED_ENUMS, ONEOFS = 2, 3, 4, 8
METHODS = VALUES = 2


def text() -> str:
    """All files, services first; needs `grpcio-tools`."""
    files = list(_files())
    parts: list[str] = []
    for file in files:
        comments = _comments(file)
        for at, service in enumerate(file.service):
            parts += _service(service, comments, (SERVICES, at), file.name)
    for file in files:
        comments = _comments(file)
        for at, message in enumerate(file.message_type):
            parts += _message(message, comments, (MESSAGES, at), "")
        for at, enum in enumerate(file.enum_type):
            parts += _enum(enum, comments, (ENUMS, at), "")
    return "\n" + "\n\n".join(part for part in parts if part) + "\n\n"


def _files() -> Iterator[FileDescriptorProto]:
    """Our files, `inference.proto` first, with their comments."""
    sources = sorted((str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto")), reverse=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        options = [f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={out}"]
        # In a process of its own: see service/pb/generate.py.
        status = subprocess.call([sys.executable, "-m", "grpc_tools.protoc", *options, *sources])
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        found = FileDescriptorSet.FromString(out.read_bytes())
    by_name = {file.name: file for file in found.file}
    return (by_name[name] for name in sources)


def _comments(file: FileDescriptorProto) -> Comments:
    return {tuple(each.path): each.leading_comments for each in file.source_code_info.location}


def _service(service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...], name: str) -> list[str]:
    parts = [f"### {service.name}", f"In `protos/{name}`.", _prose(comments.get(path, ""))]
    for at, method in enumerate(service.method):
        answer = _linked(method.output_type)
        told = f"{_linked(method.input_type)} → {'stream of ' if method.server_streaming else ''}{answer}"
        parts += [f"#### {method.name}", told, _prose(comments.get((*path, METHODS, at), ""))]
    return parts


def _message(message: DescriptorProto, comments: Comments, path: tuple[int, ...], outer: str) -> list[str]:
    name = outer + message.name
    parts = [f"### {name}", _prose(comments.get(path, ""))]
    chosen = [at for at, _ in enumerate(message.oneof_decl) if any(_member(field, at) for field in message.field)]
    for at in chosen:
        members = ", ".join(f"`{field.name}`" for field in message.field if _member(field, at))
        told = _prose(comments.get((*path, ONEOFS, at), ""))
        parts.append(f"`{message.oneof_decl[at].name}` is one of {members}. {told}".strip())
    if message.field:
        rows = ["| field | type | number |  |", "| --- | --- | --- | --- |"]
        entries = {each.name: each for each in message.nested_type if each.options.map_entry}
        for at, field in enumerate(message.field):
            told = _cell(comments.get((*path, FIELDS, at), ""))
            rows.append(f"| `{field.name}` | {_type(field, entries)} | {field.number} | {told} |")
        parts.append("\n".join(rows))
    for at, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            parts += _message(nested, comments, (*path, NESTED, at), f"{name}.")
    for at, enum in enumerate(message.enum_type):
        parts += _enum(enum, comments, (*path, NESTED_ENUMS, at), f"{name}.")
    return parts


def _enum(enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...], outer: str) -> list[str]:
    rows = ["| value | number |  |", "| --- | --- | --- |"]
    for at, value in enumerate(enum.value):
        rows.append(f"| `{value.name}` | {value.number} | {_cell(comments.get((*path, VALUES, at), ''))} |")
    return [f"### {outer}{enum.name}", _prose(comments.get(path, "")), "\n".join(rows)]


def _member(field: FieldDescriptorProto, oneof: int) -> bool:
    """Whether `field` belongs to it in the file, and not only because it is `optional`."""
    return field.HasField("oneof_index") and field.oneof_index == oneof and not field.proto3_optional


def _type(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        return " → ".join(("map", *(_type(each, {}) for each in entry.field))).replace(" → ", " ", 1)
    kind = _linked(field.type_name) if field.type_name else FieldDescriptorProto.Type.Name(field.type)
    bare = f"`{kind.removeprefix('TYPE_').lower()}`" if kind.startswith("TYPE_") else kind
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {bare}"
    return f"optional {bare}" if field.proto3_optional else bare


def _linked(type_name: str) -> str:
    if not type_name.startswith(PACKAGE):
        return f"`{type_name.removeprefix('.')}`"
    name = type_name.removeprefix(PACKAGE)
    return f"[{name}](#{name.replace('.', '').lower()})"


def _prose(comment: str) -> str:
    """Paragraphs as they are, each on one line."""
    return "\n\n".join(_escaped(" ".join(part.split())) for part in comment.strip().split("\n\n"))


def _cell(comment: str) -> str:
    return _escaped(" ".join(comment.split())).replace("|", "\\|")


def _escaped(told: str) -> str:
    """Outside of backticks, what Markdown would take for markup."""
    parts = told.split("`")
    return "`".join(part if at % 2 else re.sub(r"([*<\[\]])", r"\\\1", part) for at, part in enumerate(parts))
