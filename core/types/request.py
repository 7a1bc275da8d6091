"""One output being generated: what the scheduler knows of it. The loop thread owns it, no other thread sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from core.invariants import check
from core.types.grammar import Grammar
from core.types.handover import Kept
from core.types.image import NO_IMAGES, PromptImages
from core.types.io import Pooling
from core.types.sampling_params import SamplingParams


class RequestState(Enum):
    """WAITING in the queue, RUNNING with a row, FINISHED with its terminal emitted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_LEGAL = {
    (RequestState.WAITING, RequestState.RUNNING),
    (RequestState.RUNNING, RequestState.WAITING),
    (RequestState.WAITING, RequestState.FINISHED),
    (RequestState.RUNNING, RequestState.FINISHED),
}


@dataclass(slots=True, eq=False)
class Req:
    """One sequence. A `GenerateRequest` with n outputs becomes n of these, alike but for `index` and `seed`.

    While it runs, its tokens are in the scheduler's arrays under `row`; `outputs` is updated when the row is given back
    (retraction, end). Requests are compared by object, never by the client's id, which may be used again.
    """

    request_id: str
    index: int
    prompt: npt.NDArray[np.int64]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    """At least 1; already cut to the context and to what the pool can ever hold. 0 for an embedding."""
    salt: str = ""
    adapter_slot: int = 0
    """Slot of the LoRA adapter; 0 is none."""
    encoder_ids: npt.NDArray[np.int64] | None = None
    """Of an encoder-decoder: the client's input, which the encoder reads; `prompt` is then the decoder's start."""
    encoder_features: npt.NDArray[np.float32] | None = None
    """Of an encoder that reads sound: [mels, frames]; `encoder_ids` then only say how many tokens it makes of it."""
    not_first: tuple[int, ...] = ()
    """Tokens that the output does not begin with."""
    images: PromptImages = NO_IMAGES
    """Images in the prompt."""
    forced_first: tuple[int, ...] = ()
    """The first output is one of these; empty for a free choice."""
    forced_last: tuple[int, ...] = ()
    """The output that reaches `max_new_tokens` is one of these; empty for a free choice."""
    grammar: Grammar | None = None
    """The compiled constraint that the output must match; other requests may share it."""
    tenant: str = ""
    """The machine is shared among tenants; requests of one tenant are ordered by the policy."""
    weight: float = 1.0
    """Share of the tenant relative to other tenants that want to run; above 0."""
    priority: int = 0
    """A class within the tenant; a lower value is a higher class."""
    deadline: float | None = None
    queue_deadline: float | None = None
    arrived_at: float = 0.0
    trace_id: str = ""
    """Id of the sampled trace that the request belongs to; empty if there is none."""
    sink: object = None
    """Where the output processor puts its tokens; the scheduler passes it through and never looks inside."""

    kept: Kept | None = None
    """Where the keys of its prompt are handed over, for another engine to decode."""
    speculative: bool = True
    """Whether the client lets drafts of its tokens be made."""
    pooling: Pooling | None = None
    """Set for an embedding: its prompt is prefilled, nothing is sampled, and its result is `vector`."""
    vector: npt.NDArray[np.float32] | None = None
    whole: bool = False
    """Whether its prompt is computed in one step, however long it is, since tokens see what comes behind them."""

    sequence: int = -1
    """Arrival number, given by intake; ties in every policy are broken by it."""
    state: RequestState = RequestState.WAITING
    row: int = 0
    """0 while no row is owned."""
    generation: int = -1
    outputs: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache at the first admission."""
    computed_from: int = 0
    """The least number of cached tokens that any of its admissions reused. The request itself may have computed any
    token after these.
    """
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    """Updated when the row is given back, like `outputs`."""
    draft_tokens: int = 0
    """Drafts that steps verified for it; updated when the row is given back, like `outputs`."""
    accepted_draft_tokens: int = 0
    """How many of its `outputs` were drafts."""
    scored: int = 0
    """Prompt tokens behind the first whose log probabilities were told."""
    passed_over: int = 0
    """How often a younger request was admitted before this one."""
    retractions: int = 0

    @property
    def prompt_len(self) -> int:
        """Tokens of the original prompt; outputs recomputed after a retraction do not count."""
        return len(self.prompt)

    @property
    def input_len(self) -> int:
        """Tokens that the client sent: those of the encoder, if there is one, else the prompt."""
        return self.prompt_len if self.encoder_ids is None else len(self.encoder_ids)

    @property
    def encoder_len(self) -> int:
        """Tokens of the encoder's input; 0 for a model without an encoder."""
        return 0 if self.encoder_ids is None else len(self.encoder_ids)

    @property
    def scores(self) -> bool:
        """Whether log probabilities of its prompt are still to be told. Outputs share a prompt: the first one tells."""
        return self.params.prompt_logprobs is not None and self.index == 0 and self.scored < self.prompt_len - 1

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached tokens may be skipped. The cache has keys and values, and neither hidden states nor logits."""
        return self.pooling in (None, Pooling.LAST, Pooling.LABELS) and not self.scores

    def usable(self, tokens: int) -> int:
        """How many of its first `tokens` may come from the prefix cache: none, or as many as end within no image."""
        return self.images.outside(tokens) if self.reuses_prefix else 0

    @property
    def speculates(self) -> bool:
        """Whether steps may verify drafts of its tokens, and its text may draft for other requests of its scope."""
        return self.speculative and self.pooling is None

    def known_ids(self) -> npt.NDArray[np.int64]:
        """int64[n]: prompt and outputs so far, i.e. what a (re-)admission must have in the pools. Not while running."""
        check("request_state", self.row == 0, state=self.state, row=self.row)
        return np.concatenate([self.prompt, self.outputs.astype(np.int64)]) if len(self.outputs) else self.prompt

    def move_to(self, state: RequestState) -> None:
        """Change the state. Raises InvariantViolation for an illegal change, as for a second end (law 11)."""
        if state is RequestState.FINISHED:
            check("terminal_once", self.state is not RequestState.FINISHED, request_id=self.request_id)
        check("request_state", (self.state, state) in _LEGAL, source=self.state, target=state)
        self.state = state
