"""The rows of the scorecard: number, what is done, what must come out; and why some have no figure."""

from __future__ import annotations

ROWS: dict[int, tuple[str, str]] = {
    1: ("exactly-once delivery, readers of mixed speed", "0 duplicated, missing, wrong tokens; one terminal each"),
    2: ("row 1 with cancels, deadlines, aborts and frozen readers", "a correct prefix each; nothing after a terminal"),
    3: ("deterministic simulation under seeds", "no seed fails"),
    4: ("the simulation at length", "as row 3, every fault hit"),
    5: ("replay of a seed", "the same decisions"),
    6: ("pools against a dict model", "conserved, no alias, double free raises"),
    7: ("scheduler properties", "bounded wait, budgets kept, FIFO within a class"),
    8: (
        "leaks after requests that were aborted anywhere",
        "rows, pages, tasks, files, threads back within 1 s",
    ),
    9: ("soak for an hour and more", "RSS slope below 1 MB/h"),
    10: ("1,000 streams held at 1 token/s", "0 errors, below 100 kB per stream"),
    11: (
        "offered 3 times its capacity",
        "goodput at least 90 % of peak; refusals with RetryInfo in 50 ms; SERVING",
    ),
    12: ("one slow reader among 32", "evicted within write timeout + 1 s; the others' p99 gap at most doubles"),
    13: ("clients with window 0, and clients that never read", "all evicted within write timeout + 1 s"),
    14: ("client killed, client frozen", "pages back within 1 s; within keepalive + ping timeout + 1 s"),
    15: ("client leaves in each phase", "everything back within two steps"),
    16: (
        "deadline in each phase, and already past on arrival",
        "as row 15; no forward row for the dead",
    ),
    17: ("forward raises at step k", "every stream ends once with ENGINE_DEAD and a correct prefix; exit 1 within 2 s"),
    18: ("NaN in the logits of one row", "that request INTERNAL, all others bit-equal"),
    19: ("a real device assert", "all UNAVAILABLE within 2 s, exit, restart serves"),
    20: ("forward thread dies, hangs", "as row 17; exit within the hang timeout + 3 s; NOT_SERVING before"),
    21: ("SIGTERM with no, short and long streams, an open Watch and new calls", "order of the drain; exit 0 in bound"),
    22: ("what cannot start", "exit code and one line; a taken port within 1 s"),
    23: ("wall clock jumps an hour", "no timeout fires early or late"),
    24: ("health in every state and under load", "as the table of states; Check p99 at most 50 ms at 3 times the load"),
    25: ("batch invariance", "equal tokens alone and in any batch"),
    26: ("preempt and resume against no preemption", "the same tokens"),
    27: ("KV isolation: freed pages poisoned, prefix hashes colliding, salts", "no foreign read, no cross-tenant hit"),
    28: ("edges of every parameter, fuzzed protobufs", "documented codes only; refused in 50 ms, megabytes in 1 s"),
    29: ("edges of token ids beside a good stream", "INVALID_ARGUMENT; the good stream unchanged"),
    30: (
        "doubled input size",
        "3 times the time or less, on average over three doublings and more; the loop 20 ms late or less",
    ),
    31: ("texts of errors", "no path, address, class name or prompt in them"),
    32: ("authentication of every method", "default deny; health only is open"),
    33: ("static bans and bind addresses", "nothing found"),
    34: ("malicious model directories", "refused, no canary"),
    35: ("transport abuse", "probe without errors, p99 below 500 ms"),
    36: ("metrics against the history of clients", "equal; series constant; a stalled scraper stalls nothing"),
    37: ("TLS rotation under load, mTLS", "0 broken streams; new certificate for the next connection"),
    38: ("rolling restart of two replicas", "every call whole"),
    39: ("query of death with retries on", "at most 2 workers lost"),
    40: ("mutants", "all killed but named equivalents"),
}

UNCOVERED: dict[int, str] = {
    9: "takes an hour and more; `make soak` runs minutes of it without the slope",
    19: "needs a CUDA device",
    25: "`make test ARGS=tests/proofs/equivalence`; figures in docs/explanation/proofs.md",
    40: "`make mutants` prints killed and survivors",
}
