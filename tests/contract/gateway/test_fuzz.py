"""A fuzzer's requests in both dialects: documented codes and clean texts only, and everything is given back."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tests.contract.gateway.spoken import Spoken
from tests.security.test_fuzz import all_given_back, code_of
from tests.security.wire import Fuzzer
from tests.support.log_lines import LogLines
from tests.support.servers import serve_checkpoint

REQUESTS = 640
AT_ONCE = 16
METHODS = {"Generate": 12, "Embed": 4, "Abort": 1, "GetLoads": 1}
"""By how often they are called."""

_F = FieldDescriptor
VALUES: dict[int, tuple[Any, ...]] = {
    _F.CPPTYPE_INT32: (0, 1, -1, 2, 64, 65, 319, 320, 2**31 - 1, -(2**31)),
    _F.CPPTYPE_UINT32: (0, 1, 2, 64, 65, 319, 320, 2**31, 2**32 - 1),
    _F.CPPTYPE_FLOAT: (0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 100.0, 1e-45, 3e38, -3e38, math.nan, math.inf, -math.inf),
    _F.CPPTYPE_BOOL: (False, True),
    _F.CPPTYPE_STRING: ("", "a", "5", "\0", "<|eos|>", "z" * 300, "{{ x }}", '{"type": "object"}', "/etc/passwd"),
}


def fuzzed(spoken: Spoken, name: str, dice: random.Random) -> bytes:
    """A request that would be served, with up to three fields of it or of its options drawn anew."""
    base = {
        "Generate": lambda: spoken.generate([5, 6, 7], params={"max_tokens": 2}, stream=dice.random() < 0.5),
        "Embed": lambda: spoken.pb.EmbedRequest(tokenized=spoken.pb.TokenizedInput(input_ids=[5, 6])),
        "Abort": lambda: spoken.abort("r"),
        "GetLoads": spoken.pb.GetLoadsRequest,
    }
    message = base[name]()
    for _ in range(dice.randrange(4)):
        into = message.sampling_params if name == "Generate" and dice.random() < 0.7 else message
        draw(into, dice.choice(list(into.DESCRIPTOR.fields)), dice)
    if name == "Generate" and not 0 <= getattr(message.sampling_params, spoken.length) <= 3:
        setattr(message.sampling_params, spoken.length, 2)  # most must end soon
    raw = bytes(message.SerializeToString())
    return Fuzzer(dice.randrange(2**32))._mutate(raw) if dice.random() < 0.25 else raw


def draw(message: Any, field: FieldDescriptor, dice: random.Random) -> None:
    """Set one field; messages are only made to be there."""
    target = getattr(message, field.name)
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[each] for each in ("key", "value"))
            if value.message_type is None:
                target[dice.choice(VALUES[key.cpp_type])] = dice.choice(VALUES[value.cpp_type])
        elif field.is_repeated:
            target.add()
        else:
            target.SetInParent()
    elif field.is_repeated:
        target.extend(dice.choice(VALUES[field.cpp_type]) for _ in range(dice.choice((1, 2, 17, 65))))
    else:
        setattr(message, field.name, dice.choice(VALUES[field.cpp_type]))


async def test_fuzzed_requests(tiny: Path, seed: int, spoken: Spoken, logged: LogLines) -> None:
    print(f"fuzz seed {seed}")
    dice, codes = random.Random(seed), Counter[str]()
    async with serve_checkpoint(tiny, max_running_requests=64) as (server, client):

        async def ask() -> None:
            name = dice.choices(list(METHODS), list(METHODS.values()))[0]
            raw = fuzzed(spoken, name, dice)
            codes[await code_of(client.channel, f"/{spoken.service}/{name}", name == "Generate", raw)] += 1

        for _ in range(REQUESTS // AT_ONCE):
            await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        await all_given_back(server)
    print(dict(codes))
    assert codes["OK"] > REQUESTS // 20 and codes["INVALID_ARGUMENT"] > REQUESTS // 20
    assert "incident" not in logged.text and "Traceback" not in logged.text
