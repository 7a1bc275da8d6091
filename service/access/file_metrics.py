"""The state of the access files at scrape time: whether they can be used, and the seconds until certificates end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from service.access.access_files import AccessFiles
from service.access.certificate_expiry import earliest_end
from service.metrics import names


class FilesCollector(Collector):
    """Looks at `files` at each scrape, so that a bad file shows in metrics before the next call comes."""

    def __init__(self, files: AccessFiles) -> None:
        self._files = files

    def collect(self) -> Iterator[Family]:
        """Both families. A file that is not configured counts as 0, not failed; an absent certificate has no sample."""
        failed = GaugeMetricFamily(
            names.RELOAD_FAILED.name, names.RELOAD_FAILED.help, labels=names.RELOAD_FAILED.labels
        )
        for kind, value in self._files.failed().items():
            failed.add_metric([kind], float(value))
        yield failed
        metric = names.CERTIFICATE_EXPIRY
        expiry = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        if self._files.certificates is not None:
            served = self._files.certificates.current()
            for which, pem in (("server", served.cert), ("client_ca", served.client_ca)):
                end = None if pem is None else earliest_end(pem)
                if end is not None:
                    expiry.add_metric([which], (end - datetime.now(UTC)).total_seconds())
        yield expiry
