"""What a tenant's limits forbid for good: coming back does not help, so no hint when to do so goes with them."""

from __future__ import annotations

from core.errors import SlipstreamError


class TenantLockedOut(SlipstreamError):
    """The tenants file gives this tenant no requests at all."""

    reason = "TENANT_LOCKED_OUT"


class TenantSequences(SlipstreamError):
    """One request has more sequences than its tenant may have at once."""

    reason = "TENANT_SEQUENCES"
