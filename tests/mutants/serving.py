"""Mutants of the gRPC service."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVICE = "tests/service/"

SERVING: tuple[Mutant, ...] = (
    Mutant(
        "write-timeout-removed",
        "a client that does not read is evicted",
        "service/rpc/write_timeout.py",
        "if due <= now:",
        "if due < 0:",
        SERVICE + "test_write_bound.py::test_a_write_that_hangs_is_cut",
    ),
    Mutant(
        "sanitiser-removed",
        "a client never sees what an unexpected error says",
        "service/rpc/status.py",
        'return ErrorStatus(grpc.StatusCode.INTERNAL, "internal error", (info,))',
        "return ErrorStatus(grpc.StatusCode.INTERNAL, str(error), (info,))",
        SERVICE + "test_statuses.py::test_unknown_errors_are_hidden_behind_an_incident",
    ),
    Mutant(
        "pushback-removed",
        "a refusal for want of room says when to come back",
        "service/rpc/status.py",
        "        trailers.append((PUSHBACK_TRAILER, NO_RETRY if silent else str(millis)))\n",
        "",
        SERVICE + "test_statuses.py::test_overload_says_when_to_come_back",
    ),
    Mutant(
        "not-ready-too-late",
        "readiness turns false before anything else of a drain",
        "service/server/server.py",
        "        self.refuse_readiness()\n",
        "",
        SERVICE + "test_health.py::test_watch_tells_of_the_drain_and_then_ends",
    ),
    Mutant(
        "port-shared",
        "a taken port is an error, not a second listener",
        "service/rpc/channel_options.py",
        '("grpc.so_reuseport", int(shared_port))',
        '("grpc.so_reuseport", 1)',
        SERVICE + "test_startup.py::test_a_second_server_on_the_port_is_refused_and_the_first_goes_on",
    ),
    Mutant(
        "ping-timeout-removed",
        "a frozen client is noticed (keepalive_timeout alone does nothing)",
        "service/rpc/channel_options.py",
        '("grpc.http2.ping_timeout_ms", _millis(config.keepalive_timeout)),',
        "",
        SERVICE + "test_boundaries.py",
    ),
    Mutant(
        "handler-swallows-cancellation",
        "CancelledError is raised again",
        "service/rpc/interceptors.py",
        "    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):\n        raise\n",
        "",
        SERVICE + "test_interceptors.py::test_cancellation_is_raised_again",
    ),
)
