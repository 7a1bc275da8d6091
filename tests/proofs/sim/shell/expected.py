"""What a request must get, worked out from the request alone: ids, text, ending, vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.sampling.uniform import derive_seed
from core.types.io import FinishReason
from core.types.sampling_params import SamplingParams
from tests.proofs.sim.reference import BASE, answer, blend, link, root
from tests.proofs.sim.shell.device import vector
from tests.proofs.sim.shell.tokens import text_of


@dataclass(frozen=True, slots=True)
class Expected:
    """One output that nothing disturbs."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    matched: str | int | None


def expected(prompt: Sequence[int], params: SamplingParams, index: int, adapter: int | None) -> Expected:
    """Output `index` of the request; `adapter` is None where there can be none, else what it does (0 is none)."""
    assert params.max_tokens is not None and params.seed is not None
    alone = answer(prompt, params, derive_seed(params.seed, index), params.max_tokens, adapter=adapter)
    tokens, skip = alone.tokens, params.skip_special_tokens
    textless = isinstance(alone.matched_stop, int) and not params.include_stop_in_output
    shown = tokens[:-1] if textless else tokens
    for count in range(1, len(shown) + 1) if params.stop else ():
        text = text_of(shown[:count], skip)
        ends = [(at + len(stop), -len(stop), stop) for stop in params.stop if (at := text.find(stop)) >= 0]
        if ends:
            end, _, stop = min(ends)
            cut = end if params.include_stop_in_output else end - len(stop)
            return Expected(tokens[:count], text[:cut], FinishReason.STOP, stop)
    return Expected(tokens, text_of(shown, skip), alone.reason, alone.matched_stop)


def embedded(prompt: Sequence[int], adapter: int | None) -> list[float]:
    """The vector of an input, not normalised."""
    state = root(adapter or BASE)
    for position, token in enumerate(prompt):
        state = link(state, token, position)
    return vector(state if adapter is None else blend(state, adapter))
