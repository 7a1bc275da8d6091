"""Which checkpoint is served, and how it is held: one part of `core.config`."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError
from core.setting import check_settings, setting
from core.types.control import WEIGHT_VERSION

DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "int8")
QUANTIZATIONS = ("none", "int8", "int4", "fp8")
QUANTIZED_WEIGHTS = ("compressed", "dense")
MOST_RANKS = 128
NATIVE = ("auto", "wait", "off")
ANSWER_FORMS = (
    "auto",
    "none",
    "checkpoint",
    "gpt-oss",
    "gemma4",
    "deepseek",
    "kimi-k2",
    "mistral-args",
    "mistral",
    "glm4",
    "deepseek-dsml",
    "minimax",
    "seed-oss",
    "nemotron",
    "command",
    "granite",
    "qwen3-coder",
    "hermes",
    "llama3",
    "think",
)


@dataclass(frozen=True, slots=True)
class Peers:
    """Where an engine meets those with which it shares experts. It has the `rank`-th part of them, of `size`."""

    rank: int
    size: int
    port: int
    """Of this machine's loopback."""
    listener: int | None = None
    """File descriptor of the socket that listens there, on rank 0."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which checkpoint, and how it is held. `context_length=None` takes the checkpoint's own."""

    path: str = setting(
        "",
        "Model",
        "Checkpoint directory in Hugging Face format, or ORG/NAME[@REVISION] of the hub, fetched at the start; unset: "
        "the bundled model.",
        flag="model",
        metavar="DIR|ORG/NAME",
    )
    dtype: str = setting(
        "auto", "Model", "Type of weights, and of the cache unless kv_cache_dtype says otherwise.", choices=DTYPES
    )
    context_length: int | None = setting(
        None, "Model", "Most tokens of prompt and output together; unset: the checkpoint's own.", low=2
    )
    served_name: str | None = setting(
        None,
        "Model",
        "Name that clients see; unset: the directory's name, ORG/NAME, or slipstream-bundled.",
        flag="served_model_name",
    )
    quantization: str = setting(
        "none",
        "Model",
        "Quantise plain weights while they are loaded: int8 with a scale per output, int4 in groups of 128, fp8 with "
        "activations too (for GPUs), or none.",
        choices=QUANTIZATIONS,
    )
    quantized_weights: str = setting(
        "compressed",
        "Model",
        "Weights of quantised checkpoints: compressed (less memory) or dense (faster steps without native code).",
        choices=QUANTIZED_WEIGHTS,
    )
    """`compressed` keeps them packed and has every call unpack them; `dense` unpacks them at load."""
    tensor_parallel: int = setting(
        1,
        "Model",
        "Processes that share the weights, keys and values of each layer, on as many devices; started with this one.",
        low=1,
    )
    pipeline_parallel: int = setting(
        1,
        "Model",
        "Processes that have a part of the layers each, on as many devices; started with this one. Not together with "
        "tensor_parallel.",
        low=1,
    )
    native: str = setting(
        "auto",
        "Model",
        "Compiled code for dense models on the CPU: compile it beside serving (auto), before (wait), or never (off).",
        choices=NATIVE,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Model",
        "How keys and values are cached: as they are computed (auto), or in eight bits with a scale for each token and "
        "head (int8 for compiled code on the CPU, fp8_e4m3 for GPUs), so that the same memory holds nearly twice as "
        "many tokens of a bfloat16 model.",
        choices=KV_CACHE_DTYPES,
    )
    """A name of `core.memory.kv_formats`."""
    answer_form: str = setting(
        "auto",
        "Model",
        "How the model writes thoughts and calls, for answers that are read: known by marks in its chat template "
        "(auto), by name, as the checkpoint's response_template declares it (checkpoint: trust its patterns), or none.",
        choices=ANSWER_FORMS,
    )
    """A name of `core.text.answers.known_forms`."""
    max_image_tokens: int = setting(
        4096,
        "Model",
        "Most tokens that one image may become, which a step computes together while all streams wait; larger images "
        "are refused.",
        low=1,
    )
    label_tokens: str = setting(
        "",
        "Model",
        "Tokens that a causal reranker answers with, such as yes,no, with commas: Classify gives the share of each as "
        "the next token, and Score that of the first.",
        metavar="TOKEN,TOKEN",
    )
    pair_template: str = setting(
        "",
        "Model",
        "What Score and Classify make of a pair, with {query} and {document} in it; unset: as the tokenizer joins two "
        "texts.",
        metavar="TEXT",
    )
    deterministic: bool = setting(
        False, "Model", "Give a request the same bits in any batch, chunk or prefix; what cannot is refused at start."
    )
    weights_dir: str | None = setting(
        None,
        "Model",
        "Directory below which UpdateWeights may read other weights of the model while serving; unset: none are read.",
        metavar="DIR",
    )
    weight_version: str = setting(
        "default", "Model", "Name of the weights that are served first, told with every stream.", metavar="NAME"
    )

    peers: Peers | None = None
    """The engines that share experts with this one, of a server that runs them."""

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) > MOST_RANKS:
                raise ConfigError(f"{name}: must be at most {MOST_RANKS}; got {getattr(self, name)}")
        if self.tensor_parallel > 1 and self.pipeline_parallel > 1:
            raise ConfigError("pipeline_parallel: not possible together with tensor_parallel yet")
        template = self.pair_template
        if template and not template.count("{query}") == template.count("{document}") == 1:
            raise ConfigError("pair_template: must have {query} and {document} in it, once each")
        if template and template.index("{query}") > template.index("{document}"):
            raise ConfigError("pair_template: {query} must come before {document}")
        if not WEIGHT_VERSION.fullmatch(self.weight_version):
            raise ConfigError("weight_version: must be 1 to 128 characters of A-Z a-z 0-9 . _ : / @ + -")

    @property
    def ranks(self) -> int:
        """Processes that compute the steps of one engine, this one included."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def is_shared(self) -> bool:
        """Whether other processes have parts of the model."""
        return self.ranks > 1 or self.peers is not None

    @property
    def shared_by(self) -> str:
        """The setting by which they have; of an engine that is alone, that which is named first."""
        if self.peers is not None:
            return "expert_parallel"
        return "pipeline_parallel" if self.pipeline_parallel > 1 else "tensor_parallel"
