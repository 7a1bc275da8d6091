"""The proto and the code generated from it: current, importable without our package's name, and clean by buf."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from service.pb import generate
from service.pb.slipstream.v1 import adapters_pb2, control_pb2
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support import tools
from tests.support.repository import ROOT


def test_the_committed_code_is_what_would_be_generated() -> None:
    assert generate.differences() == []


def test_check_mode_notices_a_change(tmp_path: Path) -> None:
    protos = tmp_path / "protos"
    shutil.copytree(generate.PROTOS, protos)
    proto = protos / "slipstream" / "v1" / "inference.proto"
    proto.write_text(proto.read_text().replace("string cache_salt = 9;", "string cache_pepper = 9;"))
    names = generate.differences(protos)
    assert set(names) == {"slipstream/v1/inference_pb2.py", "slipstream/v1/inference_pb2.pyi"}


def test_nothing_named_slipstream_has_to_be_importable() -> None:
    code = "import sys, service.pb.slipstream.v1.inference_pb2_grpc; assert 'slipstream' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_names_that_clients_rely_on() -> None:
    fields = {name: {f.name for f in message.fields} for name, message in pb.DESCRIPTOR.message_types_by_name.items()}
    request = {"request_id", "text", "token_ids", "chat", "sampling_params", "output_options", "priority"}
    assert fields["GenerateRequest"] == request | {
        *("queue_timeout", "cache_salt", "adapter", "constraint", "resumable", "speculative", "images", "audio"),
    }
    assert fields["Constraint"] == {"json_schema", "regex", "ebnf", "choice", "structural_tags"}
    assert fields["GenerateResponse"] == {"request_id", "started", "delta", "finished", "prompt_logprobs"}
    assert fields["AttachResponse"] == fields["GenerateResponse"] - {"prompt_logprobs"}
    assert fields["AttachRequest"] == {"request_id", "positions", "incarnation"}
    assert fields["Started"] == {"prompt_tokens", "incarnation", "weight_version"}
    assert fields["AttachPosition"] == {"index", "tokens", "text_bytes", "finished"}
    assert fields["Delta"] == {"index", "position", "token_ids", "text", "logprobs", "parts"}
    assert fields["Finished"] == {"index", "reason", "matched_stop", "usage", "timing", "weight_version"}
    asked = {"request_id", "inputs", "pooling", "normalize", "dimensions", "priority", "queue_timeout"}
    assert fields["EmbedRequest"] == asked | {"cache_salt", "adapter", "truncate"}
    assert fields["EmbedResponse"] == {"request_id", "embeddings", "dimension"}
    assert fields["Embedding"] == {"values", "usage"}
    assert fields["Usage"] == {
        *("prompt_tokens", "cached_tokens", "completion_tokens", "draft_tokens", "accepted_draft_tokens"),
    }
    shared = {"request_id", "raw_scores", "priority", "queue_timeout", "cache_salt", "adapter", "truncate"}
    assert fields["ClassifyRequest"] == shared | {"inputs"}
    assert fields["ScoreRequest"] == shared | {"query", "documents", "top_n"}
    assert fields["DocumentScore"] == {"index", "score", "usage"}
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "slipstream.v1.InferenceService"
    assert set(service.methods_by_name) == {
        "Generate",
        "Attach",
        "Abort",
        "Tokenize",
        "Detokenize",
        "GetModelInfo",
        "GetServerInfo",
        "GetLoad",
        "Embed",
        "Classify",
        "Score",
    }


def test_names_of_the_adapter_service() -> None:
    (service,) = adapters_pb2.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "slipstream.v1.AdapterService"
    assert set(service.methods_by_name) == {"LoadAdapter", "UnloadAdapter", "ListAdapters"}
    adapter = {"name", "state", "load_id", "rank", "bytes", "pinned", "live_requests", "idle"}
    assert {field.name for field in adapters_pb2.Adapter.DESCRIPTOR.fields} == adapter


def test_names_of_the_control_service() -> None:
    (service,) = control_pb2.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "slipstream.v1.ControlService"
    assert set(service.methods_by_name) == {"Pause", "Resume", "UpdateWeights", "Sleep", "Wake"}
    update = {field.name for field in control_pb2.UpdateWeightsRequest.DESCRIPTOR.fields}
    assert update == {"path", "name", "weight_version"}


def test_every_scalar_of_sampling_params_knows_unset_from_zero() -> None:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        assert field.is_repeated or field.has_presence, field.name


def test_buf_finds_nothing_to_lint_or_format(tmp_path: Path) -> None:
    program, env = tools.buf(), os.environ | {"HOME": str(tmp_path)}
    for command in (["lint"], ["format", "--diff", "--exit-code"]):
        done = subprocess.run(
            [program, *command], cwd=ROOT / "protos", env=env, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
