"""When certificates end: `notAfter`, read from their DER, since `ssl` shows it only for certificates of peers.

RFC 5280, 4.1: a certificate is SEQUENCE {tbsCertificate, …}; that is SEQUENCE {[0] version?, serialNumber, signature,
issuer, validity {notBefore, notAfter}, …}. Nothing else is read, and nothing is verified here.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
"""YYMMDDHHMMSSZ; the other kind is GeneralizedTime, with four digits for the year."""
_PIVOT: Final = 50
"""RFC 5280, 4.1.2.5.1: two digits from here on are of the 20th century."""


def earliest_end(pem: bytes) -> datetime | None:
    """The earliest end of the certificates in `pem`, in UTC; None if none of them can be read."""
    ends = []
    for found in _PEM.findall(pem):
        try:
            ends.append(_not_after(ssl.PEM_cert_to_DER_cert(found.decode("ascii"))))
        except (ValueError, IndexError, StopIteration):
            continue
    return min(ends, default=None)


def _not_after(der: bytes) -> datetime:
    certificate = next(_elements(der))[1]
    fields = [each for each in _elements(next(_elements(certificate))[1]) if each[0] != _VERSION]
    validity = fields[3][1]
    tag, text = list(_elements(validity))[1]
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if int(digits[:2]) >= _PIVOT else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each DER element of `der`, in order. Raises IndexError where the bytes end within a header."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(der[at : at + size], "big"), at + size
        yield tag, der[at : at + length]
        at += length
