"""Where a prompt can be gone on from by what files have, of models whose rows hold more than keys. Loop thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.disk.chunk_store import ChunkStore
from core.memory.host_moves import HostCopy
from core.memory.host_prefixes import HeldPrefix, HostPrefixes
from core.memory.usable_prefix import Usable
from core.scheduler.file_names import FileNames
from core.scheduler.trails import Trails
from core.types.arrays import Ints

MOST_ENDS = 4096
"""Pages at whose ends a place to go on from is looked for, from the end of a prompt on: some milliseconds."""


Era = tuple[int, int]
"""How often all was given up, and what one tenant had."""


@dataclass(eq=False, slots=True)
class Fetch:
    """Chunks of `ids` from token `start` on, which are read into `copies`. Nothing finds them until that is over.

    First `reserve`, then `prepare`, then `read`; and then `end`, whichever of them came last.
    """

    ids: Ints
    salt: str
    start: int
    names: list[str]
    ending: bool = False
    """Whether the last of the copies is not of a chunk, but of what is where `ids` end, of rows that hold more."""
    trails: tuple[int, ...] = ()
    """Of as many of the last copies, which are not of chunks: up to which token each has what rows hold beside keys."""
    copies: tuple[HostCopy, ...] = ()
    told: bool = False
    """The device has heard of the copies."""
    era: Era = (0, 0)
    held: HeldPrefix | None = None
    """The chunks before token `start`, which stay in host memory meanwhile: what is read is of no use without them."""

    @property
    def chunks(self) -> int:
        """How many of the names are of chunks; the first ones."""
        return len(self.names) - self.ending - len(self.trails)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is known of a prompt: `names` of its chunks, of which memory has `held`, and memory and files `reach`."""

    ids: Ints
    salt: str
    usable: Usable
    names: list[str]
    held: int
    reach: int


class FilePlaces:
    """Looks for endings, and for chunks that trails lead to."""

    def __init__(
        self,
        store: ChunkStore,
        prefixes: HostPrefixes,
        names: FileNames,
        page_size: int,
        trails: Trails | None,
    ) -> None:
        """`trails`: None where rows hold what is of one place."""
        self._store = store
        self._prefixes = prefixes
        self._names = names
        self._page_size = page_size
        self._trails = trails

    def find(self, ids: Ints, salt: str, usable: Usable, cached: int) -> Fetch | None:
        """What to read for the last place in `ids`, int64[n], where files and memory have all that rows hold.

        None where memory has as much, or the device: `cached` tokens. `usable`: see `usable_prefix`.
        """
        asked = self._asked(ids, salt, usable)
        here = [cached]
        if (ending := self._prefixes.find_ending(ids, usable, salt)) is not None:
            here.append(ending.tokens)
        if self._trails is not None and (trail := self._trails.find(ids, usable, salt)) is not None:
            here.append(trail.tokens)
        found = (self._ending(asked, max(here)), self._trail(asked, max(here)))
        return max((each for each in found if each is not None), key=lambda fetch: len(fetch.ids), default=None)

    def reach(self, ids: Ints, salt: str) -> int:
        """How many tokens of `ids`, int64[n], are in whole chunks that files or memory have, one behind the other."""
        return self._asked(np.append(ids, 0), salt, int).reach * self._prefixes.chunk

    def _asked(self, ids: Ints, salt: str, usable: Usable) -> _Asked:
        chunk, most = self._prefixes.chunk, len(ids) - 1
        names = self._names.chunks(ids[:most], salt)
        held = self._prefixes.peek(ids, most, salt) // chunk
        reach = next((n for n, name in enumerate(names) if n >= held and name not in self._store), len(names))
        return _Asked(ids, salt, usable, names, held, reach)

    def _ending(self, asked: _Asked, here: int) -> Fetch | None:
        chunk, size, ids = self._prefixes.chunk, self._page_size, asked.ids
        first = min(len(ids) - 1, (asked.reach + 1) * chunk) // size * size
        for end in range(first, max(here, first - MOST_ENDS * size), -size):
            name = self._names.ending(ids[:end], asked.salt, asked.names)
            if name is not None and name in self._store and asked.usable(end) == end:
                names = [*asked.names[asked.held : (end - 1) // chunk], name]
                return Fetch(ids[:end], asked.salt, asked.held * chunk, names, ending=True)
        return None

    def _trail(self, asked: _Asked, here: int) -> Fetch | None:
        if self._trails is None:
            return None
        chunk, (_, lacking) = self._prefixes.chunk, self._prefixes.without_trail(asked.ids[:-1], asked.salt)
        for count in range(asked.reach, here // chunk, -1):
            needed = [n for n in range(max(0, count - self._trails.reach), count) if n in lacking]
            names = self._stored(asked, needed)
            if len(names) == len(needed) and asked.usable(count * chunk) == count * chunk:
                return Fetch(
                    asked.ids[: count * chunk],
                    asked.salt,
                    asked.held * chunk,
                    [*asked.names[asked.held : count], *names],
                    trails=tuple((n + 1) * chunk for n in needed),
                )
        return None

    def _stored(self, asked: _Asked, numbers: Sequence[int]) -> list[str]:
        """Names of the trails of chunks `numbers` that are in files."""
        ids, chunk = asked.ids, self._prefixes.chunk
        names = (self._names.trail(ids[: (n + 1) * chunk], asked.salt, asked.names) for n in numbers)
        return [name for name in names if name is not None and name in self._store]
