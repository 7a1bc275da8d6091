"""Mutants of what stands beside the service: dialects of gateways, metrics, page, traces, health, messages."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GATEWAY = "tests/gateway/"
FACTS = GATEWAY + "test_facts.py::"
TENANTS = GATEWAY + "test_tenants.py::"
METRICS = "tests/metrics/"
PAGE = "tests/page/"
SERVICE = "tests/service/"

DOORS: tuple[Mutant, ...] = (
    Mutant(
        "bills-the-prompt-twice",
        "a gateway is told how many tokens were made",
        "service/gateway/answers.py",
        "completion_tokens=whole.usage.completion_tokens",
        "completion_tokens=whole.usage.prompt_tokens",
        GATEWAY + "test_generate.py::test_a_stream_has_new_ids_in_chunks_and_everything_once_more_at_the_end",
    ),
    Mutant(
        "load-in-pages",
        "a gateway is told the load in tokens",
        "service/gateway/loads.py",
        "pages.used * stats.page_size",
        "pages.used",
        FACTS + "test_the_rate_is_over_time_however_often_one_asks",
    ),
    Mutant(
        "gateway-not-switched-off",
        "the dialects are gone where they are switched off",
        "service/gateway/registration.py",
        "if not config.gateway or find_spec(PACKAGE) is None:",
        "if find_spec(PACKAGE) is None:",
        FACTS + "test_the_services_are_there_unless_they_are_switched_off_or_not_installed",
    ),
    Mutant(
        "sglang-shares-prefixes",
        "a tenant finds no other tenant's prompts in the prefix cache, in SGLang's dialect",
        "service/calls/open_calls.py",
        "        cache_salt=tenant_salt(asked.cache_salt, caller),\n",
        "",
        TENANTS + "test_one_tenant_is_limited_and_the_other_is_not[sglang]",
    ),
    Mutant(
        "vllm-shares-prefixes",
        "a tenant finds no other tenant's prompts in the prefix cache, in vLLM's dialect",
        "service/calls/open_calls.py",
        "        cache_salt=tenant_salt(asked.cache_salt, caller),\n",
        "",
        TENANTS + "test_one_tenant_is_limited_and_the_other_is_not[vllm]",
    ),
    Mutant(
        "follows-all-blocks",
        "a caller follows the cached blocks of its own tenant only",
        "service/calls/open_calls.py",
        'prefixes.watch(tenant_salt("", caller_name.get()))',
        'prefixes.watch("")',
        GATEWAY + "test_kv_events.py::test_a_caller_follows_the_blocks_of_its_own_tenant_only",
    ),
    Mutant(
        "no-last-piece",
        "the last piece of a tokenizer is marked, whatever its length",
        "service/gateway/tokenizer_zip.py",
        "start + CHUNK_BYTES >= len(data)",
        "start + CHUNK_BYTES > len(data)",
        FACTS + "test_the_last_piece_is_known_as_the_last",
    ),
    Mutant(
        "tokenizer-sought-in-the-internet",
        "a gateway asks the worker for the tokenizer, and not the internet",
        "service/gateway/worker.py",
        "else NOWHERE / info.name",
        "else Path(info.name)",
        FACTS + "test_the_model_is_described_and_its_path_only_where_that_is_asked_for",
    ),
    Mutant(
        "arrows-in-milliseconds",
        "times of a trace are microseconds",
        "service/metrics/chrome_trace.py",
        "round(seconds * 1e6, 1)",
        "round(seconds * 1e3, 1)",
        METRICS + "test_trace.py::test_a_trace_of_many_pieces_is_one_document",
    ),
    Mutant(
        "submitting-counts-as-overlap",
        "the overlap that a trace tells is the scheduler's work alone",
        "service/metrics/chrome_trace.py",
        ' for each in lanes["scheduler"] if each.kind != SUBMIT]',
        ' for each in lanes["scheduler"]]',
        METRICS + "test_trace.py::test_what_waits_for_the_device_is_no_work_beside_it",
    ),
    Mutant(
        "trace-for-any-peer",
        "a trace is recorded only for a peer that the setting allows",
        "service/metrics/door.py",
        "TraceDoor(config.trace_endpoint, lanes, about)",
        'TraceDoor("any", lanes, about)',
        METRICS + "test_trace.py::test_who_may_ask_and_for_what",
    ),
    Mutant(
        "counters-by-another-name",
        "the documentation has a metric's name as it is scraped",
        "service/metrics/metric.py",
        '"_total" if self.kind == "counter" else ""',
        '"_total" if self.kind == "gauge" else ""',
        "tests/docs/test_generate.py::test_pages_are_as_new[metrics]",
    ),
    Mutant(
        "first-refusal-unseen",
        "an alert sees the first refusal for a reason",
        "service/metrics/rpc.py",
        '            self._counters["rejected"].labels(reason)\n',
        "            pass\n",
        SERVICE + "test_metrics.py::test_every_reason_is_there_at_zero_before_its_first_refusal",
    ),
    Mutant(
        "sum-counted-as-one",
        "calls that a front end counted together count as many",
        "service/metrics/rpc.py",
        ".inc(amount)",
        ".inc()",
        SERVICE + "test_front_end_pair.py::test_what_a_front_end_counts_is_told_once",
    ),
    Mutant(
        "page-in-a-frame",
        "no other page may frame the one for people",
        "service/page/door.py",
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "base-uri 'none'; form-action 'none'",
        PAGE + "test_door.py::test_three_files_that_may_load_nothing_from_elsewhere",
    ),
    Mutant(
        "tenant-shown-on-the-page",
        "the page names streams as their clients know them, without their tenants",
        "service/page/moment.py",
        "public_id(row.request_id)",
        "row.request_id",
        PAGE + "test_moment.py::test_streams_are_named_as_their_clients_know_them_and_tenants_are_not",
    ),
    Mutant(
        "every-stream-looked-at",
        "a page costs the event loop no more than a bounded number of streams",
        "service/page/streams.py",
        "streams.oldest(MAX_ROWS)",
        "streams.oldest(len(streams))",
        PAGE + "test_feed.py::test_streams_beyond_the_bound_are_counted_only",
    ),
    Mutant(
        "stale-messages-pass",
        "code that differs from what the proto would generate is told",
        "service/pb/generate.py",
        'path.is_file() and _STAMPS.sub("", path.read_text()) == _STAMPS.sub("", text)',
        "path.is_file()",
        SERVICE + "test_pb.py::test_check_mode_notices_a_change",
    ),
    Mutant(
        "ready-for-ever",
        "readiness falls when the server drains",
        "service/servicers/health.py",
        "self._serving[service] = serving",
        "self._serving[service] = True",
        SERVICE + "test_health_port.py::test_it_answers_while_loading_when_ready_and_while_draining",
    ),
    Mutant(
        "tenants-refusal-uncounted",
        "a stream that a tenant's bytes do not allow is counted as refused to this tenant",
        "service/calls/desk.py",
        'if refused.reason == "RESUME_BYTES":',
        'if refused.reason != "RESUME_BYTES":',
        "tests/tenants/test_tenants_served.py::test_a_history_that_passes_the_bound_loses_its_beginning_and_says_so",
    ),
    Mutant(
        "exemplars-of-no-trace",
        "a request keeps the id of the trace that its caller samples",
        "service/tracing/request_span.py",
        "replace(request, trace_id=trace_id) if trace_id else request",
        "request",
        METRICS + "test_spans.py::test_exemplars_need_no_opentelemetry",
    ),
)
