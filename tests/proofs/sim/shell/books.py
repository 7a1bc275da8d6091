"""What must be empty when everybody has left: a look into every table that a request, call or stream can be in."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any

from core.engine.api import EngineState
from tests.proofs.sim.oracles import check_pages, check_thoroughly
from tests.proofs.sim.shell.front_end import FrontEnd
from tests.proofs.sim.shell.process import EngineProcess
from tests.proofs.sim.story import Violation


def check_service(process: EngineProcess, front_ends: list[FrontEnd], admissions: list[Any]) -> None:
    """No caller holds anything in the service: whatever was lost on the way."""
    for front_end in front_ends:
        host, engine = front_end.host, front_end.engine
        _empty(f"the host of {front_end.name}", host, "_streams", "_embeds", "_holds", "_calls", "_ready", "_closing")
        _empty(f"the host of {front_end.name}", host._prefixes, "_watches")
        _empty(front_end.name, engine, "_replies", "_streams")
        if engine._unread.bytes:
            raise Violation("books:unread", f"{engine._unread.bytes} unread bytes in {front_end.name}")
    for admission in [*admissions, *(line for gate in process.gates._gates.values() for line in gate._lines)]:
        held = admission.open, admission.waiting, admission._slots._taken
        if any(held):
            raise Violation("books:gates", f"open, waiting and taken are {held}")
    retention = process.retention
    _empty("the retention", retention, "_kept", "_shares", "_timers", "_opening", "_closing")
    if retention.bytes:
        raise Violation("books:retention", f"{retention.bytes} bytes are counted, and nothing is kept")


def check_engine(process: EngineProcess) -> None:
    """No request is left in the engine, and none stands in its turnstile."""
    engine = process.engine
    _empty("the engine", engine, "_live")
    _empty("the engine", engine._arriving, "_ended")
    _empty("the engine", engine._turnstile, "_line")
    if engine._turnstile._passed or engine._turnstile._turning:
        raise Violation("books:turnstile", f"{engine._turnstile._passed} passed, and it turns for ever")
    if engine._outputs._unread.bytes:
        raise Violation("books:unread", f"{engine._outputs._unread.bytes} unread bytes of streams that are gone")
    if not engine._empty.is_set():
        raise Violation("books:empty", "a drain would wait for requests that are not there")
    if len(process.pool):
        raise Violation("books:pool", f"{len(process.pool)} pieces of work in the pool")


def check_pools(process: EngineProcess) -> None:
    """Rows, pages and adapters: everything that the scheduler gave was given back."""
    scheduler, memory = process.engine._scheduler, process.memory
    if len(scheduler.waiting) or len(scheduler.running) or len(scheduler.intake):
        text = f"{len(scheduler.waiting)} wait, {len(scheduler.running)} run, {len(scheduler.intake)} commands"
        raise Violation("books:scheduler", text)
    check_pages(memory)
    check_thoroughly(memory)
    if memory.rows.used or memory.owned_pages() or memory.cache.locked_pages:
        text = f"{memory.rows.used} rows, {memory.owned_pages()} pages, {memory.cache.locked_pages} locked"
        raise Violation("books:pools", f"everybody left, but {text} are held")
    process.table.check_integrity()
    users = [entry for entry in process.table._by_slot.values() if entry.users or entry.unloading]
    if users:
        raise Violation("books:adapters", f"in use or still to go: {users}")
    process.device.settle()


def check_tasks(process: EngineProcess, descriptors: int) -> None:
    """The loop runs this task and no other; what was opened was closed."""
    me = asyncio.current_task()
    left = sorted(task.get_name() for task in asyncio.all_tasks() if task is not me)
    if left:
        raise Violation("books:tasks", f"still running: {', '.join(left)}")
    if descriptors:
        raise Violation("books:descriptors", f"{descriptors} are open")
    if process.engine.state is not EngineState.STOPPED:
        raise Violation("books:state", f"stopped, and says {process.engine.state}")


def _empty(where: str, owner: Any, *names: str) -> None:
    for name in names:
        table: Sized = getattr(owner, name)
        if len(table):
            raise Violation(f"books:{name.strip('_')}", f"{where} still has {table}")
