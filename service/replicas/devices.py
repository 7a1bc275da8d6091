"""Which CUDA devices each replica gets: neighbours, one for each of its ranks."""

from __future__ import annotations

import os

from core.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def own_devices(known: list[str], place: int, count: int, ranks: int) -> list[str]:
    """Of the `known` devices, those of the replica at `place` of `count`, each with `ranks` of them.

    Raises ConfigError where there are too few for all.
    """
    wanted = count * ranks
    if len(known) < wanted:
        raise ConfigError(
            f"data_parallel {count} with {ranks} ranks each needs {wanted} devices: there are {len(known)}"
        )
    return known[place * ranks : (place + 1) * ranks]


def take_devices(device: str, place: int, count: int, ranks: int) -> None:
    """Hide all devices but those of the replica at `place` from this process, before it first uses one.

    No-op on a CPU. Raises ConfigError where there are too few.
    """
    if device == "cpu":
        return
    # Counted by the driver's library: this makes no context on any of them.
    import torch

    found = torch.cuda.device_count()
    if not found:
        return
    named = [each.strip() for each in os.environ.get(VISIBLE, "").split(",") if each.strip()]
    known = named[:found] if named else [str(each) for each in range(found)]
    os.environ[VISIBLE] = ",".join(own_devices(known, place, count, ranks))
