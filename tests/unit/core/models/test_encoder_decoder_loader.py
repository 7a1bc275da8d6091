"""Which encoder-decoders load, what of their generation configuration is obeyed, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import ModelLoadError
from core.memory.cross.cross_pages import CrossPages, CrossWrites
from core.memory.kv_pool import KVLayerSpec
from core.models import loader
from core.models.encoder_decoder import model
from core.models.encoder_decoder.cross_attention import CrossAttention
from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.models.encoder_decoder.model import EncoderDecoder
from tests.support.checkpoints import EOS_ID, PAD_ID, VOCAB_SIZE
from tests.support.encoder_decoders import ENCODER_DECODER_CONFIGS, LANGUAGE_ID, MAX_INPUT, make_encoder_decoder
from tests.unit.core.models.reference import load
from tests.unit.core.models.test_loader import edit_config, edit_weights, refusal


@pytest.mark.parametrize("kind", ENCODER_DECODER_CONFIGS)
def test_every_kind_passes_its_check(kind: str, tmp_path: Path) -> None:
    """Alternating types and tied output matrices, as the published checkpoints have them."""
    made = make_encoder_decoder(kind, tmp_path / kind, tie_word_embeddings=True)
    for dtype in ("float32", "bfloat16"):
        spec = load(made, dtype).spec
        assert spec.encoder is not None
        assert (spec.context_length, spec.encoder.max_tokens) == (MAX_INPUT, MAX_INPUT)
        assert spec.encoder.cross_layers == spec.kv_layers and len(spec.kv_layers) == 2
        assert spec.encoder.start_ids == ((PAD_ID,) if kind in ("t5", "mt5") else (EOS_ID,))


def test_the_list_of_types_is_what_is_tried_here() -> None:
    assert set(loader.ENCODER_DECODER_TYPES) == set(ENCODER_DECODER_CONFIGS)


def test_what_generate_forces_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    encoder = load(make_encoder_decoder("mbart", tmp_path)).spec.encoder
    assert encoder is not None
    assert (encoder.forced_first, encoder.forced_last) == ((LANGUAGE_ID,), (EOS_ID,))


def test_an_unknown_encoder_decoder_is_refused_by_name_and_by_its_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENCODER_DECODER_CONFIGS, "umt5", ENCODER_DECODER_CONFIGS["t5"])
    made = make_encoder_decoder("umt5", tmp_path)
    assert "'umt5' is not supported: it is an encoder-decoder, of which these are served: bart, " in refusal(made)
    monkeypatch.setattr(loader, "ENCODER_DECODER_TYPES", ("umt5",))
    assert "no cross attention that we know the projections of" in refusal(made)


def _no_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model, "_relative_bias", lambda decoder: None)


def _positions_of_the_packed_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EncoderDecoder, "_packed_positions", lambda self, module, args, kwargs: (args, kwargs))


def _backwards(patch: pytest.MonkeyPatch) -> None:
    write = CrossAttention.write
    patch.setattr(CrossAttention, "write", lambda self, layer, k, v: write(self, layer, k.flip(0), v.flip(0)))


def _an_input_without_its_end(patch: pytest.MonkeyPatch) -> None:
    planned = CrossPages.planned

    def shorter(self: CrossPages, *args: Any) -> CrossWrites:
        writes = planned(self, *args)
        return dataclasses.replace(writes, last_places=np.maximum(writes.last_places - 1, 0))

    patch.setattr(CrossPages, "planned", shorter)


@pytest.mark.parametrize(
    ("kind", "dtype", "fault"),
    [
        # In 16 bits a bias as small as this one drowns in rounding.
        ("t5", "float32", _no_bias),
        *(
            (kind, dtype, fault)
            for dtype in ("float32", "bfloat16")
            for kind, fault in (
                ("bart", _positions_of_the_packed_row),
                ("bart", _backwards),
                ("t5", _an_input_without_its_end),
            )
        ),
    ],
)
def test_planted_faults_fail_the_check(
    kind: str, dtype: str, fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_encoder_decoder(kind, tmp_path)
    fault(monkeypatch)
    with pytest.raises(ModelLoadError, match=f"'{kind}' is not supported: packed and plain logits differ"):
        load(made, dtype)


def test_other_models_of_speech_are_refused_for_what_they_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "speech_to_text", "vocab_size": 64}))
    assert "'speech_to_text' is not supported: its encoder reads audio" in refusal(tmp_path)


def test_an_output_needs_a_start(tmp_path: Path) -> None:
    made = make_encoder_decoder("t5", tmp_path, decoder_start_token_id=None)
    file = made / "generation_config.json"
    kept = {"decoder_start_token_id", "bos_token_id"}
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in kept}))
    edit_config(made, bos_token_id=None)
    assert "names no decoder_start_token_id" in refusal(made)


@pytest.mark.parametrize(
    "bad", [{"forced_bos_token_id": VOCAB_SIZE}, {"forced_eos_token_id": [2, 10**6]}, {"bad_words_ids": [[10**6]]}]
)
def test_ids_outside_the_vocabulary_are_refused_before_they_can_reach_a_batch(
    bad: dict[str, Any], tmp_path: Path
) -> None:
    made = make_encoder_decoder("t5", tmp_path, generation=bad)
    assert f"outside the vocabulary of {VOCAB_SIZE}" in refusal(made)


def test_t5_without_a_limit_needs_one(tmp_path: Path) -> None:
    made = make_encoder_decoder("t5", tmp_path)
    edit_config(made, n_positions=None)
    assert "gives no context length; configure context_length" in refusal(made)


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    made = make_encoder_decoder("bart", tmp_path)
    edit_config(made, quantization_config={"quant_method": "mxfp4"})
    assert "'bart' with mxfp4 weights is not supported: it is an encoder-decoder" in refusal(made)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    made = make_encoder_decoder("bart", tmp_path)
    edit_weights(made, lambda t: t.pop("model.decoder.layers.1.encoder_attn.k_proj.weight"))
    assert "missing weights model.decoder.layers.1.encoder_attn.k_proj.weight" in refusal(made)


def test_options_that_are_not_run_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"num_beams": 4, "no_repeat_ngram_size": 3, "bad_words_ids": [[PAD_ID], [5, 6]]}
    made = make_encoder_decoder("bart", tmp_path, generation=options)
    with caplog.at_level(logging.WARNING):
        load(made)
    (line,) = [record.message for record in caplog.records if "not used here" in record.message]
    assert line.endswith("no_repeat_ngram_size=3, num_beams=4, bad_words_ids=[5, 6]")


def test_a_decoder_alone_is_no_encoder_decoder(tmp_path: Path) -> None:
    """`BartForCausalLM` shares its model type; it has no inputs to encode and is refused as it always was."""
    made = make_encoder_decoder("bart", tmp_path)
    edit_config(made, is_encoder_decoder=False, architectures=["BartForCausalLM"])
    with pytest.raises(ModelLoadError, match="takes no positions"):
        load(made)


@pytest.mark.parametrize("missing", ["cross_layers", "start_ids", "max_tokens"])
def test_a_decoder_reads_something_and_starts_from_something(missing: str) -> None:
    whole: dict[str, Any] = {"max_tokens": 8, "cross_layers": (KVLayerSpec(0, 2, 4, 4),), "start_ids": (2,)}
    EncoderSpec(**whole)
    with pytest.raises(AssertionError):
        EncoderSpec(**{**whole, missing: 0 if missing == "max_tokens" else ()})
