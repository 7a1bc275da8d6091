"""One step on the device, from a frozen batch to results on their way to the host. The same code for every executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from core.batch.forward_batch import ForwardBatch
from core.batch.hidden import NO_HIDDEN
from core.batch.result import Published
from core.batch.schedule_batch import ScheduleBatch
from core.device.event import Event
from core.device.shortage import MEMORY_ERRORS, is_out_of_memory
from core.device.staging import Staging
from core.device.timer import Mark
from core.executor.computed import Begun, Computed
from core.executor.decode_graphs import DecodeInputs, Replays, capture_decode_graphs
from core.executor.device_state import DeviceState
from core.executor.exhaustion import embedded, out_of_memory, told_of_prompts
from core.executor.fetching import fetch
from core.executor.grid_graphs import capture_grid_graphs
from core.executor.launched_step import RESULTS, SAMPLED, LaunchedStep
from core.executor.mixed_graphs import capture_mixed_graphs
from core.executor.pooling import Pooler
from core.executor.rehearsal import rehearse
from core.executor.rejoining_rows import bring_back
from core.executor.sampling_step import SampledRows, SamplingStep
from core.executor.scorer import score
from core.executor.step_inputs import StepInputs, carried, sampled_places
from core.executor.step_lanes import StepTracer
from core.executor.verification import Attempt
from core.memory.companion import Captured, Judged, LateBound
from core.memory.host_moves import CopyOut
from core.relay.payload import RelayPayload
from core.relay.resolve import DecodeRows, resolve_forward_inputs
from core.speculation.verification import Outcome, Tried

NO_CAPTURED: Final[Mapping[str, Captured]] = MappingProxyType({})


class StepRunner:
    """Runs steps in order on one thread (law 2); `launch` returns as soon as the device has the work."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._recorder = state.pool.recorder = state.kv_pool.recorder = state.streams.recorder
        # Pools and weights were filled on the default stream, which the forward stream does not wait for.
        state.streams.synchronize()
        for companion in state.companions.values():
            companion.recorder = self._recorder
        self._sampling = state.sampling or SamplingStep(state.pool, state.sampler, RESULTS, self._recorder)
        self._pooler = Pooler(state.pool, state.head)
        self._speculator = None if state.verification is None else state.verification(state)
        # Without drafts a plan's lengths are exact, and have come with the companions' writes.
        found = () if self._speculator is None else state.companions.values()
        self._late_bound = tuple(companion for companion in found if isinstance(companion, LateBound))
        self._judged = tuple(companion for companion in found if isinstance(companion, Judged))
        self._captured = {name: each for name, each in state.companions.items() if isinstance(each, Captured)}
        self._hidden = NO_HIDDEN if self._speculator is None else self._speculator.needs_hidden
        self._previous_end: Mark | None = None
        self._tracer = StepTracer(state.lanes)
        self._is_compiled = not state.streams.at_once
        """Whether compiled code works for the host, or never will."""
        rehearse(state, self._speculator)
        self.graphs = capture_decode_graphs(state, state.graph_sizes, state.attention)
        self.grids = capture_grid_graphs(state, self.graphs, self._speculator)
        self.mixed = capture_mixed_graphs(state, self.graphs, self._speculator)

    @property
    def state(self) -> DeviceState:
        """What its steps read and write: for the forward thread, and before that has begun."""
        return self._state

    @torch.inference_mode()
    def launch(
        self,
        batch: ScheduleBatch,
        computing: Callable[[], None] = lambda: None,
        published: Callable[[Published], None] = lambda _: None,
    ) -> LaunchedStep:
        """Launch one step: table writes, input resolution, forward pass, sampling, relay, copies to the host.

        `computing` is called right before the forward pass, during which other threads can have the interpreter.
        `published` is told the lengths of a step that may verify drafts, before it makes new drafts. Raises
        StepOutOfMemory when memory is short for work that cannot be split. What the step has written by then is not
        read again.
        """
        try:
            return self._launch(batch, computing, published)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(error, batch, self._state.streams.device) from error

    def _launch(
        self, batch: ScheduleBatch, computing: Callable[[], None], told: Callable[[Published], None]
    ) -> LaunchedStep:
        return self._end(self._begin(batch, computing), told)

    def _begin(self, batch: ScheduleBatch, computing: Callable[[], None]) -> Begun:
        """The first half of a step, up to its logits."""
        state = self._state
        if not self._is_compiled and (module := state.host_code.module) is not None:
            self._compile(module)
        with state.streams.on_forward():
            if self._recorder is not None:
                self._recorder.step(batch)
            began = state.streams.mark()
            lanes = self._tracer.begin(batch, began)
            done = self._compute(batch, computing)
            # Here, because the rows that the next step enters take the place of these.
            return Begun(batch, began, lanes, done, state.future_map.snapshot(batch.num_decode))

    def _end(self, begun: Begun, told: Callable[[Published], None]) -> LaunchedStep:
        """The second half: what is made of the logits."""
        state, batch, done, lanes, counted = self._state, begun.batch, begun.done, begun.lanes, begun.counted
        with state.streams.on_forward():
            sample_rows, sample_lens = self._places(batch, done)
            rows = self._sampling.sample(done.logits, batch, sample_lens, done.trial)
            sampled = rows.output
            if state.share is not None:
                state.share(sampled.tokens)
            if self._recorder is not None:
                self._recorder.wrote(SAMPLED, (batch.step_id,))
            published, outcome, drafting = self._relay(batch, done, sample_rows, sample_lens, rows, told)
            self._sampling.append(sample_rows, sample_lens, sampled.tokens, batch)
            ended = state.streams.mark()
        previous_end, self._previous_end = self._previous_end, ended
        coming = fetch(
            *(state.streams, self._recorder, batch.step_id, sampled, counted, done, outcome, published, lanes)
        )
        host, fetched, verdict, copy_done = coming.host, coming.fetched, coming.verdict, coming.copy_done
        self._sampling.on_their_way(batch, host, copy_done, verdict)
        if self._speculator is not None:
            self._speculator.on_their_way(batch, host, copy_done, verdict)
        # Without the logits, which nothing copies and which are large.
        refs = (sampled, counted, done.vectors, done.scores, done.inputs, published)
        # Without vectors the embeddings of the step, if it has any, found no memory (decision 25); and so with scores.
        exhausted = rows.exhausted if done.vectors is not None else rows.exhausted.beside(embedded(batch))
        exhausted = exhausted if done.scores is not None else exhausted.beside(told_of_prompts(batch))
        return LaunchedStep(
            *(batch, host, coming.counts, copy_done, begun.began, ended, previous_end, (outcome, *refs)),
            *(self._recorder, rows, fetched.vectors, exhausted, lanes, drafting, verdict, fetched.scores),
        )

    def _compile(self, module: Any) -> None:
        """Have compiled code take over what it can: between two steps, of which each is done in one way."""
        self._state.future_map.compile(module)
        self._sampling.compile(module)
        self._is_compiled = True

    def _compute(self, batch: ScheduleBatch, computing: Callable[[], None]) -> Computed:
        """Run the model. Steps that were captured are replayed."""
        attempt = None if self._speculator is None else self._speculator.begin(batch)
        graphs = self._graphs_for(batch, attempt)
        if graphs is not None and batch.scoring is None and batch.vision is None and graphs.takes(batch):
            along = carried(batch, self._state, self._sampling, attempt, self._captured)
            inputs = graphs.load(batch, along)
            staging = inputs.staging or self._state.staging
            self._apply(batch, inputs.rows, inputs.fresh, inputs.table, staging, self._captured)
            computing()
            logits = graphs.replay(inputs)
            for captured in self._captured.values():
                captured.replayed()
            return Computed(inputs, logits, trial=inputs.trial)
        along = carried(batch, self._state, self._sampling, attempt)
        forward_batch, trial, sampled = self._prepare(batch, along)
        for companion in self._late_bound:
            lens = forward_batch.prefix_lens_host, forward_batch.extend_lens_host
            companion.measured(*lens, self._state.staging)
        computing()
        return self._read(batch, forward_batch, self._state.model.forward(forward_batch), trial, sampled)

    def _read(
        self,
        batch: ScheduleBatch,
        inputs: ForwardBatch,
        logits: torch.Tensor,
        trial: Tried | None,
        sampled: torch.Tensor | None,
    ) -> Computed:
        """What else is made of a forward pass: vectors of embeddings, and log probabilities of prompts."""
        vectors, scores = self._pooler.vectors(inputs.hidden, batch.pooling, self._state.staging), None
        if batch.scoring is not None:
            assert trial is None, "beside prompts no drafts are verified"
            logits, scores = score(logits, batch.scoring, sampled_places(batch), self._state.staging)
        return Computed(inputs, logits, vectors, trial, sampled, scores)

    def _graphs_for(self, batch: ScheduleBatch, attempt: Attempt | None) -> Replays | None:
        """What was captured of steps like `batch` with this attempt."""
        if attempt is None:
            return self.mixed if batch.num_extend else self.graphs
        return None if self.grids is None else self.grids.of(attempt)

    def _prepare(
        self, batch: ScheduleBatch, along: Sequence[np.ndarray]
    ) -> tuple[ForwardBatch, Tried | None, torch.Tensor | None]:
        """Apply what the scheduler decided to device state, then gather the inputs, which depend on it.

        The trial is None in a step that verifies no drafts. The last is `Computed.sampled`. `along`: see `carried`.
        """
        state, chunks = self._state, batch.num_extend
        sent = StepInputs.send(batch, state.staging, along)
        self._apply(batch, sent.rows, sent.fresh, sent.table, sent.staging)
        decode = DecodeRows(sent.rows[chunks:], sent.lower, sent.upper)
        encoder_tokens = int(batch.encoder_lens.sum()) if len(batch.encoder_lens) else 0
        inputs = resolve_forward_inputs(
            batch.staging, decode, state.future_map, batch.num_inputs, encoder_tokens, sent.staged
        )
        if self._speculator is not None:
            trial = self._speculator.trial(batch, decode, inputs, sent.staging)
            if trial is not None:
                return self._speculator.forward_batch(batch, decode, trial), trial, None
        token_rows, positions, seq_lens = decode.behind(sent.places, inputs.entered)
        # With chunks the slots of all tokens are looked up at once.
        slots = None if chunks or inputs.entered is None else inputs.entered.slots
        slots = state.pool.slots(token_rows, positions) if slots is None else slots
        prefix_lens, extend_lens = batch.prefix_lens, batch.extend_lens
        if self._speculator is not None and batch.num_decode:
            prefix_lens, extend_lens = self._speculator.host_lens(batch, inputs)
        forward_batch = ForwardBatch(
            mode=batch.mode,
            input_ids=inputs.ids,
            positions=positions,
            rows=sent.rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            last_indices=sent.last,
            req_to_token=state.pool.table,
            kv_pool=state.kv_pool,
            num_extend=chunks,
            prefix_lens_host=prefix_lens,
            extend_lens_host=extend_lens,
            segments=sent.segments,
            wants_hidden=batch.pooling is not None or self._hidden.final,
            wants_layers=self._hidden.layers,
            encoder_ids=inputs.encoder_ids,
            encoder_lens_host=batch.encoder_lens,
            encoder_features=batch.encoder_features,
            vision=batch.vision,
        )
        return forward_batch, None, sent.sampled

    def _apply(
        self,
        batch: ScheduleBatch,
        rows: torch.Tensor,
        fresh: torch.Tensor,
        table: Sequence[torch.Tensor],
        staging: Staging,
        captured: Mapping[str, Captured] = NO_CAPTURED,
    ) -> None:
        """Apply what the scheduler decided to device state, before anything in the step reads it.

        `staging`: may have some of it on the device already. `captured`: companions whose look-ups are part of the
        replay that follows.
        """
        state = self._state
        if len(batch.table_writes.rows):
            state.pool.write(table[0], table[1], table[2], batch.table_writes.page_size)
        for name, companion in state.companions.items():
            replayed = captured.get(name)
            begin = companion.begin if replayed is None else replayed.apply
            begin(rows, batch.companion_writes.get(name), staging)
        state.future_map.forget(fresh)
        if batch.host_backs:
            bring_back(state, batch.host_backs, staging)
        self._sampling.begin(batch, staging)

    @torch.inference_mode()
    def copy_out(self, out: CopyOut) -> Event:
        """Begin a copy to host memory; the event fires when it has landed."""
        assert self._state.host is not None, "the scheduler copies where there is room"
        return self._state.host.copy_out(out)

    def _places(self, batch: ScheduleBatch, done: Computed) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, and tokens before) of each token to be sampled, int64[S] each; int64[T] where drafts are verified."""
        if done.trial is not None:
            return done.trial.sampled_at(batch.rows, self._state.staging)
        # In the middle of a prompt a row has a length to publish, but samples nothing.
        if len(batch.sample_indices) == len(batch.rows):
            return done.inputs.rows, done.inputs.seq_lens
        if isinstance(done.inputs, DecodeInputs):
            assert done.inputs.sampled is not None, "where only some rows sample the replay has found them"
            return done.inputs.sampled
        assert done.sampled is not None, "it came with the other inputs"
        return done.inputs.rows.index_select(0, done.sampled), done.inputs.seq_lens.index_select(0, done.sampled)

    def _relay(
        self,
        batch: ScheduleBatch,
        done: Computed,
        rows: torch.Tensor,
        lens: torch.Tensor,
        sampled: SampledRows,
        told: Callable[[Published], None],
    ) -> tuple[Event, Outcome | None, tuple[Mark, Mark] | None]:
        """Leave to the next step where rows stand, their newest tokens, and drafts behind these.

        `rows`, `lens`: as `_places` returned them; `sampled`: what was sampled there. Returns the event behind the
        lengths, what became of drafts if the step verified any, and where new ones begin and end if some are wanted.
        """
        state, seq_lens, newest = self._state, done.inputs.seq_lens, (tokens := sampled.output.tokens)
        outcome = None
        if done.trial is not None:
            judgement = done.trial.judge(tokens, sampled.masked, state.staging)
            outcome, seq_lens, newest = judgement.outcome, judgement.lens, judgement.newest
            rows, lens = done.inputs.rows, seq_lens
        published = state.future_map.publish(done.inputs.rows, seq_lens)
        assert published is not None, "the planner submits no empty step"
        if self._speculator is not None:
            self._speculator.tell(batch, outcome, told)
        if outcome is not None:
            # Behind the publish event too: a reader of lengths waits for no copies of states.
            for companion in self._judged:
                companion.judged(outcome.counts, state.staging)
        drafts, drafting = dict[str, torch.Tensor](), None
        if self._speculator is not None:
            began = state.streams.mark() if self._speculator.drafts_behind(batch) else None
            forward = done.inputs if isinstance(done.inputs, ForwardBatch) else None
            drafts = self._speculator.drafted(batch, forward, lens, tokens, outcome)
            drafting = None if began is None else (began, state.streams.mark())
        state.future_map.stash(rows, RelayPayload(newest, drafts))
        return published, outcome, drafting
