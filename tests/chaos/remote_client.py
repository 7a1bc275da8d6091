"""`python -m tests.chaos.remote_client TARGET TOKENS`: a client in a process of its own, to be killed or frozen.

Says `reading` once the first token is there, and then reads on.
"""

from __future__ import annotations

import asyncio
import sys

from service.client import SlipstreamClient


async def main(target: str, tokens: int) -> None:
    """Read one long stream."""
    async with SlipstreamClient(target) as client:
        said = False
        async for _ in client.generate([1, 2, 3], max_tokens=tokens, temperature=0.0, ignore_eos=True, want_text=False):
            if not said:
                print("reading", flush=True)
                said = True


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
