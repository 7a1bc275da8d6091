"""A fake hub as the library's own, with an empty cache, for tests in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from core.errors import ModelLoadError
from service.checkpoints.download import download
from service.checkpoints.model_name import HubModel
from tests.support.fakes.fake_hub import FakeHub

NAME = HubModel("org/name")
VARIABLES = ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy")


@contextmanager
def hub_at_hand(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serves the files of `checkpoint` as `org/name`; what comes lies in `cache`. Failing tries wait for nothing."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache.with_name("token")))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with FakeHub.of("org/name", checkpoint).serving() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(constants.ENDPOINT, hub.endpoint)
        )
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        yield hub


def refusal(model: HubModel = NAME, *, current: bool = False) -> str:
    """The one line with which a download is refused."""
    with pytest.raises(ModelLoadError) as refused:
        download(model, None, current)
    assert refused.value.exit_code == 3 and "\n" not in refused.value.message
    return refused.value.message
