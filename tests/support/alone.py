"""Which tests measure time or start servers that do: `make test` runs nothing beside them."""

from __future__ import annotations

import re

ALONE = re.compile(
    r"/tests/(chaos/test_(?!unusable|metrics_truth|preemption|history)"
    r"|system/test_(?!exactly_once|frontend_doors)|unit/core/engine/test_trouble"
    r"|security/test_(complexity|fuzz|unbounded|half_sent|call_floods|deaf_callers|short_memory|descriptors)"
    r"|contract/api/test_cancellation|unit/service/limits/test_admission|unit/service/server/test_startup|unit/service/rpc/test_write_bound)"
)
"""Found in the path of a file; two of them at once on two cores would measure one another."""
