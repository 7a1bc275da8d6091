"""What may be the name of a tenant, wherever it comes from: a token, a client certificate, the tenants file."""

from __future__ import annotations

import re

MAX_NAME_CHARS = 256
NAME_RULE = f"1 to {MAX_NAME_CHARS} printable ASCII characters"
_NAME = re.compile(rf"[ -~]{{1,{MAX_NAME_CHARS}}}")


def is_name(given: str) -> bool:
    """Whether `given` keeps NAME_RULE: it is a label of metrics and part of ids, which a NUL or a surrogate breaks."""
    return _NAME.fullmatch(given) is not None
