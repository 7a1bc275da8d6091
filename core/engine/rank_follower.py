"""What each further rank of an engine is: it loads its share, proves it as the first one does, and follows.

It makes what `core.engine.build` makes on rank 0, without what plans and answers: each step there has its own here.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from core.attention.registry import build_attention
from core.config import EngineConfig
from core.device.checks import AssertMode, DeviceChecks
from core.device.staging import Staging
from core.device.streams import DeviceStreams, resolve_device
from core.distributed.drafts import FollowingGrid, FollowingSpeculator
from core.distributed.follower import FollowingSampling, follow
from core.distributed.meeting import Meeting
from core.distributed.world import World, is_loss
from core.engine.build_pools import build_arena, build_pools
from core.engine.kv_storage import check_kv_format
from core.engine.math_threads import use_threads
from core.engine.rank_settings import captures, check_alike, ring_of, sized_by
from core.engine.speculation import build_source, way_of, why_no_speculation
from core.engine.step_times import time_steps
from core.errors import StartupError
from core.executor.decode_graphs import graph_sizes
from core.executor.device_state import DeviceState
from core.executor.mixed_graphs import chunk_tokens
from core.executor.step import StepRunner
from core.executor.verification import Verification
from core.models.attention_proof import prove_attention, prove_codes
from core.models.loader import load_model
from core.parent import end_with_parent
from core.relay.future_map import FutureMap
from core.sampling.registry import build_sampler

logger = logging.getLogger(__name__)

LOST_CODE: Final = 1
"""With which a rank exits that has lost the first one: another start may go well."""


def be_started(config: EngineConfig, rank: int, meeting: Meeting) -> None:
    """Be rank `rank`, started by another process of this machine, to its end."""
    for each in (signal.SIGINT, signal.SIGTERM):
        # Sent to a whole group they are for the leader, which drains first and then ends this rank.
        signal.signal(each, signal.SIG_IGN)
    if config.nodes.node_rank:
        # On the first machine a thread starts it that has ended before; there it hears of the end by its connection.
        end_with_parent()
    be_rank(config, rank, meeting)


def be_rank(
    config: EngineConfig,
    rank: int,
    meeting: Meeting,
    joined: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Be rank `rank` of the engine of `meeting`, to its end: whether rank 0 has said that it is.

    `joined` is called once all ranks have met, and `check` while this one waits for that; it raises where that is in
    vain. Raises StartupError where they do not, or this one cannot be loaded.
    """
    device = resolve_device(config.executor.device)
    if device.type == "cuda":
        # By which `transformers` takes a device: without it the first, on every rank.
        local = config.nodes.device_of(rank, config.model.ranks)
        os.environ["LOCAL_RANK"] = str(local)
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    use_threads(config)
    world = World.join(rank, config.model.ranks, meeting, device, check)
    joined()
    try:
        if config.nodes.nnodes > 1:
            check_alike(config, device, world)
            world.beat().end_when_silent(end_now)
        follow(_following(config, device, world), world, partial(_pinned, Staging(device)))
        world.say_ended()
    except StartupError as error:
        # A library that a lost connection interrupts may say anything of the model.
        told = StartupError("another rank was lost while this one was loaded") if is_loss(error) else error
        # Said by the leader too, which waits for this rank.
        world.fail(str(told))
        raise told from error
    except RuntimeError as error:
        # The leader is gone, and has told its clients why.
        logger.error("rank %d ends: %s", rank, str(error).partition("\n")[0])
        return False
    finally:
        world.leave()
    return True


def end_now() -> None:
    """End this process at once. No exception reaches a thread that waits for another machine."""
    logging.shutdown()
    os._exit(LOST_CODE)


def _pinned(staging: Staging, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` where the device copies from: ids as a step stages them, matrices of adapters in memory of their own."""
    if tensor.dtype == torch.int64:
        return staging.pinned([tensor.numpy()])
    return tensor.pin_memory() if staging.pins else tensor.clone()


def _following(config: EngineConfig, device: torch.device, world: World) -> StepRunner:
    """What `core.engine.build` makes on rank 0, without what plans and answers: each step there has its own here."""
    ring = ring_of(config, world)
    model = load_model(config.model, device, keeps_modules=True, ring=ring)
    streams = DeviceStreams(device)
    executor = config.executor
    attention = build_attention(executor.attention_backend, device, config.model.deterministic)
    format = check_kv_format(config, model.spec, type(attention))
    prove_attention(model, attention)
    prove_codes(model, attention, format)
    method, way = config.speculation.method, way_of(device)
    source = build_source(config, model, streams, why_no_speculation(model.spec, way, method, type(attention)))
    most = 0 if source is None else config.speculation.max_drafts
    config = dataclasses.replace(config, memory=sized_by(world.receive(), config.memory))
    pools = build_pools(config, model, streams, most)
    attention = build_attention(executor.attention_backend, device, config.model.deterministic)
    model.bind(pools.kv, attention, pools.companions)
    checks = DeviceChecks(AssertMode(executor.assert_mode), device)
    following: Callable[[DeviceState], Verification] | None = None
    if source is not None:
        following = partial(FollowingGrid, world, most=most) if way.is_grid else partial(FollowingSpeculator, world)
    runner = StepRunner(
        DeviceState(
            pool=pools.requests,
            kv_pool=pools.kv,
            future_map=FutureMap(pools.requests, streams, checks, ()),
            checks=checks,
            streams=streams,
            staging=Staging(device),
            model=model,
            sampler=build_sampler(model.spec.vocab_size, device),
            host=None if pools.host is None else build_arena(pools, streams),
            companions=pools.companions,
            attention=attention,
            graph_sizes=graph_sizes(config.memory.max_running_requests) if captures(config) else (),
            graph_tokens=chunk_tokens(config.scheduler.prompt_tokens) if captures(config) else (),
            share=world.share if ring is None else None,
            alone=False,
            sampling=FollowingSampling(),
            verification=following,
        )
    )
    if following is not None:
        # As rank 0 does, which has use for the figures.
        time_steps(runner.state, pools.memory.draft_room)
    return runner
