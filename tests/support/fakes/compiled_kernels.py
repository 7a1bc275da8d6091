"""A GPU that compiles nothing and computes zeros: what Triton would have compiled for each launch is written down.

Triton builds a kernel anew for every key: types of arguments, what it sees of their values (one, multiples of 16), the
constants, the options. The key of a launch is computed by Triton's own code for a real GPU; the launch is left out, and
what it should have written is zero. So steps are as quick as on a device, with everything real but the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

WRITTEN = ("out", "q_out", "k_out", "read", "other", "found", "after")
"""What kernels write that others read as places, ids or activations."""


class CompiledKernels:
    """Launches by kernel, and the keys of each."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.keys: dict[str, set[tuple[Any, ...]]] = {}
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[str, Any] = {}

    def all(self) -> set[tuple[str, tuple[Any, ...]]]:
        """(kernel, key) of everything that was compiled so far."""
        return {(name, key) for name, keys in self.keys.items() for key in keys}

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Write down what is compiled for a launch of `kernel`, and zero what it writes."""
        name = kernel.fn.__qualname__
        if name not in self._binders:
            # An interpreted function keeps what it was declared with.
            jit = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
            self._binders[name] = create_function_from_signature(jit.signature, jit.params, self._backend)
        params, specialization, options = self._binders[name](*args, **kwargs)
        self.launches[name] += 1
        named = zip(params, specialization, strict=True)
        key = (*((each, *kind) for each, kind in named), *sorted(options.items()))
        self.keys.setdefault(name, set()).add(key)
        for written in WRITTEN:
            if isinstance(params.get(written), torch.Tensor):
                params[written].zero_()


@contextmanager
def compiling(patch: pytest.MonkeyPatch) -> Iterator[CompiledKernels]:
    """Every launch of a Triton kernel of this process, by whichever thread, goes to what is yielded."""
    kernels = CompiledKernels()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernels.launch(kernel, *args, **kwargs)

    with patch.context() as inside:
        for kind in (JITFunction, InterpretedFunction):
            inside.setattr(kind, "run", run)
        yield kernels
