"""Packed behaves like the sequence of vectors that it was made from."""

import pickle

import pytest
import torch

from fedflat.federation.packed import Packed

VECTORS = [torch.tensor([4, 2]), torch.arange(0), torch.tensor([7]), torch.arange(5)]


def test_packed_is_a_sequence_of_the_same_vectors():
    packed = pickle.loads(pickle.dumps(Packed.of(VECTORS)))
    assert len(packed) == 4
    assert [vector.tolist() for vector in packed] == [vector.tolist() for vector in VECTORS]
    assert packed[-1].tolist() == [0, 1, 2, 3, 4]
    assert [vector.tolist() for vector in packed[1:3]] == [[], [7]]
    assert packed.total == 8
    assert [packed.size(place) for place in (0, 1, 2, 3, -1)] == [2, 0, 1, 5, 5]
    assert packed.sizes.tolist() == [2, 0, 1, 5]
    with pytest.raises(IndexError, match="4 clients"):
        packed[4]


def test_packed_finds_the_first_empty_vector():
    assert Packed.of(VECTORS).empty() == 1
    assert Packed.of(VECTORS[2:]).empty() is None
    assert Packed.of([]).empty() is None
    assert len(Packed.of([])) == 0
