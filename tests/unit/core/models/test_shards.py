"""What cannot be shared out among ranks is refused by name, before or after its modules are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import ModelLoadError
from core.models.hf.shards import check_heads, check_shards, load_options


def test_modules_of_which_no_layer_was_shared_out(checkpoint_of: Callable[[str], Path]) -> None:
    """As `transformers` leaves those of gpt_oss, whatever the number of ranks."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_of("gpt_oss"))
    check_shards(model, 1)
    with pytest.raises(ModelLoadError, match=r"tensor_parallel 2 .* transformers shares out no layer of 'gpt_oss'"):
        check_shards(model, 2)


@pytest.mark.parametrize(("kind", "name"), [("llama", "num_attention_heads"), ("mistral", "num_key_value_heads")])
def test_parts_of_heads(checkpoint_of: Callable[[str], Path], kind: str, name: str) -> None:
    config = AutoConfig.from_pretrained(checkpoint_of(kind))
    heads = getattr(config, name)
    check_heads(config, 1)
    with pytest.raises(ModelLoadError, match=f"{name} is {heads}, no multiple of it"):
        check_heads(config, heads + 1 if name == "num_attention_heads" else 2)


def test_one_rank_loads_as_ever(checkpoint_of: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(checkpoint_of("mistral"))
    assert load_options(config, 1) == {}
    with pytest.raises(ModelLoadError, match="num_key_value_heads"):
        load_options(config, 2)
