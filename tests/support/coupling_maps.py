"""Coupling maps: their measures, and whether two are the same."""

import dataclasses

import torch

from tl_coupling.comparisons import CouplingMap

MEASURES = [
    "coupling",
    "normalized_miscoupling",
    "miscoupling",
    "spectral_miscoupling",
    "captured_energy",
]


def assert_same(one: CouplingMap, other: CouplingMap) -> None:
    for field in dataclasses.fields(CouplingMap):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            assert a == b
            assert type(a) is type(b)
