"""`slipstream bench`: benchmarks that users can run too. A benchmark is one file and one line in `BENCHMARKS`."""

from __future__ import annotations

import click

from service.cli.lazy_group import LazyGroup

BENCHMARKS: dict[str, tuple[str, str]] = {
    "asserts": ("service.bench.asserts:asserts", "Cost of the device checks: off, counting, trapping."),
    "cpu": ("service.bench.cpu:cpu", "Output tokens per second on the CPU, transformers beside it."),
    "deterministic": (
        "service.bench.deterministic:deterministic",
        "What --deterministic costs, and whose bits depend on the batch without it.",
    ),
    "encoders": (
        "service.bench.encoders:encoders",
        "Texts per second embedded and judged on the CPU, sentence-transformers beside it.",
    ),
    "gpu": (
        "service.bench.gpu:gpu",
        "Decode and prefill on a GPU as shares of what it can do; transformers beside it.",
    ),
    "growth": ("service.bench.growth:growth", "Curves of throughput, host time, start-up and memory."),
    "host-cache": (
        "service.bench.host_cache:host_cache",
        "What prefixes in host memory save, beside computing them again.",
    ),
    "memory": ("service.bench.memory:memory", "What MLA latents and a pool for sliding windows save."),
    "overlap": (
        "service.bench.overlap:overlap",
        "Idle share of an emulated device, with overlap on and off.",
    ),
    "pd": ("service.bench.pd:pd", "Prefill on one engine and decode on another: keys over TCP, and first tokens."),
    "replicas": ("service.bench.replicas:replicas", "Several engines behind one server, and the router before them."),
    "scheduler": ("service.bench.scheduler:scheduler", "Host time per step and request, and per prompt admitted."),
    "service": ("service.bench.service:service", "Tokens per second to gRPC clients, against raw grpc.aio."),
    "speculation": (
        "service.bench.speculation:speculation",
        "Tokens per second with drafts and without, and that outputs are the same.",
    ),
}


@click.group(cls=LazyGroup, table=BENCHMARKS)
def bench() -> None:
    """Measure the server on this machine. Each benchmark prints its figures, and one JSON object last with --json."""
