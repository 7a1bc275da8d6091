"""Adapters go on over another tree of the same modules, and leave the tree of before as it was."""

from __future__ import annotations

import torch

from core.models.lora.slots import AdapterSlots


def test_the_tree_of_before_keeps_no_hook() -> None:
    old, new = (torch.nn.ModuleDict({"up": torch.nn.Linear(4, 4)}) for _ in range(2))
    slots = AdapterSlots(old)
    slots._hook_layers(frozenset({"up"}))
    slots.over(new)
    assert not old["up"]._forward_hooks and not new["up"]._forward_hooks
    wide = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8)})
    assert slots.why_not_over(new) is None
    assert slots.why_not_over(wide) == "its up is (8, 4), where adapters have (4, 4)"
    assert slots.why_not_over(torch.nn.ModuleDict()) == "its up is no such matrix, where adapters have (4, 4)"
