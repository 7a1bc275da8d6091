"""Structural tags: text that is free until a trigger is written, and then has to be one of the tags it begins.

A tag is a text before, a JSON value that matches a schema, and a text behind: a call in the middle of an answer, for
instance. The idea, its names and both notations in JSON are those of xgrammar, which SGLang and vLLM took over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_TAGS: Final = 128
MAX_TAG_CHARS: Final = 1_024
_TRIGGERED: Final = "triggered_tags"


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """One tag. `schema`: a JSON schema, as an object, or True for any value."""

    begin: str
    schema: Any
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """All tags of a constraint. `at_least_one`: the output begins with a tag. `stop_after_first`: it ends with one."""

    tags: tuple[StructuralTag, ...]
    triggers: tuple[str, ...]
    at_least_one: bool = False
    stop_after_first: bool = False

    @classmethod
    def of_source(cls, source: str) -> StructuralTags:
        """What `source` wrote."""
        told = json.loads(source)
        tags = tuple(StructuralTag(**each) for each in told["tags"])
        return cls(tags, tuple(told["triggers"]), told["at_least_one"], told["stop_after_first"])

    @classmethod
    def of_gateway(cls, text: str) -> StructuralTags:
        """Read the text that gateways send: `{"format": {"type": "triggered_tags", …}}`, or the older `structures`.

        Raises ValueError, with what is wrong with it.
        """
        told = json.loads(text)
        try:
            if isinstance(told.get("format", told)["triggers"], str):
                raise ValueError("has triggers that are no list")
            if "structures" in told:
                tags = [StructuralTag(each["begin"], each["schema"], each["end"]) for each in told["structures"]]
                return cls(tuple(tags), tuple(told["triggers"]))
            return cls._triggered(told["format"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"is no structural tag: {error} is missing or of a wrong type") from None

    @classmethod
    def _triggered(cls, told: Mapping[str, Any]) -> StructuralTags:
        if told["type"] != _TRIGGERED:
            raise ValueError(f"has a format of type {told['type']}; {_TRIGGERED} is served")
        tags = []
        for each in told["tags"]:
            content = each["content"]
            if content["type"] != "json_schema":
                raise ValueError(f"has a tag with content of type {content['type']}; json_schema is served")
            tags.append(StructuralTag(each["begin"], content["json_schema"], each["end"]))
        flags = (bool(told.get(name, False)) for name in ("at_least_one", "stop_after_first"))
        return cls(tuple(tags), tuple(told["triggers"]), *flags)

    @property
    def source(self) -> str:
        """Its text as a constraint. Schemas keep the order of their properties."""
        tags = [{"begin": tag.begin, "schema": tag.schema, "end": tag.end} for tag in self.tags]
        flags = {"at_least_one": self.at_least_one, "stop_after_first": self.stop_after_first}
        return json.dumps({"tags": tags, "triggers": self.triggers, **flags})

    def trigger_of(self, tag: StructuralTag) -> str:
        """The trigger that begins `tag`."""
        (trigger,) = self._triggers_of(tag)
        return trigger

    def faults(self) -> Iterator[str]:
        """What is wrong with it, the first fault of each part."""
        for name, count in (("tags", len(self.tags)), ("triggers", len(self.triggers))):
            if not 1 <= count <= MAX_TAGS:
                yield f"must have 1 to {MAX_TAGS} {name}"
                return
        texts = [*self.triggers, *(text for tag in self.tags for text in (tag.begin, tag.end))]
        if not all(isinstance(text, str) and len(text) <= MAX_TAG_CHARS for text in texts):
            yield f"must have texts of at most {MAX_TAG_CHARS} characters"
        elif not all(self.triggers):
            yield "must have no empty trigger"
        elif place := next((i for i, each in enumerate(self.triggers) if not self._begins(each)), -1) + 1:
            yield f"has triggers[{place - 1}], which begins no tag"
        elif place := next((i for i, tag in enumerate(self.tags) if len(self._triggers_of(tag)) != 1), -1) + 1:
            yield f"has tags[{place - 1}].begin, which must begin with one of the triggers, and with no other"
        elif not all(isinstance(tag.schema, dict) or tag.schema is True for tag in self.tags):
            yield "must have schemas that are JSON objects"

    def _begins(self, trigger: str) -> bool:
        return any(tag.begin.startswith(trigger) for tag in self.tags)

    def _triggers_of(self, tag: StructuralTag) -> list[str]:
        return [trigger for trigger in self.triggers if tag.begin.startswith(trigger)]
