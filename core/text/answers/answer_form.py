"""Chooses the form in which a checkpoint writes thoughts and calls, by its chat template or by its own declaration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from core.errors import ConfigError
from core.text.answers.known_forms import CALLS, KNOWN_FORMS, REASONING, KnownForm

AUTO: Final = "auto"
CHECKPOINT: Final = "checkpoint"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How answers are read: `whole`, or `spoken` where the request has no tools and so nothing is a call."""

    name: str
    whole: ResponseTemplate
    spoken: ResponseTemplate


def answer_form(wanted: str, chat_template: str, declared: Mapping[str, Any] | None) -> AnswerForm | None:
    """The form `wanted`, a value of the setting; None if there is none, or none is known for `chat_template`.

    `declared`: the `response_template` of the checkpoint's tokenizer. Its patterns can take any time to match, so it
    counts only if it is asked for. Raises ConfigError where it is and is not there, or cannot be read.
    """
    if wanted == CHECKPOINT:
        if declared is None:
            raise ConfigError("answer_form is checkpoint, but the checkpoint's tokenizer has no response_template")
        return _loaded(CHECKPOINT, dict(declared))
    if wanted == AUTO:
        known = next((form for form in KNOWN_FORMS if all(mark in chat_template for mark in form.marks)), None)
    else:
        known = next((form for form in KNOWN_FORMS if form.name == wanted), None)
    return None if known is None else _of(known)


def _of(form: KnownForm) -> AnswerForm:
    return _loaded(form.name, {"start_anchor_pattern": _anchor(form), "fields": form.fields})


def _anchor(form: KnownForm) -> str:
    """Templates may open the thought themselves. Of the rest of a prompt the parser of an answer needs nothing."""
    thought = form.fields.get(REASONING)
    if thought is None:
        return r"\Z(?!\Z)"
    opened = thought["open_pattern"] if "open_pattern" in thought else re.escape(thought["open"].rstrip())
    return rf"(?={opened}\s*$)"


def _loaded(name: str, template: dict[str, Any]) -> AnswerForm:
    try:
        whole = load_response_template(template)
        spoken = {each: field for each, field in template["fields"].items() if each != CALLS}
        return AnswerForm(name, whole, load_response_template({**template, "fields": spoken}))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"answer_form is {name}, but its response_template cannot be read: {error}") from error
