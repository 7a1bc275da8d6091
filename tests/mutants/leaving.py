"""Mutants of how a server leaves, and of what must not hold it up: templates, logs, mounts, clocks, compiled code."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PROCESS, RENDERER = "core/text/chat_process.py", "core/text/chat_renderer.py"
CHATS = "tests/text/test_chat_renderer.py::"
EXITS = "tests/chaos/test_exits.py::"
WRITER, LOGS = "service/process/log_writer.py", "tests/service/test_log_writer.py::"
LIBRARY, EXTENSION = "core/models/native/kept_library.py", "core/models/native/extension.py"
COMPILING = "core/models/native/compile_process.py"
KEPT = "tests/models/test_kept_library.py::"
LOOK, MOUNTS = "service/access/timed_look.py", "tests/security/test_hanging_mounts.py::"

LEAVING: tuple[Mutant, ...] = (
    Mutant(
        "template-without-limit",
        "a chat template that takes too long of a processor is ended",
        PROCESS,
        'signal.setitimer(signal.ITIMER_PROF, setup["seconds"])',
        'signal.setitimer(signal.ITIMER_PROF, 0 * setup["seconds"])',
        CHATS + "test_a_template_without_end_is_ended_and_the_next_chat_is_rendered",
    ),
    Mutant(
        "template-without-memory-limit",
        "a chat template is bounded in memory",
        PROCESS,
        '    _limit_memory(setup["memory_bytes"])\n',
        "",
        CHATS + "test_a_template_is_bounded_in_characters_memory_and_arithmetic",
    ),
    Mutant(
        "chat-answered-by-a-dead-fork",
        "an answer is taken for the question that has its number",
        RENDERER,
        '.get("number") != self._number:',
        '.get("number") is None:',
        CHATS + "test_a_fork_that_died_between_two_chats_gives_no_answer_to_another",
    ),
    Mutant(
        "templates-outlive-the-renderer",
        "what is at work when the engine stops is ended",
        RENDERER,
        "        _close(self._processes)\n",
        "        _close(self._processes[:0])\n",
        CHATS + "test_a_template_at_work_ends_with_the_renderer",
    ),
    Mutant(
        "patience-refuses-a-chat",
        "a machine without a processor for it speaks against no conversation",
        RENDERER,
        "            self.end()\n            raise _no_processor() from None",
        '            self.end()\n            raise InvalidRequest.of("chat", "takes too long") from None',
        CHATS + "test_a_machine_without_a_processor_for_it_refuses_nothing",
    ),
    Mutant(
        "templates-hold-up-texts",
        "a template that takes its time takes no thread from texts",
        "core/engine/input_processor.py",
        "await self._chats.run(",
        "await self._workers.run(",
        "tests/engine/test_chats_at_work.py::test_texts_need_none_of_what_templates_hold",
    ),
    Mutant(
        "no-bound-on-the-exit",
        "a drained process ends, whatever thread is stuck",
        "service/cli/commands/serve.py",
        "    leave_within(code)\n    return code\n",
        "    return code\n",
        EXITS + "test_a_thread_that_never_ends_is_named_and_left",
        dies_by="timeout",
    ),
    Mutant(
        "exit-left-to-the-interpreter",
        "a drained process ends, also where a thread keeps the interpreter",
        "service/process/exit_guard.py",
        "signal.setitimer(signal.ITIMER_REAL, seconds + FORCE_SECONDS)",
        "signal.setitimer(signal.ITIMER_REAL, 1000 * (seconds + FORCE_SECONDS))",
        EXITS + "test_a_thread_that_keeps_the_interpreter_is_ended_by_the_system",
        dies_by="timeout",
    ),
    Mutant(
        "log-written-where-it-is-called",
        "a log that is not read holds up no call and no signal",
        "service/process/logs.py",
        "handlers=[LogWriter(sys.stderr.fileno())]",
        "handlers=[logging.StreamHandler(sys.stderr)]",
        EXITS + "test_a_log_that_is_not_read_holds_up_no_call_and_no_signal",
        dies_by="timeout",
    ),
    Mutant(
        "log-without-bound",
        "what waits to be logged is bounded",
        WRITER,
        "if self._waiting.qsize() >= MAX_LINES:",
        "if self._waiting.qsize() >= 1000 * MAX_LINES:",
        LOGS + "test_a_log_that_is_not_read_is_bounded_and_says_what_is_missing",
    ),
    Mutant(
        "dropped-in-silence",
        "the log says how much of it is missing",
        WRITER,
        "            if dropped > told:",
        "            if dropped < told:",
        EXITS + "test_a_log_that_is_read_late_says_how_much_is_missing",
    ),
    Mutant(
        "transport-writes-by-itself",
        "clients cannot make the transport write to stderr",
        "service/process/logs.py",
        '    os.environ.setdefault("GRPC_VERBOSITY", "NONE")\n',
        '    os.environ.setdefault("GRPC_VERBOSITY", "INFO")\n',
        EXITS + "test_the_transport_writes_nothing_that_clients_make_it_write",
    ),
    Mutant(
        "every-call-waits-for-a-mount",
        "a file system that does not answer holds up one look, once",
        LOOK,
        "if self._late or time.monotonic()",
        "if time.monotonic()",
        MOUNTS + "test_a_look_that_hangs_is_waited_for_once",
    ),
    Mutant(
        "a-look-for-each-call",
        "calls that come together share a look at the files",
        LOOK,
        "time.monotonic() + FRESH_SECONDS",
        "time.monotonic() - FRESH_SECONDS",
        MOUNTS + "test_calls_that_come_together_share_a_look",
    ),
    Mutant(
        "part-of-a-library-loaded",
        "only a whole library is loaded",
        LIBRARY,
        "        return digest_path(library).read_text() == digest(library)\n",
        "        return digest_path(library).exists() and library.exists()\n",
        KEPT + "test_what_is_not_whole_is_compiled_again",
    ),
    Mutant(
        "first-loaded-by-the-server",
        "what a compiler made is loaded in a process of its own first",
        COMPILING,
        "        load_library(made)\n",
        "",
        KEPT + "test_what_the_compiler_made_is_loaded_elsewhere_first",
    ),
    Mutant(
        "named-before-it-is-written",
        "a library is on the disk before it has its name",
        LIBRARY,
        "        _to_disk(path)\n    made.replace",
        "        pass\n    made.replace",
        KEPT + "test_a_library_is_on_the_disk_before_it_has_its_name",
    ),
    Mutant(
        "cache-of-another-user",
        "code that others could have written is not loaded",
        EXTENSION,
        "        refuse_foreign(path.parent)\n",
        "",
        KEPT + "test_what_others_could_have_written_is_not_loaded",
    ),
    Mutant(
        "compiled-twice",
        "of two servers one compiles",
        EXTENSION,
        "        if alone and is_whole(path):\n",
        "        if alone and not path.parent:\n",
        KEPT + "test_two_servers_compile_once",
    ),
    Mutant(
        "compilers-outlive-the-server",
        "compilers end with the server that wanted the library",
        COMPILING,
        "    os.killpg(0, signal.SIGKILL)\n",
        "    os._exit(1)\n",
        KEPT + "test_compilers_end_with_the_server",
    ),
    Mutant(
        "cache-that-cannot-be-entered",
        "a cache that cannot be used costs a line of the log",
        EXTENSION,
        "    except (OSError, ExtensionUnavailable):\n",
        "    except ExtensionUnavailable:\n",
        KEPT + "test_a_cache_of_root_costs_a_line_of_the_log",
    ),
)
