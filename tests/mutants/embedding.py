"""Mutants of embeddings, from the wire to the pooling."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ENGINE = "tests/equivalence/test_embeddings.py::"
WIRE = "tests/service/test_embed.py::"
POOLING = "core/executor/pooling.py"
DOOR = "core/engine/embedding.py"
SERVICER = "service/servicers/inference.py"

EMBEDDING: tuple[Mutant, ...] = (
    Mutant(
        "embed-tried-on-the-next-server",
        "a request that an engine may have died of is not sent to another by gRPC",
        SERVICER,
        "            except EngineDead as error:\n                _keep_from_others(error, context)\n",
        "            except EngineDead:\n",
        WIRE + "test_what_an_engine_died_of_is_not_tried_on_the_next",
    ),
    Mutant(
        "embed-mean-of-the-last-chunk",
        "a mean is over every chunk of the prompt",
        POOLING,
        "return part.sum(0) if earlier is None else earlier + part.sum(0)",
        "return part.sum(0)",
        ENGINE + "test_prefixes_are_skipped_only_where_the_vector_does_not_need_them",
    ),
    Mutant(
        "embed-first-of-the-last-chunk",
        "the first token is the prompt's, not the chunk's",
        POOLING,
        "return part[0] if earlier is None else earlier",
        "return part[0]",
        ENGINE + "test_prefixes_are_skipped_only_where_the_vector_does_not_need_them",
    ),
    Mutant(
        "embed-mean-behind-a-prefix",
        "what needs every hidden state skips no cached prefix",
        "core/types/request.py",
        "return self.pooling in (None, Pooling.LAST)",
        "return True",
        ENGINE + "test_prefixes_are_skipped_only_where_the_vector_does_not_need_them",
    ),
    Mutant(
        "embed-samples-a-token",
        "an embedding is prefilled and nothing else",
        "core/batch/build.py",
        "s.final and s.pooling is None for s in plan.segments",
        "s.final for s in plan.segments",
        "tests/scheduler/test_vectors.py::test_no_token_is_sampled_for_an_embedding",
    ),
    Mutant(
        "embed-vector-of-a-former-owner",
        "law 1: a vector for a row that has changed hands is dropped",
        "core/scheduler/result_processor.py",
        "if not is_current(vectors.rows[[place]], vectors.generations[[place]])[0]:",
        "if self._running.reqs[int(vectors.rows[place])] is None:",
        "tests/scheduler/test_vectors.py::test_a_vector_of_the_former_owner_is_dropped",
    ),
    Mutant(
        "embed-sends-nan",
        "a vector that is not finite fails its request",
        "core/scheduler/result_processor.py",
        "            if finite[place]:",
        "            if finite is not None:",
        ENGINE + "test_a_vector_that_is_not_finite_fails_its_own_request_only",
    ),
    Mutant(
        "embed-norm-overflows",
        "every finite vector can be normalised",
        DOOR,
        "np.linalg.norm(vector.astype(np.float64))",
        "np.linalg.norm(vector.astype(np.float64).clip(-1e19, 1e19))",
        ENGINE + "test_a_vector_too_long_for_float32_is_normalised_all_the_same",
    ),
    Mutant(
        "embed-cut-after-the-norm",
        "a vector is cut before it is normalised",
        DOOR,
        "norm = float(np.linalg.norm(vector.",
        "norm = float(np.linalg.norm(req.vector.",
        ENGINE + "test_dimensions_are_cut_before_the_norm",
    ),
    Mutant(
        "embed-abort-untold",
        "an aborted embedding ends with an error of its own",
        DOOR,
        'raise RequestAborted("the request was aborted")',
        'raise AssertionError("the request was aborted")',
        ENGINE + "test_who_leaves_or_waits_too_long_leaks_nothing",
    ),
    Mutant(
        "embed-adapter-ignored",
        "a vector is made by the adapter that was asked for",
        "core/engine/input_processor.py",
        "namespace(own, None),\n                adapter_slot=slot,\n",
        "namespace(own, None),\n",
        ENGINE + "test_an_adapter_makes_vectors_of_its_own",
    ),
    Mutant(
        "embed-call-left-open",
        "a call that its client left holds nothing",
        SERVICER,
        "            held.push_async_callback(call.aclose)\n",
        "",
        WIRE + "test_cancelling_closes_it",
    ),
    Mutant(
        "embed-refusal-uncounted",
        "a refused call is a rejected request on the metrics page",
        SERVICER,
        "with self._calls.counting_refusals():\n                call = await self._open_embed",
        "if True:\n                call = await self._open_embed",
        WIRE + "test_bad_requests_never_reach_the_engine",
    ),
    Mutant(
        "embed-inputs-unbounded",
        "a call has a bounded number of inputs",
        "service/wire/message_limits.py",
        '    if count > limit:\n        raise InvalidRequest.of("inputs"',
        '    if count > limit * count:\n        raise InvalidRequest.of("inputs"',
        WIRE + "test_a_call_is_bounded_by_the_queue_and_by_what_a_response_holds",
    ),
    Mutant(
        "embed-response-unbounded",
        "a response fits what clients take by default",
        "service/wire/message_limits.py",
        "    if count * dimension > MAX_EMBED_NUMBERS:",
        "    if count > MAX_EMBED_NUMBERS:",
        WIRE + "test_a_call_is_bounded_by_the_queue_and_by_what_a_response_holds",
    ),
    Mutant(
        "embed-tenants-share",
        "two callers share no cached prefix, whatever salt they choose",
        "service/calls/open_calls.py",
        "        cache_salt=tenant_salt(asked.cache_salt, caller),\n",
        "",
        "tests/security/test_tenants.py::test_vectors_share_no_cached_prefix_and_are_aborted_by_their_caller_only",
    ),
    Mutant(
        "embed-caller-forgotten",
        "only who asked for it can abort an embedding",
        "service/calls/open_calls.py",
        "self.engine.embed(_within_tenant(asked, place))",
        "self.engine.embed(asked)",
        "tests/security/test_tenants.py::test_vectors_share_no_cached_prefix_and_are_aborted_by_their_caller_only",
    ),
    Mutant(
        "dimensions-unasked",
        "vectors are cut only where the caller says",
        "service/wire/embed.py",
        'message.dimensions if message.HasField("dimensions") else None',
        "message.dimensions",
        "tests/service/test_embed.py::test_fields_reach_the_engine_and_unset_ones_have_defaults",
    ),
    Mutant(
        "lists-backwards",
        "what crosses to a front end comes out as it went in",
        "core/types/plain.py",
        "return [to_plain(each) for each in value]",
        "return [to_plain(each) for each in value][::-1]",
        "tests/service/test_frontend_wire.py::test_data_comes_out_as_it_went_in",
    ),
)
