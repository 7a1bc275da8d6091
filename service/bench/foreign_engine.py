"""Runs llama.cpp or vLLM, with or without their n-gram speculation, under the interpreter that has them.

Started as a file by `service.bench.spec_peers`, so it imports nothing of this project. Its argument is a JSON object;
each line in is a list of groups, served one after the other. A group is a list of [token ids, tokens to generate] that
come at once. Each line out says what came and in how many seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NGRAM_LONGEST, NGRAM_SHORTEST = 4, 2
"""Tokens at the end of a text that vLLM looks for earlier in it; llama.cpp takes the shortest."""
KV_GIB = "1"

Group = list[tuple[list[int], int]]
Generate = Callable[[Group], list[list[int]]]
"""(prompt, tokens to generate) of each -> the tokens of each; greedy, and no token ends an output."""


def llama_cpp(task: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """llama.cpp by llama-cpp-python's own `Llama.generate`; its drafts are `LlamaPromptLookupDecoding`."""
    module = importlib.import_module("llama_cpp")
    weights = _gguf(task)
    drafter = None
    if task["drafts"]:
        lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
        drafter = lookup(max_ngram_size=NGRAM_SHORTEST, num_pred_tokens=task["drafts"])
    engine = module.Llama(
        str(weights),
        n_ctx=task["context"],
        n_threads=task["threads"],
        n_threads_batch=task["threads"],
        draft_model=drafter,
        verbose=False,
    )

    def one(prompt: list[int], count: int) -> list[int]:
        tokens = engine.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
        found = [token for _, token in zip(range(count), tokens)]
        tokens.close()
        return found

    # It serves no two at once.
    return lambda group: [one(*ask) for ask in group], {"version": module.__version__, "file": weights.name}


def vllm(task: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """vLLM's engine in this process; its drafts are the method `ngram`."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{task['threads'] - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    module = importlib.import_module("vllm")
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": task["drafts"],
        "prompt_lookup_max": NGRAM_LONGEST,
        "prompt_lookup_min": NGRAM_SHORTEST,
    }
    options = {"speculative_config": drafts} if task["drafts"] else {}
    engine = module.LLMEngine.from_engine_args(
        module.EngineArgs(
            model=task["model"],
            dtype=task["dtype"],
            max_model_len=task["context"],
            max_num_seqs=task["streams"],
            disable_log_stats=True,
            skip_tokenizer_init=True,
            **options,
        )
    )
    names = iter(range(1 << 60))

    def generate(group: Group) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        for prompt, count in group:
            sampling = module.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            found[name := str(next(names))] = []
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
        return list(found.values())

    return generate, {"version": module.__version__}


ENGINES = {"llama_cpp": llama_cpp, "vllm": vllm}


def _gguf(task: dict[str, Any]) -> Path:
    """The weights of `model` as a file of llama.cpp, in the folder of the task; written unless it is there."""
    found = Path(task["folder"]) / f"{task['dtype']}.gguf"
    if not found.exists():
        importlib.import_module("gguf_weights").write_gguf(Path(task["model"]), found, task["dtype"])
    return found


def main() -> None:
    """Serve what stands on standard input until it ends."""
    # Engines print where they like; the first file is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    generate, info = ENGINES[task["module"]](task)
    print(json.dumps(info), file=answers, flush=True)
    for line in sys.stdin:
        groups = json.loads(line)
        began = time.perf_counter()
        outputs = [output for group in groups for output in generate(group)]
        seconds = time.perf_counter() - began
        print(json.dumps({"outputs": outputs, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
