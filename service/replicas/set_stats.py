"""The snapshot of a server with several engines: theirs together, and a few figures of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.types.control import Activity
from core.types.stats import EngineStats, PoolStats, ReplicaStats
from service.metrics.collector import KV_POOL
from service.replicas.merged_stats import merged
from service.replicas.replica import Replica
from service.replicas.replica_control import ReplicaControl
from service.replicas.router import Book


class SetStats:
    """Made anew only when a replica has told something. Any thread may ask."""

    def __init__(self, replicas: Sequence[Replica], books: Sequence[Book], control: ReplicaControl) -> None:
        self._replicas, self._books, self._control = replicas, books, control
        self._made: tuple[list[object], EngineStats] = ([], EngineStats())
        """What the last one was made of, and it: one tuple, so that no thread sees the parts of two."""

    def now(self) -> EngineStats:
        """All replicas together. Without one that is sent requests, the server refuses them."""
        replicas = self._replicas
        of: list[object] = [part for each in replicas for part in (each.engine.stats, each.past, each.ready)]
        made_of, found = self._made
        if len(of) != len(made_of) or any(new is not old for new, old in zip(of, made_of)):
            serving = [each.engine.stats for each in replicas if each.serving]
            found = merged(serving, merged([each.past for each in replicas]))
            if not any(each.ready for each in replicas):
                found = replace(found, activity=Activity.REFUSING)
            self._made = of, found
        each = tuple(_of_one(replica, book) for replica, book in zip(replicas, self._books, strict=True))
        return replace(
            found,
            replicas=each,
            weight_updates=self._control.updates,
            weight_update_failures=self._control.failures,
        )


def _of_one(replica: Replica, book: Book) -> ReplicaStats:
    # What an engine that has ended told last is not so any more.
    stats = replica.engine.stats if replica.alive else EngineStats()
    kv = next((pool for pool in stats.pools if pool.name == KV_POOL), PoolStats(KV_POOL, 0, 0))
    return ReplicaStats(
        name=str(replica.place),
        ready=replica.ready,
        running=stats.running,
        waiting=stats.waiting,
        kv_used=kv.used,
        kv_capacity=kv.capacity,
        requests=book.routed,
        matched=book.matched,
        restarts=replica.restarts,
    )
