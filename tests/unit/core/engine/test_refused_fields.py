"""A prompt that cannot be held is refused by the field in which the client sent it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.client import CallFailed
from tests.support.checkpoints import make_checkpoint
from tests.support.servers import serve_checkpoint


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (list(range(5, 105)), "token_ids.ids"),
        ("a b c d e f g h " * 12, "text"),
        ([{"role": "user", "content": "a b c d e f g h " * 12}], "chat.messages"),
    ],
)
async def test_a_prompt_that_no_pool_can_hold(prompt: Any, field: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path)
    async with serve_checkpoint(checkpoint, max_total_tokens=64, page_size=8, max_running_requests=2) as (_, client):
        with pytest.raises(CallFailed, match="more than the server can hold") as refused:
            await client.complete(prompt, max_tokens=4)
    assert list(refused.value.fields) == [field]
