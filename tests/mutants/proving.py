"""Mutants of models: what is proved at load, what is refused, and what a packed step must not mix up."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "core/models/"
LOADER = "tests/models/test_loader.py::"
PACKED = "tests/models/test_transformers_backend.py::"
CHECK = "tests/models/test_self_check.py::"
DECODERS = "tests/models/test_encoder_decoder.py::test_packed_decoder_equals_plain_forward"
DECODER_LOADER = "tests/models/test_encoder_decoder_loader.py::"
STATES = "tests/models/test_recurrent_steps.py::test_a_state_that_is_kept_is_the_one_of_its_prefix"

PROVING: tuple[Mutant, ...] = (
    Mutant(
        "adapters-inside-a-recording",
        "a step whose rows have adapters is not replayed without them",
        ROOM + "base.py",
        "return isinstance(adapters, LoraWrites) and bool(adapters.groups)",
        "return adapters is not None and not adapters.groups",
        "tests/executor/test_decode_graphs.py::test_what_is_not_a_captured_decode_step_runs_eagerly",
    ),
    Mutant(
        "cross-values-are-keys",
        "the last encoder token keeps its value, which every step writes once more",
        "core/models/encoder_decoder/cross_attention.py",
        "v = pool.v(layer_id)",
        "v = pool.k(layer_id)",
        DECODERS + "[bart]",
    ),
    Mutant(
        "cross-keys-all-in-one-layer",
        "every decoder layer reads the encoder's output by its own projections",
        "core/models/encoder_decoder/model.py",
        "pages.write(layer_id, k, v)",
        "pages.write(0, k, v)",
        DECODERS + "[bart]",
    ),
    Mutant(
        "relative-bias-both-ways",
        "a decoder's bias counts distances backwards only, as T5 was trained",
        "core/models/encoder_decoder/model.py",
        "bidirectional=False,",
        "bidirectional=True,",
        DECODERS + "[t5]",
    ),
    Mutant(
        "check-reads-single-tokens",
        "the check's inputs are long enough to tell that one was read in part",
        "core/models/encoder_decoder/self_check.py",
        "INPUT_LENGTHS = (9, 4)",
        "INPUT_LENGTHS = (1, 1)",
        DECODER_LOADER + "test_planted_faults_fail_the_check[t5-float32-_an_input_without_its_end]",
    ),
    Mutant(
        "output-from-nothing",
        "an encoder-decoder has something that its outputs start from",
        "core/models/encoder_decoder/encoder_spec.py",
        "assert self.cross_layers and self.start_ids,",
        "assert self.cross_layers,",
        DECODER_LOADER + "test_a_decoder_reads_something_and_starts_from_something[start_ids]",
    ),
    Mutant(
        "context-beyond-the-model",
        "a context length that the checkpoint does not support is refused",
        ROOM + "loader.py",
        "and wanted > limit:",
        "and limit < 1:",
        LOADER + "test_context_length_comes_from_the_checkpoint_or_from_configuration",
    ),
    Mutant(
        "queries-absorbed-by-values",
        "queries are asked in the latents' terms by the weights of keys, so latents are cached once for all heads",
        "core/models/hf/mla.py",
        "torch.matmul(nope, self._weights()[:, : self._nope])",
        "torch.matmul(nope, self._weights()[:, -self._nope :])",
        PACKED + "test_latents_are_cached_once_for_all_heads[deepseek_v3]",
    ),
    Mutant(
        "windows-not-told",
        "a layer's window reaches attention, which a check of eight tokens would not miss",
        "core/models/hf/packed_attention.py",
        "sliding_window=span.window,",
        "sliding_window=None,",
        PACKED + "test_packed_steps_equal_plain_forward[1-mistral]",
    ),
    Mutant(
        "own-masks-trusted",
        "a model that makes its windows by masks of its own is refused, not served without them",
        "core/models/hf/probe.py",
        "            if len(candidates) > 1:",
        "            if len(candidates) > 9:",
        "tests/models/test_probe.py::test_masks_of_a_models_own_making_are_trusted_only_without_windows",
    ),
    Mutant(
        "state-dropped-behind-a-cut",
        "a mixer that drops its state before several tokens goes one by one behind a state that was kept on the way",
        "core/models/hf/recurrent.py",
        "if self._stepwise and prefix + start else",
        "if self._stepwise and prefix else",
        STATES + "[jamba]",
    ),
    Mutant(
        "decode-state-of-another-row",
        "what is kept in decode is the state of the row that it is kept for, beside prompts that keep some too",
        "core/models/hf/recurrent.py",
        "pool.tracked_from[first:], pool.tracked_slots[first:]",
        "slots[: len(pool.tracked_slots) - first], pool.tracked_slots[first:]",
        STATES + "[bamba]",
    ),
    Mutant(
        "every-mixer-goes-one-by-one",
        "only a mixer that drops its state pays for going token by token",
        "core/models/hf/recurrent_probe.py",
        "return torch.equal(ends[0], ends[1])",
        "return True",
        "tests/models/test_recurrent.py::test_only_mixers_that_drop_their_state_go_token_by_token[bamba-False]",
    ),
    Mutant(
        "one-family-for-all",
        "a model type that a family of its own serves better gets that one",
        ROOM + "registry.py",
        "return NATIVE_FAMILIES.get(model_type, DEFAULT_FAMILY)",
        "return DEFAULT_FAMILY",
        LOADER + "test_every_family_can_be_imported",
    ),
    Mutant(
        "only-prefill-is-proved",
        "chunks behind a prefix and decode steps are proved too, not whole prompts alone",
        "core/models/hf/self_check.py",
        "in enumerate(STEPS if states is None else STEPS * 2)",
        "in enumerate(STEPS[:1] if states is None else STEPS * 2)",
        CHECK + "test_refuses_when_only_the_prefix_is_lost[float32]",
    ),
    Mutant(
        "missing-weights-made-up",
        "a checkpoint without all of its weights is refused, and not served with random ones",
        "core/models/hf/backend.py",
        'for problem in ("missing_keys", "mismatched_keys"',
        'for problem in ("mismatched_keys"',
        LOADER + "test_missing_weights_are_not_made_up",
    ),
    Mutant(
        "a-few-bytes-may-miss",
        "a file that lacks its last bytes is found before anything is loaded",
        ROOM + "weights.py",
        "    if position > data_size:",
        "    if position > data_size + 8:",
        "tests/models/test_weights.py::test_every_truncation_is_found",
    ),
    Mutant(
        "shards-anywhere",
        "an index leads to no file outside the checkpoint's directory",
        ROOM + "weights.py",
        "if not isinstance(name, str) or Path(name).name != name or",
        "if not isinstance(name, str) or",
        "tests/models/test_weights.py::test_index_may_not_lead_out_of_the_directory[../elsewhere.safetensors]",
    ),
    Mutant(
        "windowed-keys-in-ordinary-slots",
        "windowed layers write where their own pool says",
        "core/models/hf/windowed.py",
        "        view.out_cache_loc = view.pool_slots(batch.out_cache_loc)\n",
        "",
        "tests/models/test_windowed.py::test_two_pools_equal_plain_forward[gpt_oss]",
    ),
)
