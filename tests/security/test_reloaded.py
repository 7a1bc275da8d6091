"""Files that are replaced under a running server: every way of replacing them is noticed, bad contents never served."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import StartupError
from service.access import reloaded_file
from service.access.reloaded_file import MAX_FILE_BYTES, Reloaded
from service.access.token_file import MAX_TOKENS, UNNAMED, first_token, parse_tokens, token_file

TOKEN = "0123456789abcdef"


def text_of(*paths: Path) -> Reloaded[str]:
    def parse(contents: tuple[bytes, ...]) -> str:
        whole = b"|".join(contents).decode()
        if "bad" in whole:
            raise StartupError("not good")
        return whole

    return Reloaded("text", paths, parse)


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


def by_rename(path: Path, text: str) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    fresh.replace(path)


def by_unlink(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def in_place_with_the_old_time(path: Path, text: str) -> None:
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read again but for a change of its stamp."""
    monkeypatch.setattr(reloaded_file, "SETTLE_SECONDS", 0.0)


def test_whatever_a_parser_raises_is_a_failed_reload(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("1")
    found = Reloaded("number", (path,), lambda contents: int(contents[0]))
    path.write_text("one")
    looked: list[object] = []
    for look in (found.current, lambda: found.failed):
        try:
            looked.append(look())
        except ValueError as error:
            looked.append(error)
    assert looked == [1, True]
    with pytest.raises(StartupError, match=rf"^{path}: cannot be used: ValueError$"):
        Reloaded("number", (path,), lambda contents: int(contents[0]))


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("write", [in_place, by_rename, by_unlink, in_place_with_the_old_time])
def test_every_way_of_writing_is_noticed(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    # Older than any clock's tick.
    os.utime(path, ns=(10**18, 10**18))
    found = text_of(path)
    assert found.current() == "one"
    write(path, "two")
    assert found.current() == "two"


@pytest.mark.usefixtures("settled")
def test_the_swap_of_a_directory_link_is_noticed(tmp_path: Path) -> None:
    """As Kubernetes mounts a secret: file -> ..data/file, ..data -> a directory per version, swapped by rename."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "file").write_text(version)
        os.utime(tmp_path / version / "file", ns=(10**18, 10**18))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "file").symlink_to("..data/file")
    found = text_of(tmp_path / "file")
    assert found.current() == "v1"
    (tmp_path / "..data_tmp").symlink_to("v2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    assert found.current() == "v2"


def test_a_second_write_within_one_tick_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    stamps = [(1,)]
    monkeypatch.setattr(reloaded_file, "_stamp", lambda path: stamps[0])
    found = text_of(path)
    # After the start, and after every change that shows.
    for text in ("two", "three"):
        path.write_text(text)
        assert found.current() == text
        monkeypatch.setattr(found, "_settles_at", 0.0)
        stamps[0] = (2,)
        assert found.current() == text
    path.write_text("six")
    assert found.current() == "three", "an old stamp is trusted, else every look would read the file"


def test_bad_contents_keep_the_last_good_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    path.write_text("good")
    found = text_of(path)
    kept = found.current()
    for _ in range(3):
        path.write_text("bad")
        assert found.current() is kept
    assert caplog.text.count("text: not good; going on with the last good one") == 1
    path.write_text("better")
    assert found.current() == "better"


def test_bad_contents_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenants file of a quarter of a megabyte takes 0.1 s, and every call looks."""
    monkeypatch.setattr(reloaded_file, "SETTLE_SECONDS", 3600.0)
    path = tmp_path / "file"
    path.write_text("good")
    parsed = list[bytes]()

    def parse(contents: tuple[bytes, ...]) -> str:
        parsed.append(contents[0])
        if b"bad" in contents[0]:
            raise StartupError("not good")
        return contents[0].decode()

    found = Reloaded("text", (path,), parse)
    for text in ("bad", "bad too", "good", "bad"):
        path.write_text(text)
        failed = [found.failed for _ in range(3)]
        assert failed == ["bad" in text] * 3
    assert parsed == [b"good", b"bad", b"bad too", b"bad"]


def test_two_files_are_one_value(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    second.write_text("1")
    found = text_of(first, second)
    same = found.current()
    # Between the two writes of a rotation; and contents that move from one file to the other are a change.
    first.write_text("11")
    second.write_text("")
    assert found.current() == "11|" != same


def test_what_cannot_be_read_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    os.mkfifo(tmp_path / "pipe")
    for name, told in (
        ("absent", "does not exist"),
        ("", "is no regular file"),
        ("pipe", "is no regular file"),
        ("large", "is larger than"),
    ):
        with pytest.raises(StartupError, match=told) as refused:
            text_of(tmp_path / name)
        assert (refused.value.exit_code, "\n" in refused.value.message) == (2, False)


def test_threads_see_whole_values(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a" * 1000)
    found, seen, stop = text_of(path), set(), threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.add(found.current())

    threads = [threading.Thread(target=look) for _ in range(4)]
    for each in threads:
        each.start()
    for letter in "bcdefgh" * 10:
        by_rename(path, letter * 1000)
    stop.set()
    for each in threads:
        each.join()
    assert all(len(text) == 1000 and len(set(text)) == 1 for text in seen)


def test_lines_of_a_token_file(tmp_path: Path) -> None:
    content = f"# all of them\r\n\r\n  {TOKEN}  \nalice:{TOKEN}1\nalice:{TOKEN}2==\n".encode()
    book = parse_tokens(content, "tokens")
    named = [found.name for text in ("", "1", "2==") if (found := book.find(TOKEN + text))]
    assert named == [UNNAMED, "alice", "alice"] and len(book) == 3
    assert TOKEN not in repr(book.find(TOKEN)) and TOKEN not in repr(vars(book))
    path = tmp_path / "tokens"
    path.write_bytes(content)
    assert first_token(path) == TOKEN
    assert TOKEN not in repr(vars(token_file(path)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# none\n\n",
        TOKEN[:-1].encode(),
        f"a b:{TOKEN}".encode(),
        f":{TOKEN}".encode(),
        f"a:b:{TOKEN}".encode(),
        f"{TOKEN} {TOKEN}".encode(),
        f"{TOKEN}\x00".encode(),
        f"{TOKEN}é".encode(),
        f"{'x' * 65}:{TOKEN}".encode(),
        f"{TOKEN}\n{TOKEN}".encode(),
        "\n".join(f"{i:016d}" for i in range(MAX_TOKENS + 1)).encode(),
    ],
)
def test_bad_token_files_are_refused_without_being_quoted(content: bytes) -> None:
    with pytest.raises(StartupError) as refused:
        parse_tokens(content, "FILE")
    assert refused.value.message.startswith("FILE") and TOKEN[:8] not in refused.value.message
