"""Mutants of native code: what is compiled and when it is trusted, and what its arithmetic leaves out or takes twice.

Those of C++ choose what the load-time check, of eight tokens, does not see, wherever there is such a line.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NATIVE = "core/models/native/"
LOADED = "tests/models/test_native.py::"
BUILT = "tests/models/test_native_build.py::"
SHAPES = "tests/models/test_native_shapes.py::"
SHARED = "tests/models/test_native_sharing.py::"
LONG = SHAPES + "test_logits_equal_those_of_transformers_in_every_shape[heads of eight]"

COMPILING: tuple[Mutant, ...] = (
    Mutant(
        "native-states-not-handed-out",
        "native code hands out the hidden states that vectors are made of",
        NATIVE + "decoder.py",
        "batch.hidden = hidden[0] if hidden else None",
        "batch.hidden = None",
        LOADED + "test_states_before_the_output_matrix_are_those_of_transformers",
    ),
    Mutant(
        "native-runs-what-others-wrote",
        "compiled code that another user could have written is not run",
        NATIVE + "kept_library.py",
        "facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022",
        "facts.st_uid not in (0, os.geteuid())",
        "tests/models/test_kept_library.py::test_what_others_could_have_written_is_not_loaded",
    ),
    Mutant(
        "native-key-forgets-the-code",
        "another version of the source is compiled anew, and not served by what the last one left in the cache",
        NATIVE + "extension.py",
        "source.read_bytes() for source in SOURCES",
        "source.name for source in SOURCES",
        BUILT + "test_every_byte_of_the_source_is_in_the_key",
    ),
    Mutant(
        "native-trusted-unproved",
        "a decoder whose logits differ from those of transformers is not used",
        NATIVE + "family.py",
        "            if result.passed:",
        "            if result:",
        LOADED + "test_a_decoder_that_computes_something_else_is_not_used",
    ),
    Mutant(
        "native-takes-windows",
        "a model with sliding windows, which native code would show too much, stays with transformers",
        NATIVE + "weights.py",
        "if any(layer.window is not None for layer in spec.kv_layers):",
        "if not spec.kv_layers:",
        LOADED + "test_what_it_does_not_compute_is_left_to_transformers[mistral-sliding windows]",
    ),
    Mutant(
        "native-softmax-not-rescaled",
        "attention over more keys than a panel holds brings earlier sums to the scale of a greater score",
        NATIVE + "attention.h",
        "rescale(head, row, std::exp(before - top))",
        "rescale(head, row, 1.0f)",
        LONG,
    ),
    Mutant(
        "native-bytes-begin-anew",
        "a product with int8 weights adds up all passes over its inputs",
        NATIVE + "bytes.h",
        "room, count, out, from > 0)",
        "room, count, out, false)",
        SHAPES + "test_panels_are_read_to_their_end[int8]",
    ),
    Mutant(
        "native-blocks-at-one-place",
        "each block of a long prompt attends from its own position",
        NATIVE + "decoder.cpp",
        "prefixes[place] + done,",
        "prefixes[place],",
        LONG,
    ),
    Mutant(
        "native-half-turn",
        "both halves of a head are turned by the token's position, of narrow heads too",
        NATIVE + "kernels.h",
        "narrow(b * cos[i] + a * sin[i], high[i]);",
        "narrow(b * cos[i] - a * sin[i], high[i]);",
        LOADED + "test_logits_equal_those_of_transformers[llama]",
    ),
    Mutant(
        "native-rows-of-the-first-block",
        "in a step of more rows than a block holds each row gets its own product",
        NATIVE + "linear.h",
        "sink(from + row, first, found, count);",
        "sink(row, first, found, count);",
        LONG,
    ),
    Mutant(
        "native-panels-begin-anew",
        "a product over more inputs than one pass takes adds up all passes",
        NATIVE + "panels.h",
        "from += pass, add = true)",
        "from += pass)",
        SHAPES + "test_panels_are_read_to_their_end[none]",
    ),
    Mutant(
        "native-scratch-shared",
        "what a group read together is not overwritten by what each of its requests reads alone",
        NATIVE + "scratch.h",
        "bytes_[place];",
        "bytes_[place % 8];",
        SHARED + "test_shared_prefixes_give_what_transformers_gives[one head]",
    ),
    Mutant(
        "native-shares-by-the-first-slot",
        "requests share keys where all slots of a panel are the same, not where its first is",
        NATIVE + "sharing.h",
        "kPanel * sizeof(int32_t)) == 0",
        "sizeof(int32_t)) == 0",
        SHARED + "test_a_copy_of_a_prefix_is_not_taken_for_the_prefix[within a panel]",
    ),
    Mutant(
        "native-lone-thread-stops-early",
        "every chunk of a phase is computed, also where one thread is all there is",
        NATIVE + "team.h",
        "for (int64_t chunk = 0; chunk < chunks; ++chunk) work(chunk, 0);",
        "for (int64_t chunk = 0; chunk + 1 < chunks; ++chunk) work(chunk, 0);",
        LOADED + "test_logits_equal_those_of_transformers[llama]",
    ),
    Mutant(
        "native-tail-not-summed",
        "a row whose width is no whole number of vectors is normed by all of its elements",
        NATIVE + "vectors.h",
        "  for (; i < count; ++i) total += widen(a[i]) * widen(b[i]);\n",
        "",
        SHAPES + "test_logits_equal_those_of_transformers_in_every_shape[seven heads to a KV head]",
    ),
)
