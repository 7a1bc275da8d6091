"""All mutants, and the sample that the ordinary suite tries. A new law, or a fixed bug, adds one to a list."""

from __future__ import annotations

from tests.mutants.adapting import ADAPTING
from tests.mutants.allowing import ALLOWING
from tests.mutants.attending import ATTENDING
from tests.mutants.beating import BEATING
from tests.mutants.bounding import BOUNDING
from tests.mutants.budgeting import BUDGETING
from tests.mutants.capturing import CAPTURING
from tests.mutants.classes import CLASSES
from tests.mutants.clients import CLIENTS
from tests.mutants.commanding import COMMANDING
from tests.mutants.commands import COMMANDS
from tests.mutants.compiling import COMPILING
from tests.mutants.condemning import CONDEMNING
from tests.mutants.constraining import CONSTRAINING
from tests.mutants.conversing import CONVERSING
from tests.mutants.doors import DOORS
from tests.mutants.drawing import DRAWING
from tests.mutants.embedding import EMBEDDING
from tests.mutants.encoders import ENCODERS
from tests.mutants.exhausting import EXHAUSTING
from tests.mutants.figures import FIGURES
from tests.mutants.gateways import GATEWAYS
from tests.mutants.gating import GATING
from tests.mutants.guarding import GUARDING
from tests.mutants.handing import HANDING
from tests.mutants.interpreting import INTERPRETING
from tests.mutants.keeping import KEEPING
from tests.mutants.leaving import LEAVING
from tests.mutants.matching import MATCHING
from tests.mutants.measuring import MEASURING
from tests.mutants.mending import MENDING
from tests.mutants.mutant import Mutant
from tests.mutants.observing import OBSERVING
from tests.mutants.ordering import ORDERING
from tests.mutants.ownership import OWNERSHIP
from tests.mutants.packing import PACKING
from tests.mutants.planning import PLANNING
from tests.mutants.pooling import POOLING
from tests.mutants.proving import PROVING
from tests.mutants.relaying import RELAYING
from tests.mutants.resuming import RESUMING
from tests.mutants.scheduling import SCHEDULING
from tests.mutants.serving import SERVING
from tests.mutants.sharing import SHARING
from tests.mutants.shell import SHELL
from tests.mutants.showing import SHOWING
from tests.mutants.teaching import TEACHING
from tests.mutants.texting import TEXTING
from tests.mutants.windows import WINDOWS

MUTANTS: tuple[Mutant, ...] = (
    *OWNERSHIP,
    *SCHEDULING,
    *CLASSES,
    *SHARING,
    *RELAYING,
    *ORDERING,
    *SHELL,
    *SERVING,
    *GUARDING,
    *BOUNDING,
    *ALLOWING,
    *ADAPTING,
    *EMBEDDING,
    *ENCODERS,
    *WINDOWS,
    *CONSTRAINING,
    *BUDGETING,
    *CAPTURING,
    *RESUMING,
    *OBSERVING,
    *GATEWAYS,
    *GATING,
    *SHOWING,
    *TEXTING,
    *FIGURES,
    *HANDING,
    *KEEPING,
    *EXHAUSTING,
    *CONVERSING,
    *DRAWING,
    *MATCHING,
    *PLANNING,
    *POOLING,
    *CONDEMNING,
    *ATTENDING,
    *PROVING,
    *PACKING,
    *COMPILING,
    *COMMANDS,
    *CLIENTS,
    *DOORS,
    *COMMANDING,
    *TEACHING,
    *MEASURING,
    *INTERPRETING,
    *BEATING,
    *LEAVING,
    *MENDING,
)

SAMPLE: tuple[str, ...] = (
    "skip-generation-check",
    "off-by-one-page-need",
    "terminal-twice",
    "read-does-not-consume",
    "results-overtake",
    "prefix-locked-beside-own-copy",
)
"""Tried inside the ordinary suite: quick, and one for each kind of breakage."""
