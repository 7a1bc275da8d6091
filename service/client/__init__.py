"""The client of a server, with which command line, demo and tests speak to one. Installed, it is `slipstream`.

async with SlipstreamClient("127.0.0.1:50051") as client:
    async for event in client.generate("Once upon a time", max_tokens=32): ...
"""

from service.client.adapters import AdapterClient as AdapterClient
from service.client.answers import Call as Call
from service.client.answers import Part as Part
from service.client.answers import answer_turn as answer_turn
from service.client.blocking import SyncSlipstreamClient as SyncSlipstreamClient
from service.client.client import (
    FLEET_CONFIG as FLEET_CONFIG,
)
from service.client.client import (
    SERVICE_CONFIG as SERVICE_CONFIG,
)
from service.client.client import (
    Completion as Completion,
)
from service.client.client import (
    SlipstreamClient as SlipstreamClient,
)
from service.client.client import (
    Vector as Vector,
)
from service.client.control import ControlClient as ControlClient
from service.client.control import SyncControlClient as SyncControlClient
from service.client.errors import CallFailed as CallFailed
from service.client.events import (
    Chunk as Chunk,
)
from service.client.events import (
    End as End,
)
from service.client.events import (
    PromptChunk as PromptChunk,
)
from service.client.judging import (
    Classification as Classification,
)
from service.client.judging import (
    DocumentScore as DocumentScore,
)
from service.client.judging import (
    LabelScore as LabelScore,
)
from service.client.requests import Prompt as Prompt
from service.client.requests import Sound as Sound
from service.client.resumed_call import Received as Received
from service.client.sampling_options import SamplingOptions as SamplingOptions
