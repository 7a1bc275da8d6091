"""Another way to run an encoder, in a process of its own: sentence-transformers, else transformers as that uses it.

Needs nothing of this project, so that any interpreter can run it: `encoder_peer.py DIR DTYPE THREADS embed|judge`.
Writes its name as one line, then reads a JSON list of texts or pairs a line and writes the seconds that they took.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

BATCH = 32
"""What sentence-transformers computes together unless it is told otherwise, and what its users mostly leave."""


def main() -> None:
    """Serve the lines of standard input."""
    directory, dtype, threads, task = sys.argv[1:]
    import torch

    torch.set_num_threads(int(threads))
    run, name = _runner(torch, directory, getattr(torch, dtype), task == "judge")
    print(name, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began = time.perf_counter()
        with torch.inference_mode():
            run([tuple(each) if isinstance(each, list) else each for each in texts])
        print(time.perf_counter() - began, flush=True)


def _runner(torch: Any, directory: str, dtype: Any, judges: bool) -> tuple[Any, str]:
    """(what computes a list of texts or pairs, the name of the library)."""
    try:
        sentence_transformers: Any = import_module("sentence_transformers")
    except ImportError:
        return _plain(torch, directory, dtype, judges), "transformers"
    options = {"device": "cpu", "model_kwargs": {"dtype": dtype}}
    if judges:
        model: Any = sentence_transformers.CrossEncoder(directory, **options)
        return lambda texts: model.predict(texts, batch_size=BATCH, show_progress_bar=False), "sentence-transformers"
    model = sentence_transformers.SentenceTransformer(directory, **options)
    return lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False), "sentence-transformers"


def _plain(torch: Any, directory: str, dtype: Any, judges: bool) -> Any:
    """Padded batches of texts in the order of their lengths, and the mean of the states of each."""
    transformers: Any = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    auto = transformers.AutoModelForSequenceClassification if judges else transformers.AutoModel
    model = auto.from_pretrained(directory, dtype=dtype).eval()

    def run(texts: list[Any]) -> list[Any]:
        order = sorted(texts, key=lambda each: -sum(map(len, each)) if isinstance(each, tuple) else -len(each))
        found = []
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            encoded = tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            output = model(**encoded)
            if judges:
                found.append(torch.sigmoid(output.logits))
                continue
            mask = encoded["attention_mask"][..., None]
            found.append((output.last_hidden_state * mask).sum(1) / mask.sum(1))
        return found

    return run


if __name__ == "__main__":
    main()
