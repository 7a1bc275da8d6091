"""Mutants of the commands: options that do nothing, statuses that lie, what is left behind."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ACCESS = "tests/service/test_server_access.py::"
ADAPTERS = "tests/service/test_adapters.py::"
COMMANDS = "tests/service/test_commands.py::"
WAITING = "tests/service/test_waiting_answers.py::"

COMMANDING: tuple[Mutant, ...] = (
    Mutant(
        "adapter-pin-ignored",
        "adapters load --pin keeps the adapter from being evicted",
        "service/cli/commands/adapters.py",
        "client.load(name, path, pinned=pin)",
        "client.load(name, path)",
        ADAPTERS + "test_the_commands",
    ),
    Mutant(
        "embed-dimensions-ignored",
        "embed --dimensions shortens the vectors",
        "service/cli/commands/embed.py",
        '        asked["dimensions"] = dimensions\n',
        "        pass\n",
        "tests/service/test_embed.py::test_the_command_prints_vectors_of_a_server",
    ),
    Mutant(
        "zero-is-no-option",
        "generate --temperature 0 is greedy, not the model's default",
        "service/cli/commands/generate.py",
        "for name, value in sampling.items() if value is not None}",
        "for name, value in sampling.items() if value}",
        COMMANDS + "test_options_that_are_zero_are_given_all_the_same",
    ),
    Mutant(
        "health-asks-the-other-question",
        "health asks for readiness, and for life with --live",
        "service/cli/commands/health.py",
        "LIVENESS if live else READINESS",
        "READINESS if live else LIVENESS",
        "tests/service/test_health_port.py::test_the_command_says_it_with_its_exit_code",
    ),
    Mutant(
        "local-engine-keeps-running",
        "a command stops the engine that it started",
        "service/cli/commands/local.py",
        "        await engine.stop()\n",
        "        pass\n",
        "tests/service/test_cli.py::test_generate_runs_an_engine_of_its_own",
    ),
    Mutant(
        "serve-tells-the-wanted-port",
        "the ready line has the port that was bound",
        "service/cli/commands/serve.py",
        "{config.host}:{server.port}",
        "{config.host}:{config.port}",
        COMMANDS + "test_the_ready_line_tells_the_ports_that_were_bound",
    ),
    Mutant(
        "dead-engine-exits-with-zero",
        "serve exits with 1 when the engine failed",
        "service/cli/commands/serve.py",
        "        os._exit(code)\n",
        "        os._exit(0)\n",
        "tests/service/test_startup.py::test_a_process_whose_engine_dies_exits_with_one",
    ),
    Mutant(
        "trace-tells-the-inverse-share",
        "trace tells how much of the scheduler's work ran beside the device's",
        "service/cli/commands/trace.py",
        "{beside / work:.0%}",
        "{1 - beside / work:.0%}",
        COMMANDS + "test_trace_asks_for_its_seconds_and_tells_what_ran_beside_the_device[]",
    ),
    Mutant(
        "empty-server-loads-a-model",
        "--server with an empty value is refused, not taken for a command without a server",
        "service/cli/server_access.py",
        "if not target.strip():",
        "if not target and value is None:",
        ACCESS + "test_every_command_refuses_what_is_no_server[-must not be empty-generate x]",
    ),
    Mutant(
        "port-modulo-65536",
        "a port that does not exist is refused, not taken for another",
        "service/cli/server_access.py",
        "1 <= int(significant or 0) <= MAX_PORT",
        "1 <= int(significant or 0)",
        ACCESS + "test_a_port_that_does_not_exist_is_refused_in_every_scheme",
    ),
    Mutant(
        "nan-seconds",
        "nan is no number of seconds",
        "service/cli/seconds.py",
        "if math.isnan(found):",
        "if found is None:",
        COMMANDS + "test_seconds_are_a_number_and_not_negative",
    ),
    Mutant(
        "frozen-server-without-bound",
        "a command waits no longer than --wait for a server that stopped answering",
        "service/cli/commands/waiting.py",
        "min(ANSWER_SECONDS, left), gone",
        "ANSWER_SECONDS, gone",
        WAITING + "test_a_server_that_stops_answering_is_waited_for_as_long_as_was_asked",
    ),
    Mutant(
        "silent-port-without-bound",
        "a port that says nothing is not waited for",
        "service/client/client.py",
        "self.stub.GetServerInfo, request, timeout)",
        "self.stub.GetServerInfo, request)",
        WAITING + "test_a_port_that_says_nothing_is_no_server",
    ),
    Mutant(
        "busy-loader-given-up",
        "a loading server that is too busy to answer is asked again",
        "service/cli/commands/waiting.py",
        "        if found is _Answer.OTHER:\n",
        "        if found is not _Answer.LOADING:\n",
        WAITING + "test_a_question_that_is_not_answered_while_it_loads_is_asked_again",
    ),
)
