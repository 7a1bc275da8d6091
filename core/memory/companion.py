"""The interface of what requests hold beside KV pages: pools with their own capacity and device side, and adapters.

There are four companions: recurrent states, windowed pages, cross-attention pages, and the adapter slots of rows, which
have no capacity here. A request takes and returns all of them when it takes and returns its row, and each may limit how
much of a cached prefix can be used. `RequestMemory` calls every companion at those moments, so "all or nothing" and
"freed once" stay properties of that one file. This is composition instead of SGLang's diamond of HybridReqToTokenPool
over ReqToTokenPool.

What outlives a request is keyed by a KV page. A page stands for the whole prefix up to its end, so a state snapshot or
a windowed page is dropped when its KV page is freed, and needs no tree of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from core.device.recorder import Recorder
from core.device.staging import Staging
from core.types.arrays import Ints
from core.types.stats import PoolStats

Writes = Mapping[str, object]
"""By companion name: what its device side must apply before the step that carries it computes. Host arrays, which never
change, in a class that only the two sides of that companion read."""


@dataclass(frozen=True, slots=True, eq=False)
class AdmissionFacts:
    """What every companion is told of a request that is to get a row."""

    tokens: int
    """Known tokens: its prompt, and the outputs from before it was retracted."""
    cached: Ints
    """int64[k]: cached pages that it reuses."""
    known: int
    """Pages of its tokens that the prefix cache or host memory holds, including those behind `cached` that some
    companion could not resume from (known >= k)."""
    encoder_tokens: int = 0
    """Tokens of the encoder's input; 0 for a model without encoder."""
    adapter_slot: int = 0
    """Slot of its LoRA adapter; 0 without one."""


class Companion(Protocol):
    """Host side of one more pool. All calls come from the loop thread; none touches the device (law 2)."""

    @property
    def name(self) -> str:
        """Key of its device side and of its writes; also the pool's name in statistics."""
        ...

    def resumable(self, pages: Ints) -> int:
        """How many of the cached `pages` (int64[k], a prefix in order) a request can skip computing: 0..k."""
        ...

    def fits_alone(self, total_tokens: int, encoder_tokens: int) -> bool:
        """Whether the empty pool could serve a request of `total_tokens` to its end: the check at entry.

        `encoder_tokens`: tokens of the encoder's input; 0 for a model without encoder.
        """
        ...

    def can_admit(self, facts: AdmissionFacts) -> bool:
        """Whether there is room for the request.

        May give up what no running row uses, but nothing that the pages of `facts.cached` need. After True, `admitted`
        must succeed.
        """
        ...

    def would_admit(self, facts: AdmissionFacts, leaving: Ints) -> bool:
        """What `can_admit` will answer once the owners of rows `leaving`, int64[k], have given them back.

        Mutates nothing.
        """
        ...

    def admitted(self, row: int, facts: AdmissionFacts) -> None:
        """`row` has a new owner; `facts` are those of the `can_admit` just before."""
        ...

    def planned(
        self, rows: Ints, prefix_lens: Ints, extend_lens: Ints, pages: Ints, ahead: Ints | None = None
    ) -> object | None:
        """The step being planned computes tokens [prefix, prefix + extend) of `rows`, int64[B] each.

        `pages`: int64[B, width], the KV pages of each row in the order of its tokens. `ahead`, int64[B]: how many
        tokens more a row may have once the step is over, by drafts that prove right in this step or in one before it,
        so that its tokens may begin later and be more; None where speculation is off. Returns this companion's entry
        of `Writes`, or None. Must not fail for want of room: admission has charged the worst case.
        """
        ...

    def released(self, row: int) -> None:
        """The owner of `row` ends or is retracted. Called before the row is freed."""
        ...

    def replaced(self, pages: Ints, originals: Ints) -> None:
        """`pages[i]` duplicates the cached page `originals[i]`, int64[n] each; `pages` are freed next.

        What was kept for a page may pass to its original, if nothing is kept for that one.
        """
        ...

    def freed(self, pages: Ints) -> None:
        """The KV `pages`, int64[n], have no owner any more: drop what was kept for them."""
        ...

    def stats(self) -> tuple[PoolStats, ...]:
        """Capacity and occupancy of its pools; empty without a capacity."""
        ...

    def check_integrity(self) -> None:
        """Recompute every count and owner; raises InvariantViolation naming what is off."""
        ...


@runtime_checkable
class Drafting(Protocol):
    """A companion that holds what drafts leave behind until it is known which are right, for so many of them."""

    @property
    def draft_room(self) -> int:
        """The most drafts that all rows of a step may verify together."""
        ...


@runtime_checkable
class Portable(Protocol):
    """A companion of which another engine needs something beside a prefix's keys to go on behind it."""

    name: str

    def resumable(self, pages: Ints) -> int:
        """See `Companion`."""
        ...

    def slots_for(self, pages: int) -> int:
        """How many slots of its storage go along with a prefix of so many KV pages."""
        ...

    def leaves(self, pages: Ints) -> Ints | None:
        """int64[n]: the slots that go along with the prefix in KV `pages`, int64[k]; None where one is gone."""
        ...

    def resumes(self, row: int, pages: Ints) -> Ints:
        """`row`, admitted just now with nothing cached, goes on behind its first KV `pages`, int64[k].

        Returns int64[n]: the slots that are filled before its first step, in the order of `leaves`.
        """
        ...


@runtime_checkable
class Trailing(Portable, Protocol):
    """A `Portable` of which a prefix needs what belongs to its last tokens, so that it can be kept piece by piece."""

    @property
    def trail(self) -> int:
        """How many of the last KV pages of a prefix it needs something of, at most."""
        ...

    def slots_of(self, pages: Ints) -> Ints | None:
        """int64[n]: the slots of KV `pages`, int64[k], in their order; None where one is gone."""
        ...


def resumed_by(pools: Sequence[Portable], pages: Ints) -> Ints:
    """The longest prefix of `pages`, int64[k], behind which all `pools` can go on."""
    count = -1
    # A prefix cut for one pool may end where another cannot go on: repeat until all agree.
    while len(pages) and count != len(pages):
        count = len(pages)
        pages = pages[: min(pool.resumable(pages) for pool in pools)]
    return pages


@runtime_checkable
class Growing(Protocol):
    """A companion that charges a row again for each new KV page. Other companions charge a row once, at admission."""

    def can_grow(self, rows: Ints) -> bool:
        """Whether each of `rows`, int64[n], all different, can get one more KV page. After True, `grown` must succeed.

        Mutates nothing.
        """
        ...

    def grown(self, rows: Ints) -> None:
        """Each of `rows` got a KV page; the argument is that of the `can_grow` just before."""
        ...


class DeviceCompanion(Protocol):
    """Device side of one more pool, known to the model that reads it. Forward stream only (law 2)."""

    recorder: Recorder | None

    @property
    def storage(self) -> Sequence[torch.Tensor]:
        """Tensors that hold nothing while no request has a row: their memory may be lent meanwhile."""
        ...

    def begin(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """First thing in every step: apply `writes` (None: there are none) for the step's `rows`, int64[B]."""
        ...


@runtime_checkable
class Carried(Protocol):
    """A device companion whose arrays travel with the inputs of the step, in one transfer."""

    def carried(self, writes: object | None, replayed: bool) -> Sequence[np.ndarray]:
        """Host arrays, of any dtype, that it is going to upload for `writes`: those very objects.

        Before `apply` of a step that is `replayed`, before `begin` of any other. Changes nothing on the device.
        """
        ...


@runtime_checkable
class LateBound(Protocol):
    """A device companion that must know what a step computes exactly, where a plan knows bounds: with speculation only.

    Forward stream only (law 2).
    """

    def measured(self, prefix_lens: Ints, extend_lens: Ints, staging: Staging) -> None:
        """After `begin`, right before the model runs: the step computes tokens [prefix, prefix + extend) of its rows.

        int64[B] each, on the host, in the order of the batch. Of a row that decodes `prefix` is all that proved right
        before the step, and `extend` its newest token and the drafts behind it. Of a grid the host knows the places of
        each row alone, which are `extend`, and `prefix` is empty. Not called where speculation is off: the lengths of
        the plan are exact there.
        """
        ...


@runtime_checkable
class Judged(Protocol):
    """A device companion that drafts change where nothing is written twice: it must learn which were right.

    Forward stream only (law 2).
    """

    def judged(self, counts: Ints, staging: Staging) -> None:
        """Last thing in a step that verified drafts: of row i the first `counts[i]` tokens of the step count.

        int64[B], on the host, in the order of the batch, each 1 to the number of tokens that the step computed.
        """
        ...


@runtime_checkable
class Captured(Protocol):
    """A device companion whose look-ups for decode rows are part of captured steps, and so happen in each replay.

    Forward stream only (law 2).
    """

    def apply(self, rows: torch.Tensor, writes: object | None, staging: Staging) -> None:
        """First thing in a step that is replayed, instead of `begin`: apply `writes`, and look nothing up.

        `rows`: int64[B], without padding, in memory that the next step overwrites.
        """
        ...

    def look_up(self, rows: torch.Tensor) -> None:
        """First thing in the captured work: what `begin` sets for a step of one token a row, for `rows`, int64[n].

        Reads device tensors alone, and keeps them where later steps find them; padded rows are 0.
        """
        ...

    def replayed(self) -> None:
        """Right behind the replay: what `apply` was told of and the captured work does not do."""
        ...


@runtime_checkable
class Rehearsed(Protocol):
    """A device companion that must be told of each step that a model computes, those of padding included."""

    def padding(self, extend_lens: Ints, encoder_tokens: int) -> object | None:
        """What `begin` is told of a step whose rows are all row 0, int64[B]: how many tokens each of them computes.

        `encoder_tokens`: those of the input that the step encodes, into slot 0. Such a step changes nothing that rows
        with an owner read (law 6).
        """
        ...


@runtime_checkable
class Hooking(Protocol):
    """A device companion that adds to what layers compute in steps that ask for it, so that these are captured apart.

    Forward stream only (law 2).
    """

    def prepare(self, rows: int, staging: Staging) -> str | None:
        """Make what captured steps of up to `rows` rows read; None, or why they cannot be, as the end of a sentence."""
        ...

    def recording(self, size: int) -> AbstractContextManager[None]:
        """Within, the layers compute what decode steps of `size` rows that ask for it compute, padding included."""
        ...

    def recorded(self, writes: Writes) -> bool:
        """Whether what was captured within `recording` computes a decode step with these writes, of all companions."""
        ...
