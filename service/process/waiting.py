"""How the threads of torch's OpenMP wait for their next operation: asleep, where they would spin.

A thread that spins behind an operation of torch keeps a core from the threads that multiply next (`team.h`): two of
those then got what one gets alone. Two cores of a Zen 4 embedded and judged 1.2 times as many texts with
threads that sleep; decoders that transformers computes were as fast either way.
"""

from __future__ import annotations

import os

POLICY = "OMP_WAIT_POLICY"
ASLEEP = "passive"
_MARK = "SLIPSTREAM_SETS_OMP_WAIT_POLICY"
"""Tells processes that this one starts that the policy is not the operator's."""


def have_threads_sleep() -> None:
    """Set it for this process, before torch is imported, and for those that it starts, unless the operator has."""
    if POLICY not in os.environ:
        os.environ |= {POLICY: ASLEEP, _MARK: "1"}


def environment_of_others() -> dict[str, str]:
    """The environment for a program that is not this one: a peer's threads wait as they would without us."""
    ours = {POLICY, _MARK} if _MARK in os.environ else set()
    return {name: value for name, value in os.environ.items() if name not in ours}
