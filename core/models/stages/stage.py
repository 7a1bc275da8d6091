"""The layers of a model that one rank of a pipeline has: all others are cut out before weights are read.

A forward pass of the module tree of `transformers` is left as it is. Where the first layer of a rank begins, hidden
states come in from the rank before; where its last one ends, they go out to the next. The last rank sends them back to
rank 0, which alone has the embedding and the output matrix. So rank 0 makes logits of its own input, and everything
behind them (penalties, grammars, log probabilities, the relay) stays in one process.

`transformers` has a split of its own (`DistributedConfig(pp_size=N)`): norm and output matrix are on the last rank,
logits are broadcast to all, each transfer is waited for, and layers must have certain names.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedConfig

from core.errors import ModelLoadError
from core.models.stages.ring import Coming, Ring

FIRST: Final = 0
"""The rank that has the embedding and the output matrix."""


class Away(Exception):
    """Ends a forward pass of rank 0: hidden states are on their way round the other ranks."""


class Phase(Enum):
    """What the layers of rank 0 do when the module tree is called."""

    WHOLE = "whole"
    """Compute, send, and wait for what comes back: a forward pass as any other."""
    BEGIN = "begin"
    """Compute, send, and raise `Away`."""
    END = "end"
    """Compute nothing: what came back stands where the last layer ends."""


def own_layers(count: int, rank: int, size: int) -> range:
    """Which of `count` layers rank `rank` of `size` has. What does not divide goes to the first ones: rank 0 has most.

    So pools that fit beside its layers fit beside those of all others, whose devices are as large.
    """
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


class Stage:
    """This rank's part of one model. Used by the thread that runs the model."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.phase = Phase.WHOLE
        self.wanted: torch.Tensor | None = None
        """int64[S]: of the packed row's tokens, those whose states the last rank sends back; None for all."""
        self.elsewhere: list[str] = []
        """What names of weights begin with that other ranks have."""
        self.coming: Coming | None = None
        """What comes back of the pass that was begun last; None where nothing does."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that plans and samples."""
        return self.ring.rank == FIRST

    def cutting(self, model_class: Any) -> Any:
        """A class like `model_class`, of a module tree of `transformers`, without the layers of other ranks."""

        def init(module: Any, *given: Any, **named: Any) -> None:
            model_class.__init__(module, *given, **named)
            self._cut(module)

        # Its name and module: `transformers` looks conversions of weights up by them.
        return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})

    def _cut(self, model: Any) -> None:
        """Raises ModelLoadError where there are too few layers, or none that can be told from the rest."""
        count, size = model.config.get_text_config().num_hidden_layers, self.ring.size
        check_layers(model.config, size)
        names = {id(module): name for name, module in model.named_modules()}
        lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
        if len(lists) != 1:
            raise ModelLoadError(f"{_not_possible(model.config, size)}: its layers are not in one list")
        held: Any = lists[0]
        own = own_layers(count, self.ring.rank, size)
        for number, layer in enumerate(held):
            if number not in own:
                self.elsewhere.append(f"{names[id(layer)]}.")
                held[number] = Elsewhere(layer)
        if self.is_first:
            for number in own:
                held[number].forward = _AtItsPhase(self, held[number].forward)
        else:
            held[own.start].register_forward_pre_hook(self._enter, with_kwargs=True)
            self._leave_out_ends(model, names, held[own.start])
        held[own.stop - 1].register_forward_hook(self._leave)

    def _leave_out_ends(self, model: Any, names: dict[int, str], beside: nn.Module) -> None:
        """Neither embedding nor output matrix is here."""
        table, output = model.get_input_embeddings(), model.get_output_embeddings()
        self.elsewhere += [f"{names[id(each)]}." for each in (table, output) if each is not None]
        model.set_input_embeddings(NoEmbedding(table.weight.shape, beside))
        if output is not None:
            model.set_output_embeddings(NoLogits(output.weight.shape, beside))
        # Nothing is left to be tied.
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}

    def _enter(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        like = given[0] if given else named["hidden_states"]
        states = self.ring.expect(torch.empty_like(like)).wait()
        return ((states, *given[1:]), named) if given else (given, {**named, "hidden_states": states})

    def _leave(self, module: Any, given: Any, output: Any) -> Any:
        states = output if isinstance(output, torch.Tensor) else output[0]
        if not self.is_first:
            self._hand_on(states)
            return output
        if self.phase is Phase.END:
            assert self.coming is not None, "nothing ends that was not begun"
            states = self.coming.wait()
        else:
            self.ring.send(states)
            shape = states.shape if self.wanted is None else (1, len(self.wanted), states.shape[-1])
            back = states.new_empty(shape)
            # Nothing comes where nothing is wanted: in the middle of a prompt.
            self.coming = self.ring.expect(back) if back.numel() else None
            if self.phase is Phase.BEGIN:
                raise Away
            assert self.coming is not None, "a pass that is not begun by itself wants something"
            states = self.coming.wait()
        return states if isinstance(output, torch.Tensor) else (states, *output[1:])

    def _hand_on(self, states: torch.Tensor) -> None:
        if self.ring.rank == self.ring.size - 1 and self.wanted is not None:
            states = states.index_select(1, self.wanted)
        if states.numel():
            self.ring.send(states)


class _AtItsPhase:
    """`forward` of a layer of rank 0, which hands on what comes in while a pass is ended."""

    def __init__(self, stage: Stage, forward: Callable[..., Any]) -> None:
        self._stage = stage
        self._forward = forward

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self._stage.phase is Phase.END:
            return given[0] if given else named["hidden_states"]
        return self._forward(*given, **named)


class Elsewhere(nn.Module):
    """Stands for a layer that another rank has: hands on what comes in."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Models ask their layers for facts, such as what kind of attention they have.
        for name, value in vars(layer).items():
            if isinstance(value, bool | int | float | str) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *given: Any, **named: Any) -> Any:
        """The hidden states, which come first."""
        return given[0] if given else named["hidden_states"]


class Absent(nn.Module):
    """Stands for a module with one matrix, [vocab, hidden]: something of its shape, dtype and device."""

    def __init__(self, shape: torch.Size, beside: nn.Module) -> None:
        """`beside`: a module that is where this one would be."""
        super().__init__()
        self._shape = shape
        # No part of this one.
        self.__dict__["_beside"] = beside

    @property
    def weight(self) -> torch.Tensor:
        """No parameter, which would have to be loaded; it takes no memory."""
        beside: nn.Module = self.__dict__["_beside"]
        like = next(beside.parameters())
        return torch.empty(1, dtype=like.dtype, device=like.device).expand(self._shape)


class NoEmbedding(Absent):
    """In whose place hidden states come in."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Zeros, [..., hidden] for ids [...]."""
        return torch.zeros(*ids.shape, self._shape[1], dtype=self.weight.dtype, device=ids.device)


class NoLogits(Absent):
    """Gives ones that take no memory, so that whatever compares logits finds them equal."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., vocab] for states [..., hidden]."""
        return states.new_ones(1).expand(*states.shape[:-1], self._shape[0])


def check_layers(hf_config: PreTrainedConfig, size: int) -> None:
    """Raises ModelLoadError where there are fewer layers than ranks."""
    count = getattr(hf_config.get_text_config(), "num_hidden_layers", size)
    if count < size:
        raise ModelLoadError(f"{_not_possible(hf_config, size)}: it has {count} layers")


def _not_possible(hf_config: PreTrainedConfig, size: int) -> str:
    return f"pipeline_parallel {size} is not possible with {hf_config.model_type!r}"
