"""Mutants of attention: which keys a query sees, through which pages, and what a step leaves to the next one."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "core/attention/"
CONFORMANCE = "tests/attention/test_conformance.py::"
MIXED = "test_random_mixed_steps_match_the_formula"
LIBRARIES = "tests/attention/test_libraries.py::"
NEW_STEP = LIBRARIES + "test_layers_share_a_plan_and_a_new_step_makes_another"

ATTENDING: tuple[Mutant, ...] = (
    Mutant(
        "sibling-is-itself",
        "layers of another pool have a backend, and a plan, of their own",
        ROOM + "base.py",
        "return type(self)()",
        "return self",
        CONFORMANCE + "test_a_sibling_has_a_step_of_its_own[torch_native]",
    ),
    Mutant(
        "later-blocks-see-the-first-mask",
        "each block of a long prompt is masked by its own queries",
        ROOM + "explicit.py",
        "scores += mask[..., rows, :] if",
        "scores += mask[..., : scores.shape[-2], :] if",
        "tests/attention/test_explicit.py::test_blocks_give_what_one_piece_gives",
    ),
    Mutant(
        "sink-at-another-scale",
        "a sink weighs as much against the scores as the model says",
        ROOM + "explicit.py",
        "(sinks.float() - peak).exp()",
        "sinks.float().exp()",
        CONFORMANCE + MIXED + "[torch_native-4-sinks]",
    ),
    Mutant(
        "flashinfer-keeps-its-plan",
        "a step is planned anew, whatever the one before it was",
        ROOM + "flashinfer_backend.py",
        "if self._planned.get(call) is not step:",
        "if call not in self._planned:",
        NEW_STEP + "[flashinfer]",
    ),
    Mutant(
        "flashinfer-window-too-wide",
        "a window is as many keys as the model says, for a library that counts those before the query",
        ROOM + "flashinfer_backend.py",
        "-1 if call.window is None else call.window - 1,",
        "-1 if call.window is None else call.window,",
        LIBRARIES + MIXED + "[flashinfer-window]",
    ),
    Mutant(
        "library-reads-ordinary-pages",
        "a library is told the pages of the pool that the layers live in",
        ROOM + "paged_library.py",
        "batch.pool_slots(firsts) // size",
        "firsts // size",
        LIBRARIES + MIXED + "[varlen-paged-renamed]",
    ),
    Mutant(
        "library-takes-sinks",
        "what a library has no kernel for goes to the native backend, and is not left out",
        ROOM + "paged_library.py",
        "plain = sinks is None and chunk_size is None and bias is None",
        "plain = chunk_size is None and bias is None",
        LIBRARIES + MIXED + "[flashinfer-sinks]",
    ),
    Mutant(
        "attention-runs-anywhere",
        "a backend that cannot run on the device is refused at start, with its reason",
        ROOM + "registry.py",
        "    if reason is not None:",
        "    if not reason and reason is not None:",
        LIBRARIES + "test_without_its_library_or_device_each_says_why",
    ),
    Mutant(
        "auto-needs-triton",
        "a CUDA build without Triton is served all the same",
        ROOM + "registry.py",
        'device.type == "cuda" and find_spec("triton") is not None else',
        'device.type == "cuda" else',
        "tests/attention/test_triton.py::test_cuda_devices_get_it_where_it_is_installed",
    ),
    Mutant(
        "window-a-key-too-long",
        "a window counts the query's own key",
        ROOM + "span.py",
        "query - self.window + 1)",
        "query - self.window)",
        "tests/attention/test_span.py::test_first_key_is_the_first_allowed",
    ),
    Mutant(
        "attention-keeps-its-plan",
        "the indices and masks of a step end with it",
        ROOM + "torch_native.py",
        "        self._plans.clear()\n",
        "",
        CONFORMANCE + "test_works_in_and_out_of_inference_mode[torch_native]",
    ),
    Mutant(
        "short-row-reads-padding",
        "in a batch with longer rows a short row gives the keys behind its end no weight",
        ROOM + "torch_native.py",
        "return mask if chunk.mask is None else mask + chunk.mask",
        "return mask",
        CONFORMANCE + "test_many_decode_rows_of_any_length[torch_native-bias]",
    ),
    Mutant(
        "varlen-keeps-its-arguments",
        "lengths and slots of a step are not those of the step before",
        ROOM + "varlen_backend.py",
        "if self._arguments is None or self._arguments.step is not step:",
        "if self._arguments is None:",
        NEW_STEP + "[varlen]",
    ),
)
