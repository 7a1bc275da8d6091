"""Which request sits in which row and how far it is planned, read from the batches alone, for other families."""

from __future__ import annotations

from core.batch.schedule_batch import ScheduleBatch
from tests.proofs.sim.clients import Admission, Client
from tests.proofs.sim.family import Family


class Seating(Family):
    """Writes `Client.admissions`."""

    def planned(self, batch: ScheduleBatch | None) -> None:
        """A row with a new owner begins a stay; every row of the batch moves on."""
        if batch is None:
            return
        running, fresh = self.view.scheduler.running, set(batch.fresh_rows.tolist())
        starts, lens = batch.prefix_lens.tolist(), batch.extend_lens.tolist()
        for row, start, length in zip(batch.rows.tolist(), starts, lens, strict=True):
            req = running.reqs[row]
            if req is None:
                continue
            client: Client = req.sink
            if row in fresh:
                known = int(running.known[row])
                client.admissions.append(Admission(self.view.now, start, known, start))
            client.admissions[-1].planned = start + length
