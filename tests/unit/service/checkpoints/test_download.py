"""Models of a hub: which files come, that a broken download goes on, what the cache is good for, and every refusal."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from core.config import EngineConfig, ModelConfig
from core.errors import ModelLoadError
from service.checkpoints import download as downloads
from service.checkpoints.download import download
from service.checkpoints.fetching import fetch, fetched, fetching
from service.checkpoints.model_name import HubModel
from service.process.sizes import shown
from tests.support.fakes.fake_hub import COMMIT, FakeHub

NAME = HubModel("org/name")


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """With files that nobody needs beside those of a checkpoint; its cache is empty."""
    hub = FakeHub.of(
        "org/name", checkpoint, README__md=b"# read me", pytorch_model__bin=b"pickle", modeling__py=b"code"
    )
    hub.files |= {"original/consolidated.safetensors": b"again", "consolidated.safetensors": b"again"}
    hub.files |= {
        "1_Pooling/model.safetensors": b"a layer",
        "2_Dense/config.json": b"{}",
        "onnx/1/tokenizer.json": b"{}",
        "1/model.safetensors": b"a layer",
        "1x/model.safetensors": b"a layer",
    }
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    for name in ("HF_TOKEN", *offline, "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub.serving():
        at(monkeypatch, hub.endpoint)
        yield hub


def at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What HF_ENDPOINT does where the library is imported after it was set."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace(constants.ENDPOINT, endpoint))
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    # Its retries wait for half a minute in all.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)


def refusal(model: HubModel = NAME) -> str:
    with pytest.raises(ModelLoadError) as refused:
        download(model, None)
    assert refused.value.exit_code == 3 and "\n" not in refused.value.message
    return refused.value.message


def test_weights_configurations_and_the_tokenizer_come(hub: FakeHub, checkpoint: Path) -> None:
    told: list[tuple[str, float]] = []
    found = download(NAME, lambda stage, fraction: told.append((stage, fraction)))
    wanted = sorted(path.name for path in checkpoint.iterdir() if path.suffix in (".json", ".safetensors"))
    assert sorted(path.name for path in found.iterdir()) == wanted == hub.fetched()
    assert all((found / name).read_bytes() == hub.files[name] for name in wanted)
    assert found.name == COMMIT
    size = sum(len(hub.files[name]) for name in wanted)
    assert {stage for stage, _ in told} == {f"downloading org/name ({shown(size)})"}
    parts = [fraction for _, fraction in told]
    assert parts == sorted(parts) and parts[0] == 0.0 and parts[-1] == 1.0


def test_how_vectors_are_pooled_comes_out_of_its_folder(hub: FakeHub) -> None:
    told = {"modules.json": b"[]", "1_Pooling/config.json": b'{"pooling_mode": "cls"}'}
    hub.files |= told
    found = download(NAME, None)
    assert {name: (found / name).read_bytes() for name in told} == told
    assert sorted(path.name for path in found.iterdir() if path.is_dir()) == ["1_Pooling"]
    assert [path.name for path in (found / "1_Pooling").iterdir()] == ["config.json"]


def test_every_kind_of_file_that_a_loader_reads_comes(hub: FakeHub) -> None:
    """Those of `core.models` and of the tokenizers of transformers."""
    hub.files["model.safetensors.index.json"] = b"{ }"
    names = [
        "generation_config.json",
        "quantize_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
    ]
    names += ["special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "qwen.tiktoken"]
    names += ["chat_template.jinja", "chat_template.json", "model-00002-of-00002.safetensors"]
    names += ["sentencepiece.bpe.model", "spiece.model", "modules.json"]
    hub.files |= {name: name.encode() for name in names}
    download(NAME, None)
    assert set(hub.fetched()) >= {*names, "model.safetensors.index.json", "config.json", "model.safetensors"}


def test_what_is_there_is_not_fetched_again(hub: FakeHub) -> None:
    told: list[str] = []
    first = download(NAME, None)
    hub.asked.clear()
    assert download(NAME, lambda stage, _: told.append(stage)) == first
    assert hub.fetched() == [] and told == [], "nothing comes, so no progress is told"


def test_a_connection_that_breaks_is_gone_on_with(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.files["tokenizer.model"] = os.urandom(100_000)
    hub.cut_after = 50_500
    told: list[float] = []
    found = download(NAME, lambda _, fraction: told.append(fraction))
    assert (found / "tokenizer.model").read_bytes() == hub.files["tokenizer.model"]
    assert [asked for _, path, asked in hub.asked if path.endswith("tokenizer.model") and asked][-1] == "bytes=50000-"
    assert told == sorted(told) and told[-1] == 1.0


def test_files_that_came_whole_stay_for_the_next_start(hub: FakeHub) -> None:
    hub.files["tokenizer.model"] = os.urandom(100_000)
    hub.cut_after, hub.status_after_cut = 50_500, 500
    assert "status 500" in refusal()
    # Files come at the same time; of those that did not come whole nothing is left.
    there = {name for name in ("config.json", "model.safetensors") if cached(name)}
    hub.status = None
    hub.asked.clear()
    told: list[float] = []
    found = download(NAME, lambda _, fraction: told.append(fraction))
    assert (found / "tokenizer.model").read_bytes() == hub.files["tokenizer.model"]
    assert not there & set(hub.fetched()) and "tokenizer.model" in hub.fetched()
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    assert told[-1] == 1.0


@pytest.mark.parametrize("verbose", [False, True])
def test_tries_that_fail_are_told_where_that_is_asked_for(
    hub: FakeHub, verbose: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(library, "level", logging.WARNING)
    if verbose:
        monkeypatch.setenv("HF_HUB_VERBOSITY", "warning")
    hub.cut_after = 50
    hub.files["config.json"] += b" " * 100
    download(NAME, None)
    assert any("resume" in record.message for record in caplog.records) == verbose
    assert library.level == logging.WARNING


def test_a_size_below_nothing_is_told_as_none(hub: FakeHub) -> None:
    hub.lies["config.json"] = -(1 << 40)
    told: list[str] = []
    with pytest.raises(ModelLoadError, match="should be of size -1099511627776"):
        download(NAME, lambda stage, _: told.append(stage))
    assert set(told) == {f"downloading org/name ({shown(len(hub.files['model.safetensors']))})"}


def test_progress_begins_behind_what_is_there(hub: FakeHub) -> None:
    hub.files["tokenizer.model"] = os.urandom(1000)
    found = download(NAME, None)
    blob = (found / "tokenizer.model").resolve()
    (found / "tokenizer.model").unlink()
    blob.unlink()
    told: list[float] = []
    download(NAME, lambda _, fraction: told.append(fraction))
    size = sum(path.stat().st_size for path in found.iterdir())
    assert told[0] == pytest.approx(1 - 1000 / size) and told[-1] == 1.0


def cached(name: str) -> bool:
    return any(Path(constants.HF_HUB_CACHE).rglob(f"snapshots/{COMMIT}/{name}"))


def test_a_revision_is_asked_for(hub: FakeHub) -> None:
    assert download(HubModel("org/name", COMMIT), None).name == COMMIT
    assert "has the model, and no revision 'v9' of it" in refusal(HubModel("org/name", "v9"))


def test_a_token_opens_what_is_private(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    unseen = f"org/name: no directory of that name is here, and no such model on {hub.endpoint}"
    assert refusal() == f"{unseen} (a private one needs HF_TOKEN)"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refusal() == f"{unseen} (the token of HF_TOKEN may not see it)"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download(NAME, None).is_dir()


def test_a_gated_model_says_where_to_ask(hub: FakeHub) -> None:
    hub.gated = True
    page = f"{hub.endpoint}/org/name"
    assert refusal() == (
        f"org/name: it is gated: ask for access on {page}, and give the token of that account as HF_TOKEN"
    )


def test_a_model_that_is_not_there(hub: FakeHub) -> None:
    assert "no directory of that name is here, and no such model" in refusal(HubModel("org/other"))


@pytest.mark.parametrize(("status", "said"), [(403, "refused the token"), (500, "status 500"), (503, "status 503")])
def test_a_hub_that_refuses(hub: FakeHub, status: int, said: str) -> None:
    hub.status = status
    assert said in refusal()


def test_a_model_without_safetensors_is_not_fetched(hub: FakeHub) -> None:
    hub.files = {name: data for name, data in hub.files.items() if not name.endswith(".safetensors")}
    assert refusal() == "org/name has no *.safetensors files on the hub; other weight formats are not read"
    assert hub.fetched() == []


def test_without_a_hub_the_cache_serves(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = download(NAME, None)
    at(monkeypatch, "http://127.0.0.1:9")
    assert download(NAME, None) == found
    assert "http://127.0.0.1:9 cannot be reached" in refusal(HubModel("org/other"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download(NAME, None) == found
    assert refusal(HubModel("org/other")) == (
        "org/other: HF_HUB_OFFLINE is set, and the cache does not have all of its files; "
        "HF_HUB_OFFLINE=0 lets the server fetch them"
    )


def test_part_of_a_model_in_the_cache_is_not_served(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = download(NAME, None)
    next(found.glob("*.safetensors")).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "the cache does not have all of its files" in refusal()


def test_too_little_space_is_said_before_anything_comes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=downloads.MARGIN_BYTES))
    said = refusal()
    assert said.startswith("org/name needs ") and "free; HF_HOME or HF_HUB_CACHE names another place" in said
    assert hub.fetched() == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = download(NAME, None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    assert download(NAME, None) == found, "nothing has to come"


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "is full"), (errno.EACCES, "cannot be written (permission denied)")]
)
def test_a_disk_that_fails_meanwhile(hub: FakeHub, number: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = huggingface_hub.snapshot_download

    def failing(*args: Any, **options: Any) -> Any:
        if options.get("dry_run"):
            return asked(*args, **options)
        raise OSError(number, os.strerror(number), "/cache/blob")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    assert said in refusal() and "HF_HOME or HF_HUB_CACHE names another place" in refusal()


def test_a_password_of_a_mirror_is_not_shown(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, hub.endpoint.replace("http://", "http://user:secret@"))
    assert hub.endpoint in (said := refusal(HubModel("org/other"))) and "secret" not in said


def test_the_engine_is_built_from_what_came(hub: FakeHub) -> None:
    built: list[EngineConfig] = []
    asked = EngineConfig(model=ModelConfig(path="org/name"))
    fetching(lambda config, _: built.append(config))(asked, None)  # type: ignore[arg-type, return-value]
    (config,) = built
    assert Path(config.model.path).name == COMMIT and config.model.served_name == "org/name"
    named = EngineConfig(model=ModelConfig(path="org/name", served_name="mine"))
    assert fetched(named, None).model.served_name == "mine"
    plain = EngineConfig(model=ModelConfig(path="/a/b"))
    assert fetched(plain, None) is plain


def test_files_that_are_not_whole_are_refused(hub: FakeHub) -> None:
    hub.files["model.safetensors"] = hub.files["model.safetensors"] + b"0"
    with pytest.raises(ModelLoadError, match="is longer than its header says"):
        fetched(EngineConfig(model=ModelConfig(path="org/name")), None)


def test_files_of_other_weights_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.checkpoints.download.download", lambda *_: tmp_path)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        fetch("org/name")
    with pytest.raises(ModelLoadError, match="must be ORG/NAME"):
        fetch("../x")
