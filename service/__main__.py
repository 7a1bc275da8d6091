"""`python -m service` is `slipstream`."""

from __future__ import annotations

from service.cli.cli import main

if __name__ == "__main__":
    main()
