"""Mutants of the command line, and of what a server reads, checks and says before it serves and when it goes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVICE = "tests/service/"
CLI = SERVICE + "test_cli.py::"
SETTINGS = SERVICE + "test_settings.py::"
STARTUP = SERVICE + "test_startup.py::"
SLOT = SERVICE + "test_engine_slot.py::"
HEALTH = SERVICE + "test_health_port.py::"
TERMINAL = SERVICE + "test_terminal.py::"
TLS = "tests/security/test_tls.py::"

COMMANDS: tuple[Mutant, ...] = (
    Mutant(
        "traceback-at-start",
        "`python -m service` tells what cannot start in one line, as `slipstream` does",
        "service/__main__.py",
        "from service.cli import main",
        "from service.cli import cli as main",
        STARTUP + "test_a_bad_variable_is_named",
    ),
    Mutant(
        "one-exit-code",
        "the exit code says what kept the server from starting",
        "service/cli.py",
        "sys.exit(error.exit_code)",
        "sys.exit(1)",
        STARTUP + "test_a_bad_variable_is_named",
    ),
    Mutant(
        "absent-flag-hides-variable",
        "a flag that was not given leaves the environment and the file their word",
        "service/cli_options.py",
        "return value or None",
        "return value",
        CLI + "test_flags_become_settings_only_when_given",
    ),
    Mutant(
        "help-imports-commands",
        "help answers at once, without importing what it lists",
        "service/lazy_group.py",
        "for name, (_, told) in self._table.items()]",
        "for name, (_, told) in self._table.items() if self.get_command(ctx, name)]",
        CLI + "test_help_names_subcommands_that_cannot_be_imported",
    ),
    Mutant(
        "version-of-another",
        "the version that is told is that of this distribution",
        "service/version.py",
        "return version(DISTRIBUTION)",
        'return version("grpcio")',
        CLI + "test_version",
    ),
    Mutant(
        "switches-documented-upside-down",
        "the documentation has the defaults of the code",
        "service/docs.py",
        'return "on" if setting.default else "off"',
        'return "off" if setting.default else "on"',
        CLI + "test_tables_in_readmes_are_as_new[service]",
    ),
    Mutant(
        "file-over-environment",
        "a variable of the environment wins over the file",
        "service/settings.py",
        "values |= _from_env(settings, env)",
        "values = _from_env(settings, env) | values",
        SETTINGS + "test_precedence",
    ),
    Mutant(
        "window-pool-unset",
        "each setting of the engine reaches it",
        "service/config.py",
        "                max_window_tokens=self.max_window_tokens,\n",
        "",
        SETTINGS + "test_each_setting_of_the_engine_changes_one_value_there[max_window_tokens]",
    ),
    Mutant(
        "ports-alike",
        "gRPC and metrics are not given one port",
        "service/config.py",
        "if self.port and self.port == self.metrics_port and self.host == self.metrics_host:",
        "if self.port and self.port == self.metrics_port and self.host != self.metrics_host:",
        SETTINGS + "test_the_two_ports_must_differ",
    ),
    Mutant(
        "hangs-at-another-time",
        "without a flag the engine has its own default",
        "service/engine_settings.py",
        'default_of(ExecutorConfig, "hang_timeout")',
        'default_of(GrammarConfig, "compile_timeout")',
        SETTINGS + "test_defaults_are_those_of_core",
    ),
    Mutant(
        "truncated-weights-taken",
        "weights that were cut short are refused before anything is loaded",
        "service/preflight.py",
        "if size != needed:",
        "if size > needed:",
        STARTUP + "test_unusable_checkpoints_are_refused_by_name[spoil_truncate-is truncated]",
    ),
    Mutant(
        "loading-outlives-the-stop",
        "a server that is told to stop does not wait for the weights that it reads",
        "service/builder.py",
        "daemon=True",
        "daemon=False",
        SERVICE + "test_builder.py::test_a_process_that_stops_does_not_wait_for_what_is_loaded",
    ),
    Mutant(
        "late-result-raises",
        "an engine that comes after its waiter was cancelled is dropped without an error",
        "service/builder.py",
        "        if done.cancelled():\n            return\n",
        "",
        SERVICE + "test_builder.py::test_a_result_that_comes_after_its_cancelled_waiter_disturbs_nothing",
    ),
    Mutant(
        "full-stage-unseen",
        "a stage of loading that is complete is shown as complete",
        "service/progress.py",
        "now - self._drawn >= REDRAW_SECONDS or fraction >= 1.0",
        "now - self._drawn >= REDRAW_SECONDS",
        TERMINAL + "test_progress_on_a_terminal_is_one_line_per_stage_redrawn",
    ),
    Mutant(
        "lost-clients-in-the-log",
        "a client that hung up is no error of the log",
        "service/logs.py",
        "    logging.getLogger(GRPC_LOGGER).addFilter(not_a_lost_client)\n",
        "",
        TERMINAL + "test_the_log_is_configured_without_that_report",
    ),
    Mutant(
        "switch-interval-swapped",
        "a process that writes to its clients hands the interpreter over soonest",
        "service/switch_interval.py",
        "WRITING_SECONDS if writes else ENGINE_ONLY_SECONDS",
        "ENGINE_ONLY_SECONDS if writes else WRITING_SECONDS",
        SERVICE + "test_switch_interval.py::test_a_process_that_writes_to_clients_is_quicker_to_hand_over",
    ),
    Mutant(
        "death-called-a-drain",
        "a dead engine is told as dead, during a drain as well",
        "service/engine_slot.py",
        "EngineState.DRAINING if self.draining and state is EngineState.READY else state",
        "EngineState.DRAINING if self.draining else state",
        SLOT + "test_a_drain_hides_readiness_and_no_death",
    ),
    Mutant(
        "drain-begins-again",
        "a drain is as old as its first word",
        "service/engine_slot.py",
        "if draining and self._draining_since is None:",
        "if draining:",
        SLOT + "test_a_drain_is_measured_from_its_first_word",
    ),
    Mutant(
        "cut-short-as-drained",
        "the exit code says that a second signal cut the drain short",
        "service/lifecycle.py",
        "return EXIT_BY_SIGNAL + signals.second.result()",
        "return EXIT_DRAINED",
        SERVICE + "test_lifecycle.py::test_a_second_signal_ends_it_at_once",
    ),
    Mutant(
        "health-port-outlives-the-server",
        "no health check is answered once the server is gone",
        "service/health_port.py",
        "            await self._grpc.stop(None)\n",
        "            return\n",
        HEALTH + "test_it_answers_while_loading_when_ready_and_while_draining",
    ),
    Mutant(
        "streams-of-the-demo-mixed",
        "the demo shows each stream in its own line",
        "service/demo.py",
        "self._lines[at] += text",
        "self._lines[0] += text",
        SERVICE + "test_demo.py::test_each_stream_is_shown_in_a_line_of_its_own",
    ),
    Mutant(
        "client-authority-forgotten",
        "where an authority of clients is named, clients must have its certificate",
        "service/tls.py",
        "return TlsFiles(cert, key, contents[2])",
        "return TlsFiles(cert, key)",
        TLS + "test_the_authority_of_clients_is_read_where_one_is_named",
    ),
    Mutant(
        "client-certificate-optional",
        "a client without a certificate is turned away where one is asked for",
        "service/tls_credentials.py",
        "required = served.client_ca is not None",
        "required = False",
        TLS + "test_mutual_tls_takes_only_clients_of_its_authority",
    ),
    Mutant(
        "authority-needs-a-certificate",
        "a command that names an authority uses TLS, with or without a certificate of its own",
        "service/server_access.py",
        "if any(files) else None",
        "if all(files) else None",
        SERVICE + "test_server_access.py::test_an_authority_alone_is_enough_for_tls",
    ),
)
