"""LoRA adapters of all replicas: loaded in all of them, or in none."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from core.errors import AdapterExists, AdapterNotFound, SlipstreamError
from core.types.adapters import AdapterInfo, AdapterList, AdapterLoad
from service.replicas.standing import Members, Standing, in_all


class ReplicaAdapters:
    """What `core.engine.api.Engine` has of adapters. A replica may evict one that others still have."""

    def __init__(self, members: Members, standing: Standing) -> None:
        self._members, self._standing = members, standing

    async def load(self, name: str, path: str, *, pinned: bool) -> AdapterLoad:
        """Load it in all. Where one refuses, those that loaded it unload it again. Raises what the refusal was."""
        return await self._standing.alone(self._load(name, path, pinned))

    async def _load(self, name: str, path: str, pinned: bool) -> AdapterLoad:
        answers, errors = await in_all(self._members, lambda engine: engine.load_adapter(name, path, pinned=pinned))
        # One that another engine has evicted is loaded where it is missing.
        missing = bool(answers) and self._standing.adapters.get(name) == (path, pinned)
        errors = {place: error for place, error in errors.items() if not (missing and isinstance(error, AdapterExists))}
        if errors:
            ready = self._members.ready()
            for place in answers:
                if place in ready:
                    with contextlib.suppress(SlipstreamError):
                        await ready[place].unload_adapter(name)
            raise next(iter(errors.values()))
        self._standing.adapters[name] = path, pinned
        self._standing.unloaded.discard(name)
        loads = list(answers.values())
        evicted = dict.fromkeys(other for load in loads for other in load.evicted)
        return AdapterLoad(loads[0].adapter, tuple(evicted))

    async def unload(self, name: str) -> int:
        """Unload it in all. Returns how many requests use it still. Raises AdapterNotFound where none has it."""
        return await self._standing.alone(self._unload(name))

    async def _unload(self, name: str) -> int:
        answers, errors = await in_all(self._members, lambda engine: engine.unload_adapter(name))
        for error in errors.values():
            if not answers or not isinstance(error, AdapterNotFound):
                raise error
        self._standing.adapters.pop(name, None)
        self._standing.unloaded.add(name)
        return sum(answers.values())

    async def listed(self) -> AdapterList:
        """Those that any replica has, in the order of the first; bytes are those of the replica that has most."""
        answers, errors = await in_all(self._members, lambda engine: engine.list_adapters(), changes=False)
        if not answers:
            raise next(iter(errors.values()))
        lists = list(answers.values())
        found: dict[tuple[str, bool], AdapterInfo] = {}
        for info in (info for each in lists for info in each.adapters):
            key = info.name, info.unloading
            found[key] = _joined(found[key], info) if key in found else info
        return AdapterList(
            tuple(found.values()), max(each.used_bytes for each in lists), min(each.max_bytes for each in lists)
        )


def _joined(one: AdapterInfo, other: AdapterInfo) -> AdapterInfo:
    idle = [each.idle_seconds for each in (one, other) if each.idle_seconds is not None]
    return replace(
        one,
        live_requests=one.live_requests + other.live_requests,
        idle_seconds=min(idle, default=None),
    )
