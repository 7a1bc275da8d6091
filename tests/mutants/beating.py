"""Mutants of silent processes, frames that cannot be read, second signals, and visitors of the metrics port."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BEAT = "tests/service/test_heartbeat.py::"
FRAMES = "tests/service/test_broken_frames.py::"
REPLACED = "tests/service/test_front_ends_replaced.py::"
VISITORS = "tests/metrics/test_visitors.py::"
CONNECTIONS = "tests/metrics/test_connections.py::"
EXPOSITION = "tests/metrics/test_exposition.py::"
HOSTS = "tests/service/test_host_names.py::"

BEATING: tuple[Mutant, ...] = (
    Mutant(
        "silence-by-the-clock",
        "a process that stood still itself has not seen another one's silence",
        "service/frontends/heartbeat.py",
        "passed, self._looked_at = min(now - self._looked_at, MOST_PER_LOOK), now",
        "passed, self._looked_at = now - self._looked_at, now",
        BEAT + "test_an_observer_that_stood_still_has_not_seen_a_silence",
    ),
    Mutant(
        "silence-never-ends",
        "silence ends with the first word",
        "service/frontends/heartbeat.py",
        "0.0 if known != self._known else self._seconds + passed",
        "self._seconds + passed",
        BEAT + "test_silence_adds_up_until_something_arrives",
    ),
    Mutant(
        "front-end-that-never-starts",
        "a front end that does not come to listen is killed",
        "service/frontends/front_end.py",
        "(DEAD_SECONDS if self.host.listening.is_set() else START_SECONDS)",
        "(DEAD_SECONDS if self.host.listening.is_set() else 1e9)",
        REPLACED + "test_a_front_end_that_never_listens_is_killed",
    ),
    Mutant(
        "silent-engine-takes-calls",
        "calls are refused at once while the engine's process says nothing",
        "service/engine/slot.py",
        "        if self.silent:\n",
        "        if False:\n",
        "tests/service/test_engine_slot.py::test_a_silent_engine_is_not_asked",
    ),
    Mutant(
        "silence-without-a-hint",
        "a refusal for silence says when to come back",
        "service/rpc/status.py",
        "if isinstance(error, Overloaded | EngineSilent):",
        "if isinstance(error, Overloaded):",
        "tests/service/test_engine_slot.py::test_a_silent_engine_is_not_asked",
    ),
    Mutant(
        "broken-text-skipped",
        "a text that is none ends its stream",
        "service/frontends/remote_engine.py",
        "            if delta is None:\n                self._break(number)\n",
        "            if delta is None:\n                pass\n",
        FRAMES + "test_a_text_that_is_none_ends_its_stream_alone",
    ),
    Mutant(
        "broken-call-untyped",
        "a call that cannot be read is answered with a typed error",
        "service/frontends/host.py",
        "    except (ValueError, KeyError, TypeError, RecursionError):\n        raise",
        "    except ValueError:\n        raise",
        FRAMES + "test_a_call_that_is_none_is_answered_and_its_neighbours_go_on",
    ),
    Mutant(
        "frames-behind-a-broken-one",
        "nothing behind a broken envelope is looked at",
        "service/frontends/wire.py",
        "                self._transport.abort()\n",
        "                pass\n",
        FRAMES + "test_a_broken_envelope_ends_the_connection_and_what_a_front_end_had",
    ),
    Mutant(
        "one-frame-for-all",
        "what a front end gets at once is bounded",
        "service/frontends/host.py",
        "            if batch.size > FRAME_BYTES:\n",
        "            if False:\n",
        FRAMES + "test_frames_are_bounded_and_streams_wait_for_room",
    ),
    Mutant(
        "half-told-delta",
        "what cannot be told of a stream leaves nothing in the frame of the others",
        "service/frontends/events.py",
        "            self._add_logprobs(logprobs)\n            self._ids += numbers\n",
        "            self._ids += numbers\n            self._add_logprobs(logprobs)\n",
        FRAMES + "test_what_cannot_be_told_of_a_stream_leaves_nothing_in_the_frame",
    ),
    Mutant(
        "log-probabilities-of-the-first",
        "each delta gets its own log probabilities",
        "service/frontends/events.py",
        "first + id_count, told + logprob_count, at + length",
        "first + id_count, 0, at + length",
        "tests/service/test_frontend_wire.py::test_a_batch_of_events_survives_being_cut_anywhere",
    ),
    Mutant(
        "second-signal-waits-for-the-device",
        "a second signal does not wait for an engine that hangs",
        "service/server/served_engine.py",
        "seconds = ENGINE_STOP_SECONDS if grace > 0 else HURRIED_STOP_SECONDS",
        "seconds = ENGINE_STOP_SECONDS",
        "tests/service/test_lifecycle.py::test_a_second_signal_does_not_wait_for_an_engine_that_hangs",
    ),
    Mutant(
        "names-of-browsers-alone",
        "a name that anybody may own is refused whatever else is said",
        "service/metrics/visitors.py",
        "    if len(hosts) > 1 or not all",
        '    if "Sec-Fetch-Site" in headers and not all',
        VISITORS + "test_a_name_that_anybody_may_own_is_refused_whatever_else_is_said",
    ),
    Mutant(
        "origin-without-its-port",
        "a page of another port is of another origin",
        "service/metrics/visitors.py",
        "    return place.netloc.lower() == host.strip().lower() or",
        "    return _host(place.netloc) == _host(host) or",
        VISITORS + "test_a_post_of_another_origin_is_refused",
    ),
    Mutant(
        "listed-names-end-anywhere",
        "a listed name stands for what is below it and for nothing else",
        "service/metrics/visitors.py",
        'host == name.lstrip(".") or (name.startswith(".") and host.endswith(name))',
        'host.endswith(name.lstrip("."))',
        VISITORS + "test_a_name_that_anybody_may_own_is_refused_whatever_else_is_said",
    ),
    Mutant(
        "deaf-clients-keep-their-places",
        "clients that do not read their answer keep no scraper out",
        "service/metrics/connections.py",
        "if connection in self._unheard] or list(self._open)",
        "if connection in self._unheard] or list(self._open)[-1:]",
        CONNECTIONS + "test_the_client_with_most_connections_gives_way",
    ),
    Mutant(
        "an-address-is-a-client",
        "a network of IPv6 is one client",
        "service/metrics/connections.py",
        "    return found.packed[:8].hex()\n",
        "    return address\n",
        CONNECTIONS + "test_a_network_of_ipv6_is_one_client_and_mapped_addresses_are_many",
    ),
    Mutant(
        "threads-without-end",
        "threads of the metrics port are bounded",
        "service/metrics/connections.py",
        "            if len(self._served) >= THREADS_PER_PLACE * self._most:\n                return False\n",
        "",
        CONNECTIONS + "test_threads_whose_place_was_taken_are_bounded",
    ),
    Mutant(
        "metrics-from-before-the-question",
        "no scraper gets what was begun before it asked",
        "service/metrics/exposition.py",
        "if began < asked or kind",
        "if began < 0 or kind",
        EXPOSITION + "test_those_who_wait_share_a_rendering_and_it_was_begun_after_they_asked",
    ),
    Mutant(
        "each-scraper-its-rendering",
        "scrapers that wait get one rendering between them",
        "service/metrics/exposition.py",
        "if began < asked or kind",
        "if True or kind",
        EXPOSITION + "test_those_who_wait_share_a_rendering_and_it_was_begun_after_they_asked",
        dies_by="timeout",
    ),
    Mutant(
        "first-address-or-none",
        "one address of this machine is enough of those that a name stands for",
        "service/frontends/group.py",
        "            except OSError as error:\n                failed = error\n    except",
        "            except OSError as error:\n                failed = error\n                break\n    except",
        HOSTS + "test_one_address_of_this_machine_is_enough",
    ),
    Mutant(
        "taken-on-one-address-only",
        "a port that is taken on one of a name's addresses is taken",
        "service/server/startup_checks.py",
        "    if len(failures) < len(found) and not taken:\n",
        "    if len(failures) < len(found):\n",
        HOSTS + "test_a_port_that_is_taken_on_one_of_them_is_taken",
    ),
)
