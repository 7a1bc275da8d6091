"""`python -m tests.unit.core.disagg.giving TOKENS`: another engine that has prefilled, and gives its keys by NIXL.

Prints its port, then a line for each offer that is over, and ends with its standard input.
"""

from __future__ import annotations

import sys

from core.disagg.nixl_agent import NixlAgent
from core.disagg.over_nixl import NixlSender
from core.disagg.tcp_giver import TcpGiver
from tests.unit.core.disagg.transfer import ENGINE, FACTS, SECRET, TIMEOUT, Keys, offer


def main(tokens: int) -> None:
    sender = NixlSender(NixlAgent(loopback=True))
    giver = TcpGiver(("127.0.0.1", 0), None, SECRET, ENGINE, lambda: FACTS, TIMEOUT, sender)
    giver.expect("r")
    giver.offer(offer(Keys(tokens), tokens=tokens), lambda delivered: print("over", delivered, flush=True))
    print(giver.address[1], flush=True)
    sys.stdin.read()
    giver.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
