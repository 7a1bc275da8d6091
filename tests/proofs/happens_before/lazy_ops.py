"""Runs PyTorch operations later: inside this mode an operation returns tensors at once and fills them when it runs.

Shapes come from running the operation on meta tensors, views are taken at once (they only name memory), and what needs
values on the host (`item`, a boolean index) drains the stream first, as it does on an accelerator. Until an operation
has run, its outputs hold poison: a legal token, NaN.

Every operation also tells the recorder which memory it reads and writes, whole storages at a time, so that state which
no hook of the engine names is watched too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from core.device.recorder import Recorder

POISON_INT = 7

Args = tuple[tuple[Any, ...], dict[str, Any]]


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """Memory on the CPU with the shape, strides and dtype of `like`, whose values mean nothing yet."""
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
    if out.dtype is torch.bool:
        return out.fill_(False)
    return out.fill_(math.nan if out.is_floating_point() else POISON_INT)


class LazyOps(TorchDispatchMode):
    """Hands every operation of its thread to `submit`; `drain` runs all that was submitted."""

    def __init__(
        self, submit: Callable[[Callable[[], object]], None], drain: Callable[[], None], recorder: Recorder | None
    ) -> None:
        super().__init__()
        self._submit = submit
        self._drain = drain
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._len_torch_dispatch_stack():
            # Streams nest, and so do their modes: only the innermost one may see what happens in here.
            with _disable_current_modes():
                return self._run(func, args, kwargs or {})
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        if _takes_views(func):
            return func(*args, **kwargs)
        if not inputs:
            # New memory, that no work submitted before can touch.
            made = func(*args, **kwargs)
            self._tell(func, (), _tensors(made))
            return made
        if _needs_values(func, (args, kwargs)):
            self._drain()
            return func(*args, **kwargs)
        written = _written(func, (args, kwargs))
        outputs = written or _placeholders(func, (args, kwargs))
        self._tell(func, inputs, _tensors(outputs))
        if written:
            self._submit(partial(func, *args, **kwargs))
            return written[0] if len(written) == 1 else tuple(written)
        self._submit(partial(_fill, outputs, func, args, kwargs))
        return outputs

    def _tell(self, func: Any, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        recorder = self._recorder
        if recorder is not None:
            made = {memory_of(tensor, str(func)) for tensor in outputs if not _is_told(tensor)}
            for buffer, number in {memory_of(tensor) for tensor in inputs if not _is_told(tensor)} - made:
                recorder.read(buffer, (number,))
            for buffer, number in made:
                recorder.wrote(buffer, (number,))


# Kept alive, so that an address never comes to stand for other memory.
_NAMES: dict[int, tuple[torch.UntypedStorage, str, int]] = {}
_NUMBERS = count(1)
_TOLD: dict[int, torch.UntypedStorage] = {}
"""Storages whose owner tells the recorder of each place: several streams may touch different ones at once."""


def memory_of(tensor: torch.Tensor, made_by: str = "nobody here") -> tuple[str, int]:
    """Buffer and place that stand for the storage of `tensor` until `forget_memory`."""
    storage = tensor.untyped_storage()
    if storage._cdata not in _NAMES:
        _NAMES.setdefault(storage._cdata, (storage, f"memory of {made_by}", next(_NUMBERS)))
    return _NAMES[storage._cdata][1:]


def name_memory(tensor: torch.Tensor, name: str) -> None:
    """Let stories call the storage of `tensor` by what it is."""
    storage = tensor.untyped_storage()
    _NAMES[storage._cdata] = (storage, f"memory of {name}", 0)


def tell_no_more_of(tensor: torch.Tensor) -> None:
    """The owner of the storage of `tensor` tells the recorder itself what is touched."""
    storage = tensor.untyped_storage()
    _TOLD[storage._cdata] = storage


def _is_told(tensor: torch.Tensor) -> bool:
    return bool(_TOLD) and tensor.untyped_storage()._cdata in _TOLD


def forget_memory() -> None:
    """Let go of all of it; after a run."""
    _NAMES.clear()
    _TOLD.clear()


def _fill(outputs: Any, func: Any, args: Any, kwargs: Any) -> None:
    for output, value in zip(_tensors(outputs), _tensors(func(*args, **kwargs)), strict=True):
        output.copy_(value)


_SHAPES: dict[Hashable, Any] = {}
"""What operations return for given shapes, on the meta device: working it out costs more than most operations here."""


def _placeholders(func: Any, call: Args) -> Any:
    """What `func` will return, as poison."""
    key = (func, _described(call))
    if key not in _SHAPES:
        args, kwargs = tree_map(_to_meta, call)
        _SHAPES[key] = func(*args, **kwargs)
    returned = _SHAPES[key]
    if isinstance(returned, torch.Tensor):
        return poisoned(returned)
    # Several tensors; or nothing, from an assertion.
    return returned and type(returned)(map(poisoned, returned))


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _described(value: Any) -> Hashable:
    """The same for two arguments with which an operation returns the same shapes."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(each)) for name, each in value.items())
    return type(value), value


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in the arguments or results of an operation."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


@cache
def _is_composite(func: Any) -> bool:
    """In inference mode, operations made of others come here whole."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


@cache
def _takes_views(func: Any) -> bool:
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


@cache
def _written_names(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written(func: Any, call: Args) -> list[torch.Tensor]:
    """The arguments that `func` writes to, which are also what it returns."""
    args, kwargs = call
    return [args[i] if i < len(args) else kwargs[name] for i, name in _written_names(func)]


def _needs_values(func: Any, call: Args) -> bool:
    if torch.Tag.dynamic_output_shape in func.tags and func is torch.ops.aten.index.Tensor:
        return any(tensor.dtype is torch.bool for tensor in _tensors(call[0][1]))
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
