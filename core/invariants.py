"""Host-side assertions that stay on in production.

A violated invariant is a bug in this repository, never bad input. It raises, and the engine counts it in
`slipstream_assert_failures_total{check=…}`. The list of names is closed: each one is explained in
`core/INVARIANTS.md`, and a test keeps the two lists equal. Carrying the facts in the error is dask.distributed's idea
(`InvalidTaskState`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

HOST_CHECKS: tuple[str, ...] = (
    "row_alloc_free_list",
    "row_double_free",
    "row_foreign_generation",
    "row_padding_reserved",
    "page_double_free",
    "page_padding_reserved",
    "page_conservation",
    "row_conservation",
    "lease_conservation",
    "host_copy_room",
    "state_slot_double_free",
    "state_slot_conservation",
    "state_snapshot_present",
    "state_draft_room",
    "cross_page_double_free",
    "cross_page_conservation",
    "cross_row_encoded",
    "window_page_conservation",
    "window_page_present",
    "window_page_needed",
    "prefix_lock_balance",
    "prefix_page_alignment",
    "relay_rows_unique",
    "relay_payload_shape",
    "relay_rows_range",
    "resolve_length",
    "executor_depth",
    "executor_renewal",
    "joint_step",
    "expert_layers",
    "still_pools",
    "pools_start_over",
    "result_order",
    "request_state",
    "output_position",
    "bias_in_logits",
    "terminal_once",
    "tenant_books",
    "streams_distinct",
    "adapter_slot_filled",
    "adapter_tokens",
    "adapter_users",
    "adapter_bytes",
    "encoder_length",
)
"""Checks that run on the host. Device checks are named in `core.device.checks.DEVICE_CHECKS`."""

FAILURES: Counter[str] = Counter(dict.fromkeys(HOST_CHECKS, 0))
"""Violations per check since the process started; read by the stats snapshot, written only by `check`."""


class InvariantViolation(AssertionError):
    """An invariant of the engine does not hold. Carries its name and the facts that broke it."""

    def __init__(self, name: str, facts: dict[str, Any]) -> None:
        self.name = name
        self.facts = facts
        told = ", ".join(f"{key}={value!r}" for key, value in facts.items())
        super().__init__(f"invariant {name} does not hold: {told}")


def check(name: str, condition: bool, **facts: Any) -> None:
    """Raise `InvariantViolation(name, facts)` and count it unless `condition` holds.

    Facts are evaluated at every call, so pass values that are at hand, not values that cost work.
    """
    if not condition:
        FAILURES[name] += 1
        raise InvariantViolation(name, facts)
