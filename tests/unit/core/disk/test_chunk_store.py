"""Files that keep what was written whole, up to a number of bytes, and never anything else."""

from __future__ import annotations

import logging
import os
import random
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.disk import chunk_store
from core.disk.chunk_names import chunk_names, ending_name
from core.disk.chunk_store import HEAD, ChunkStore, check_directory
from core.errors import ConfigError
from core.types.arrays import Ints

SIZE = 1000
FILE = HEAD.size + SIZE


def as_ints(ids: list[int]) -> Ints:
    return np.array(ids, np.int64)


def data(place: int) -> list[memoryview]:
    """The bytes of chunk `place`, in pieces."""
    told = random.Random(place).randbytes(SIZE)
    return [memoryview(told[:1]), memoryview(told[1:7]), memoryview(told[7:])]


def name(place: int) -> str:
    return f"{place:080x}"


def found(store: ChunkStore, place: int) -> bytes | None:
    room = bytearray(SIZE)
    whole = store.read(name(place), [memoryview(room)[:500], memoryview(room)[500:]])
    return bytes(room) if whole else None


def kept(place: int) -> bytes:
    return b"".join(data(place))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "a" / "b", 10 * FILE)
    assert found(store, 1) is None and store.failures == 0, "what is not there is no failure"
    assert store.write(name(1), data(1)) and store.write(name(1), data(1))
    assert name(1) in store and len(store) == 1 and store.used_bytes == FILE
    assert found(store, 1) == kept(1)
    assert stat.S_IMODE((tmp_path / "a" / "b" / name(1)).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_many_parts_are_more_than_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_store, "VECTORS", 2)
    calls, write = list[int](), os.writev
    monkeypatch.setattr(os, "writev", lambda to, parts: calls.append(len(parts)) or write(to, [parts[0][:300]]))
    store = ChunkStore(tmp_path, 10 * FILE)
    assert store.write(name(1), data(1)) and max(calls) == 2 and len(calls) > 4
    assert found(store, 1) == kept(1), "the kernel may take a part of what it was given"


def test_the_next_process_finds_all_in_the_order_of_their_use(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 3 * FILE)
    for place in range(3):
        store.write(name(place), data(place))
        os.utime(tmp_path / name(place), (place, place))
    assert found(store, 0) == kept(0)
    (tmp_path / f"{name(7)}.partial").write_bytes(b"half")
    store.close()
    after = ChunkStore(tmp_path, 3 * FILE)
    assert after.used_bytes == 3 * FILE and not (tmp_path / f"{name(7)}.partial").exists()
    after.write(name(3), data(3))
    assert [place for place in range(4) if found(after, place)] == [0, 2, 3] and after.evicted == 1


def test_the_least_recently_used_give_way(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 3 * FILE + 10)
    for place in range(3):
        store.write(name(place), data(place))
    found(store, 0)
    store.write(name(3), data(3))
    assert name(1) not in store and found(store, 0) == kept(0) and store.evicted == 1
    assert store.used_bytes == 3 * FILE == sum(each.stat().st_size for each in tmp_path.iterdir())
    assert not ChunkStore(tmp_path / "small", FILE - 1).write(name(1), data(1)), "larger than all"


@pytest.mark.parametrize("place", [0, 8, 16, HEAD.size, FILE - 1])
def test_a_byte_that_changed_is_no_chunk(tmp_path: Path, place: int) -> None:
    store = ChunkStore(tmp_path, 10 * FILE)
    store.write(name(1), data(1))
    told = bytearray((tmp_path / name(1)).read_bytes())
    told[place] ^= 1
    (tmp_path / name(1)).write_bytes(told)
    assert found(store, 1) is None and store.failures == 1
    assert name(1) not in store and not (tmp_path / name(1)).exists() and store.used_bytes == 0


@pytest.mark.parametrize("length", [0, 5, HEAD.size, FILE - 1])
def test_a_file_that_ends_early_is_no_chunk(tmp_path: Path, length: int) -> None:
    store = ChunkStore(tmp_path, 10 * FILE)
    store.write(name(1), data(1))
    os.truncate(tmp_path / name(1), length)
    assert found(store, 1) is None and store.failures == 1 and name(1) not in store


def test_a_chunk_of_another_size_is_none(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 10 * FILE)
    store.write(name(1), data(1))
    assert not store.read(name(1), [memoryview(bytearray(SIZE - 1))])
    store.write(name(2), data(2))
    assert not store.read(name(2), [memoryview(bytearray(SIZE + 1))])


def test_a_disk_that_does_not_work_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, now = ChunkStore(tmp_path, 10 * FILE), [100.0]
    store.write(name(0), data(0))
    monkeypatch.setattr(chunk_store.time, "monotonic", lambda: now[0])

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "writev", full)
        assert not store.write(name(1), data(1)) and store.failures == 1
        assert "disk_cache: nothing is written for a minute: [Errno 28] No space" in caplog.text
        assert not list(tmp_path.glob("*.partial")) and store.used_bytes == FILE
    assert not store.write(name(1), data(1)) and store.failures == 1, "it rests"
    assert found(store, 0) == kept(0), "and is read meanwhile"
    now[0] += chunk_store.QUIET_SECONDS
    assert store.write(name(1), data(1)) and found(store, 1) == kept(1)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_a_thread_that_writes_on_when_the_store_is_closed_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not into what has the descriptor next either, and it is no failure of the disk."""
    (mine := tmp_path / "mine").mkdir()
    (other := tmp_path / "other").mkdir()
    store = ChunkStore(mine, 10 * FILE)
    store.close()
    others = [os.open(other, os.O_RDONLY | os.O_DIRECTORY) for _ in range(8)]
    assert not store.write(name(1), data(1)) and found(store, 1) is None
    store.close()
    for descriptor in others:
        os.close(descriptor)
    assert [each.name for each in mine.iterdir()] == ["lock"] and not list(other.iterdir())
    assert store.failures == 0 and caplog.text == ""
    ChunkStore(mine, 10 * FILE).close()


def test_what_is_not_a_chunk_is_left_alone(tmp_path: Path) -> None:
    for other in ("thesis.txt", "movie.partial", name(1)[1:], f"{name(1)}x"):
        (tmp_path / other).write_bytes(bytes(9 * FILE))
    (tmp_path / name(5)).mkdir()
    store = ChunkStore(tmp_path, 2 * FILE)
    before = {each.name for each in tmp_path.iterdir()}
    assert len(store) == 0 and store.used_bytes == 0 and "thesis.txt" in before
    for place in range(4):
        store.write(name(place), data(place))
    store.flush()
    assert {each.name for each in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "huge"])
def test_what_was_put_in_the_place_of_a_chunk_is_none(tmp_path: Path, kind: str) -> None:
    """Nothing is waited for, and no link followed."""
    store, path = ChunkStore(tmp_path, 10 * FILE), tmp_path / name(1)
    store.write(name(1), data(1))
    path.rename(tmp_path / "aside")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "aside")
    elif kind == "folder":
        path.mkdir()
    else:
        os.truncate(tmp_path / "aside", 1 << 40)
        (tmp_path / "aside").rename(path)
    assert found(store, 1) is None and store.failures == 1 and name(1) not in store
    assert store.write(name(2), data(2)), "and the others are kept as ever"


def test_a_file_larger_than_all_is_no_reason_to_give_others_up(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 3 * FILE)
    store.write(name(1), data(1))
    store.close()
    (tmp_path / name(2)).touch()
    os.truncate(tmp_path / name(2), 1 << 40)
    after = ChunkStore(tmp_path, 3 * FILE)
    assert found(after, 1) == kept(1) and name(2) not in after and not (tmp_path / name(2)).exists()


def test_a_budget_that_is_smaller_now_holds_at_once(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 3 * FILE)
    for place in range(3):
        store.write(name(place), data(place))
    store.close()
    assert len(ChunkStore(tmp_path, 2 * FILE)) == 2


def test_a_directory_that_was_put_in_the_place_of_ours_is_another_servers(tmp_path: Path) -> None:
    ours, folder = ChunkStore(tmp_path / "a", 10 * FILE), tmp_path / "a"
    folder.rename(tmp_path / "b")
    theirs = ChunkStore(folder, 10 * FILE)
    assert ours.write(name(1), data(1)) and len(list(folder.iterdir())) == 1 and found(theirs, 1) is None
    assert found(ours, 1) == kept(1)


def test_two_threads_that_write_one_chunk_do_not_cut_each_other_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write, met = ChunkStore(tmp_path, 10 * FILE), os.writev, threading.Barrier(2, timeout=20)

    def both(to: int, parts: Any) -> int:
        met.wait()
        return write(to, parts)

    monkeypatch.setattr(os, "writev", both)
    threads = [threading.Thread(target=store.write, args=(name(1), data(1))) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found(store, 1) == kept(1) and store.failures == 0 and store.used_bytes == FILE


def test_a_flush_takes_one_tenants_files_or_all(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path, 10 * FILE)
    ids = as_ints([1, 2])
    (ours,), (theirs,) = (chunk_names("s", "n", tenant, ids, 2) for tenant in ("a", "b"))
    for each in (ours, theirs):
        store.write(each, data(1))
    assert store.flush("a") == 1 and ours not in store and theirs in store
    assert store.flush() == 1 and not len(store) and [each.name for each in tmp_path.iterdir()] == ["lock"]


def test_what_is_to_be_kept_no_more_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write, flushed = ChunkStore(tmp_path, 10 * FILE), os.writev, list[bool]()

    def meanwhile(to: int, parts: Any) -> int:
        flushed.append(True)
        store.flush()
        return write(to, parts)

    monkeypatch.setattr(os, "writev", meanwhile)
    assert not store.write(name(1), data(1), lambda: not flushed) and store.failures == 0
    assert name(1) not in store and [each.name for each in tmp_path.iterdir()] == ["lock"]


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "one", FILE)
    for use in (check_directory, lambda folder: ChunkStore(folder, FILE)):
        with pytest.raises(ConfigError, match=r"disk_cache .*/one: another server uses it$"):
            use(tmp_path / "one")
    store.close()
    store.close()
    check_directory(tmp_path / "one")
    check_directory(tmp_path / "one")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"disk_cache .*/file: File exists"):
        check_directory(tmp_path / "file")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="every user of the machine may write there"):
        check_directory(tmp_path / "open")


def test_threads_that_write_and_read_at_once_see_whole_chunks(tmp_path: Path, seed: int) -> None:
    store, wrong = ChunkStore(tmp_path, 6 * FILE), list[int]()

    def work(number: int) -> None:
        rng = random.Random(seed + number)
        for _ in range(200):
            place = rng.randrange(12)
            if rng.random() < 0.5:
                store.write(name(place), data(place))
            elif found(store, place) not in (None, kept(place)):
                wrong.append(place)
            if rng.random() < 0.02:
                store.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and store.failures == 0
    assert store.used_bytes == sum(each.stat().st_size for each in tmp_path.iterdir()) <= 6 * FILE
    assert len(store) == len(list(tmp_path.iterdir())) - 1


def test_names_are_of_all_before_and_of_nothing_behind() -> None:
    def names(ids: list[int], stamp: str = "s", namespace: str = "n", tenant: str = "t") -> list[str]:
        return chunk_names(stamp, namespace, tenant, as_ints(ids), 2)

    first = names([1, 2, 3, 4])
    assert len(first) == 2 and names([1, 2, 3, 4, 5]) == first and names([1, 2]) == first[:1]
    assert names([9, 2, 3, 4])[1] != first[1] and names([1, 2, 3, 9])[0] == first[0]
    others = [names([1, 2], stamp="x"), names([1, 2], namespace="x"), names([1, 2], tenant="x")]
    # No border between two of them can be moved.
    others += [names([1, 2], stamp="sn", namespace=""), names([1, 2], stamp="", namespace="sn")]
    assert len({each for (each,) in others} | {first[0]}) == 6
    # Nor between a salt, which may hold anything, and the tokens.
    salt = "n\0" + as_ints([1, 2]).tobytes()[:-1].decode()
    assert names([3, 4], namespace=salt)[0] not in names([1, 2, 3, 4]) + names([1, 2, 3, 4], namespace="n\0")
    assert names([], "s") == names([1], "s") == []
    ends = [ending_name("s", "n", "t", before, as_ints(tail)) for before, tail in (("", [1]), ("a", [1]), ("a", [2]))]
    assert len({*ends, *first, ending_name("s", "n", "x", "a", as_ints([1]))}) == 6
