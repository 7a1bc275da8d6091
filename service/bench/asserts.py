"""`slipstream bench asserts`: what the device checks of one decode step cost, off, counting and trapping."""

from __future__ import annotations

import json
import statistics
import time

import click
import torch

from core.device.checks import AssertMode, DeviceChecks
from core.device.streams import resolve_device

ROWS = (1, 64, 256)
POOL_ROWS = 1024
STEP_SECONDS = 0.005
"""The step with which costs are compared: the goal is COUNT below 0.5 % of it."""
STEPS, ROUNDS = 300, 15
"""Steps of a round, and rounds of each mode."""
WARM_UP = 20
"""Steps of each mode before the first round."""


class CheckedRelay:
    """The device work of a decode step's checks, with the stash that makes the next step's read legal."""

    def __init__(self, mode: AssertMode, rows: int, device: torch.device) -> None:
        self._checks = DeviceChecks(mode, device)
        self._buffer = torch.zeros(POOL_ROWS + 1, dtype=torch.int64, device=device)
        self._rows = torch.randperm(POOL_ROWS, generator=torch.Generator().manual_seed(0))[:rows].to(device) + 1
        self._lens = torch.full((rows,), 100, device=device)
        self._violated = torch.zeros(POOL_ROWS + 1, dtype=torch.int64, device=device)
        self._synchronize = torch.get_device_module(device).synchronize

    @torch.inference_mode()
    def seconds_per_step(self, steps: int) -> float:
        """Mean seconds over `steps` steps back to back, until the device has done them.

        All modes read and stash; they differ only in their checks. On the CPU, trapping engines also look for duplicate
        rows, which is not measured here.
        """
        tokens = self._one_step(self._rows)
        self._synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            tokens = self._one_step(tokens)
        self._synchronize()
        elapsed = time.perf_counter() - began
        assert not self._checks.counters.any(), "the bench itself violates nothing"
        return elapsed / steps

    def _one_step(self, tokens: torch.Tensor) -> torch.Tensor:
        self._buffer.index_copy_(0, self._rows, tokens)
        violated = self._violated[: len(self._rows)]
        self._checks.expect_same(self._lens, self._lens, violated)
        read = self._checks.consume(self._buffer, self._rows, violated)
        self._checks.snapshot(violated)
        return read


def check_costs(rows: int, device: torch.device, steps: int, rounds: int) -> dict[AssertMode, float]:
    """Median seconds per step by mode. Modes take turns, so that other work of this machine affects all alike."""
    relays = {mode: CheckedRelay(mode, rows, device) for mode in AssertMode}
    for relay in relays.values():
        relay.seconds_per_step(WARM_UP)
    taken: dict[AssertMode, list[float]] = {mode: [] for mode in AssertMode}
    for _ in range(rounds):
        for mode, relay in relays.items():
            taken[mode].append(relay.seconds_per_step(steps))
    return {mode: statistics.median(times) for mode, times in taken.items()}


@click.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--steps", default=STEPS, show_default=True, help="Steps per round.")
@click.option(
    "--rounds", default=ROUNDS, show_default=True, help="Rounds of each mode, interleaved; medians are reported."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def asserts(device: str, steps: int, rounds: int, as_json: bool) -> None:
    """What the device checks cost per decode step: off, counting (the default of the server), trapping.

    Only the relay's reads and their checks are run, without a model, so a few microseconds can be told apart.
    """
    torch.set_num_threads(1)
    chosen = resolve_device(device)
    costs = {rows: check_costs(rows, chosen, steps, rounds) for rows in ROWS}
    figures = {rows: check_figures(by_mode) for rows, by_mode in costs.items()}
    click.echo(f"device checks of one decode step on {chosen.type}, medians of {rounds} rounds of {steps} steps")
    click.echo(f"  {'rows':>5}  {'off':>9}  {'count':>9}  {'trap':>9}  {'count costs':>12}  {'trap costs':>12}")
    for rows, each in figures.items():
        click.echo(
            f"  {rows:5d}  {each['off_us']:6.1f} µs  {each['count_us']:6.1f} µs  {each['trap_us']:6.1f} µs"
            f"  {each['count_percent']:10.2f} %  {each['trap_percent']:10.2f} %"
        )
    click.echo(f"costs: over off, of a step of {STEP_SECONDS * 1000:g} ms")
    if as_json:
        click.echo(json.dumps({"device": chosen.type, "rows": figures}))


def check_figures(by_mode: dict[AssertMode, float], step_seconds: float = STEP_SECONDS) -> dict[str, float]:
    """Microseconds per step by mode, and the cost over OFF in per cent of a step of `step_seconds`."""
    off = by_mode[AssertMode.OFF]
    figures = {f"{mode.value}_us": round(seconds * 1e6, 2) for mode, seconds in by_mode.items()}
    for mode in (AssertMode.COUNT, AssertMode.TRAP):
        figures[f"{mode.value}_percent"] = round((by_mode[mode] - off) / step_seconds * 100, 3)
    return figures
