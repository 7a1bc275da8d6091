"""The alerts as Prometheus evaluates them: each fires when it should, and not when something merely looks like it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT

RULES = ROOT / "helm" / "slipstream" / "files" / "rules.yaml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
ONE = 'job="slipstream",instance="one"'
TWO = 'job="slipstream",instance="two"'

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(
        shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
    ),
]


@dataclass(frozen=True)
class Case:
    """Series, one value a minute, and for some minutes the labels and the summary that fire, None for none."""

    alert: str
    why: str
    series: dict[str, str]
    at: dict[str, tuple[dict[str, str], str] | None]


def asserts(values: str) -> dict[str, str]:
    return {f'slipstream_assert_failures_total{{{ONE},check="relay_fresh"}}': values}


def pool(used: str, waiting: str, other: str = "0x30") -> dict[str, str]:
    return {
        f'slipstream_pool_used{{{ONE},pool="kv_page"}}': used,
        f'slipstream_pool_capacity{{{ONE},pool="kv_page"}}': "100x30",
        f"slipstream_requests_waiting{{{ONE}}}": waiting,
        f"slipstream_requests_waiting{{{TWO}}}": other,
    }


def device(idle: int, busy: int, running: int) -> dict[str, str]:
    return {
        f"slipstream_device_idle_seconds_total{{{ONE}}}": f"0+{idle}x40",
        f"slipstream_device_busy_seconds_total{{{ONE}}}": f"0+{busy}x40",
        f"slipstream_requests_running{{{ONE}}}": f"{running}x40",
    }


def first_tokens(**per_minute: int) -> dict[str, str]:
    bounds = {"le10": "10.0", "le20": "20.0", "inf": "+Inf"}
    name = "slipstream_time_to_first_token_seconds_bucket"
    return {f'{name}{{{ONE},le="{bounds[bound]}"}}': f"0+{n}x40" for bound, n in per_minute.items()}


STARTS = f"slipstream_process_start_time_seconds{{{ONE}}}"
RESTARTS = f"slipstream_frontend_restarts_total{{{ONE}}}"
DRAIN, LIMIT = f"slipstream_drain_seconds{{{ONE}}}", f"slipstream_drain_limit_seconds{{{ONE}}}"

READY, DRAINING = f"slipstream_ready{{{ONE}}}", f"slipstream_draining{{{ONE}}}"
UP = f"up{{{ONE}}}"
BAD_CALLERS = f'slipstream_callers_refused_total{{{ONE},reason="UNAUTHENTICATED"}}'
TOKENS, SERVED = (
    f'slipstream_reload_failed{{{ONE},file="tokens"}}',
    f'slipstream_certificate_expiry_seconds{{{ONE},certificate="server"}}',
)


def handled(**per_minute: int) -> dict[str, str]:
    """Calls that ended, by code and method; whoever asks for health is never refused."""
    name = "slipstream_rpc_handled_total"
    methods = {"OK": "x.Y/Generate", "RESOURCE_EXHAUSTED": "x.Y/Generate", "HEALTH": "grpc.health.v1.Health/Check"}
    return {
        f'{name}{{{ONE},code="{"OK" if code == "HEALTH" else code}",method="{methods[code]}"}}': f"0+{n}x40"
        for code, n in per_minute.items()
    }


VIOLATED = ({"check": "relay_fresh"}, "one violated its invariant relay_fresh")
FULL = ({"pool": "kv_page"}, "pool kv_page of one is 96% full, and requests wait")
IDLE = ({}, "the device of one waits 50% of the time for its host")
SLOW = ({}, "one request in twenty on one waits 19.5s or longer for its first token")
RESTARTING = ({}, "one, or a front end of it, keeps being restarted")
DOWN = ({}, "one cannot be scraped")
NOT_READY = ({}, "one takes no requests for a quarter of an hour, and does not drain")
REFUSING = ({}, "one refuses 25% of the requests")
STRANGERS = ({}, "one refuses 2 calls a second because of who calls")
UNREADABLE = ({"file": "tokens"}, "one cannot use the file of its tokens")
EXPIRES = ({"certificate": "server"}, "the certificate server of one ends in 6d 0h 0m 0s")
STUCK = ({}, "one drains for 3m 0s already")

CASES = [
    Case("SlipstreamAssertFailure", "one more", asserts("0x20 1x60"), {"19m": None, "25m": VIOLATED, "60m": None}),
    Case("SlipstreamAssertFailure", "above zero when first seen", asserts("_x10 1x60"), {"12m": VIOLATED, "50m": None}),
    Case("SlipstreamAssertFailure", "never", asserts("0x60"), {"0m": None, "30m": None}),
    Case("SlipstreamPoolFullWithQueue", "full and a queue", pool("96x30", "3x30"), {"1m": None, "5m": FULL}),
    Case("SlipstreamPoolFullWithQueue", "full, nobody waits", pool("100x30", "0x30"), {"20m": None}),
    Case("SlipstreamPoolFullWithQueue", "others wait", pool("100x30", "0x30", other="9x30"), {"20m": None}),
    Case("SlipstreamPoolFullWithQueue", "room and a queue", pool("95x30", "9x30"), {"20m": None}),
    Case("SlipstreamDeviceIdleUnderLoad", "half of it", device(30, 30, 4), {"8m": None, "20m": IDLE}),
    Case("SlipstreamDeviceIdleUnderLoad", "nobody there", device(30, 30, 0), {"30m": None}),
    Case("SlipstreamDeviceIdleUnderLoad", "little", device(10, 50, 4), {"30m": None}),
    Case("SlipstreamDeviceIdleUnderLoad", "no steps at all", device(0, 0, 4), {"30m": None}),
    Case("SlipstreamSlowFirstToken", "all slow", first_tokens(le10=0, le20=60, inf=60), {"3m": None, "20m": SLOW}),
    Case("SlipstreamSlowFirstToken", "all quick", first_tokens(le10=60, le20=60, inf=60), {"20m": None}),
    Case("SlipstreamSlowFirstToken", "no traffic", first_tokens(le10=0, le20=0, inf=0), {"20m": None}),
    Case("SlipstreamRestarting", "thrice", {STARTS: "100x5 200x5 300x5 400x20"}, {"15m": None, "20m": RESTARTING}),
    Case("SlipstreamRestarting", "a rollout", {STARTS: "100x5 200x30"}, {"20m": None}),
    Case("SlipstreamRestarting", "front ends", {STARTS: "100x40", RESTARTS: "0x5 0+1x30"}, {"20m": RESTARTING}),
    Case("SlipstreamDrainStuck", "beyond the limit", {DRAIN: "0+60x10", LIMIT: "45x10"}, {"1m": None, "3m": STUCK}),
    Case(
        "SlipstreamTargetDown",
        "gone dark",
        {READY: "1x10 _x90", UP: "1x10 0x90"},
        {"11m": None, "20m": DOWN, "90m": DOWN},
    ),
    Case("SlipstreamTargetDown", "another program", {UP: "1x10 0x30"}, {"30m": None}),
    Case("SlipstreamTargetDown", "one scrape lost", {READY: "1x40", UP: "1x10 0 1x30"}, {"11m": None, "13m": None}),
    Case("SlipstreamNotReady", "hangs", {READY: "1x5 0x40", DRAINING: "0x45"}, {"15m": None, "30m": NOT_READY}),
    Case("SlipstreamNotReady", "drains", {READY: "1x5 0x40", DRAINING: "0x5 1x40"}, {"30m": None}),
    Case("SlipstreamNotReady", "loads", {READY: "0x10 1x30", DRAINING: "0x40"}, {"12m": None, "30m": None}),
    Case(
        "SlipstreamRefusals",
        "a quarter",
        handled(OK=30, RESOURCE_EXHAUSTED=10, HEALTH=600),
        {"8m": None, "30m": REFUSING},
    ),
    Case("SlipstreamRefusals", "one in twenty", handled(OK=95, RESOURCE_EXHAUSTED=5), {"30m": None}),
    Case("SlipstreamRefusals", "no traffic", handled(OK=0, RESOURCE_EXHAUSTED=0), {"30m": None}),
    Case("SlipstreamCallersRefused", "two a second", {BAD_CALLERS: "0+120x40"}, {"3m": None, "20m": STRANGERS}),
    Case("SlipstreamCallersRefused", "one now and then", {BAD_CALLERS: "0+6x40"}, {"30m": None}),
    Case("SlipstreamReloadFailed", "stays bad", {TOKENS: "0x5 1x20"}, {"6m": None, "10m": UNREADABLE}),
    Case("SlipstreamReloadFailed", "mended at once", {TOKENS: "0x5 1 0x20"}, {"6m": None, "10m": None}),
    Case("SlipstreamCertificateExpires", "six days", {SERVED: "518400x100"}, {"30m": None, "90m": EXPIRES}),
    Case("SlipstreamCertificateExpires", "a month", {SERVED: "2592000x100"}, {"90m": None}),
    Case("SlipstreamDrainStuck", "within it", {DRAIN: "0+4x10", LIMIT: "45x10"}, {"5m": None, "10m": None}),
]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


def written(case: Case) -> dict[str, Any]:
    """A case in promtool's words; labels of the rule and its text are taken from it."""
    return {
        "name": f"{case.alert}: {case.why}",
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": time, "alertname": case.alert, "exp_alerts": [] if due is None else [expected(case, *due)]}
            for time, due in case.at.items()
        ],
    }


def expected(case: Case, labels: dict[str, str], summary: str) -> dict[str, Any]:
    rule = ALERTS[case.alert]
    own = {"job": "slipstream", "instance": "one"}
    told = {"summary": summary, "description": rule["annotations"]["description"]}
    return {"exp_labels": own | rule["labels"] | labels, "exp_annotations": told}


def run_cases(folder: Path, rules: str, cases: list[Case]) -> subprocess.CompletedProcess[str]:
    (folder / "rules.yaml").write_text(rules)
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [written(case) for case in cases]}
    (folder / "test.yaml").write_text(yaml.safe_dump(tests))
    return promtool("test", "rules", folder / "test.yaml")


def test_rules_are_well_formed() -> None:
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0 and f"{len(ALERTS)} rules found" in checked.stdout, checked.stdout + checked.stderr


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    fires = {case.alert for case in CASES if any(case.at.values())}
    rests = {case.alert for case in CASES if not any(case.at.values())}
    assert fires == rests == set(ALERTS)
    ran = run_cases(tmp_path, RULES.read_text(), CASES)
    assert ran.returncode == 0, ran.stdout + ran.stderr


MUTANTS = {
    "SlipstreamAssertFailure": [("[15m]) > 0", "[15m]) > 1"), ("          or (slip", "          and (slip")],
    "SlipstreamPoolFullWithQueue": [
        ("> 0.95", "> 0.97"),
        ("instance) slipstream_req", "job) slipstream_req"),
    ],
    "SlipstreamDeviceIdleUnderLoad": [
        ("> 0.25", "> 0.6"),
        ("and on (job, instance) avg", "or avg"),
    ],
    "SlipstreamSlowFirstToken": [("> 10", "> 20"), ("(0.95", "(0.05")],
    "SlipstreamRestarting": [("[30m]) > 2\n          or", "[30m]) > 0\n          or"), ("or increase", "and increase")],
    "SlipstreamTargetDown": [
        ("present_over_time(slipstream_ready[1d])", "slipstream_ready"),
        (" and on (job, instance) present_over_time(slipstream_ready[1d])", ""),
    ],
    "SlipstreamNotReady": [("unless on (job, instance) slipstream_draining == 1", ""), ("for: 15m", "for: 1m")],
    "SlipstreamRefusals": [
        ("> 0.1", "> 0.3"),
        ('handled_total{method=~".*/(Generate|Embed|Classify|Score)"}', "handled_total"),
    ],
    "SlipstreamCallersRefused": [("> 1", "> 3"), ("> 1", "> 0")],
    "SlipstreamReloadFailed": [("== 1", "== 0"), ("for: 2m", "for: 30m")],
    "SlipstreamCertificateExpires": [("< 7 *", "< 3 *"), ("< 7 *", "< 60 *")],
    "SlipstreamDrainStuck": [("> slipstream_drain_limit", "< slipstream_drain_limit"), ("for: 1m", "for: 10m")],
}


@pytest.mark.parametrize(
    ("alert", "right", "wrong"), [(alert, *change) for alert, changes in MUTANTS.items() for change in changes]
)
def test_a_rule_that_is_off_fails_its_cases(alert: str, right: str, wrong: str, tmp_path: Path) -> None:
    before, name, after = RULES.read_text().partition(f"alert: {alert}\n")
    assert right in after, right
    broken = before + name + after.replace(right, wrong, 1)
    ran = run_cases(tmp_path, broken, [case for case in CASES if case.alert == alert])
    assert ran.returncode == 1, f"nothing noticed {wrong!r}"


def test_alerts_tell_what_to_do() -> None:
    for alert, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("warning", "critical"), alert
        description = rule["annotations"]["description"]
        # The cases above take it as it is written, so nothing in it may be filled in.
        assert len(description) > 60 and "{{" not in description
