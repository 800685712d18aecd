"""The fingerprint of weights tells every bit and every place."""

import pytest
import torch
from torch import Tensor, nn

from recipes import weights
from recipes.weights import fingerprints


class Weights(nn.Module):
    def __init__(self, value: Tensor):
        super().__init__()
        self.w = nn.Parameter(value, requires_grad=value.is_floating_point())


def of(value: Tensor) -> str:
    return fingerprints([Weights(value)])["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_the_same_bits_agree(dtype):
    value = torch.arange(1000).to(dtype)
    assert of(value) == of(value.clone()) == of(value.view(10, 100))
    assert len(of(value)) == 16


def test_one_bit_shows():
    value = torch.randn(1000)
    seen = {of(value)}
    for bit in (0, 7, 22, 31):
        words = value.clone().view(torch.int32)
        words[500] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        seen.add(of(words.view(torch.float32)))
    assert len(seen) == 5


def test_zeros_of_different_sign_differ():
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))


def test_places_count():
    value = torch.randn(100)
    swapped = value.clone()
    swapped[[3, 90]] = value[[90, 3]]
    assert of(value) != of(swapped)
    assert of(torch.zeros(10)) != of(torch.zeros(11))


def test_chunks_change_nothing(monkeypatch):
    value = torch.randn(1000)
    whole = of(value)
    monkeypatch.setattr(weights, "_CHUNK", 7)
    assert of(value) == whole


def test_parts_and_buffers_are_named():
    part = nn.Linear(2, 3)
    part.register_buffer("kept", torch.ones(2))
    part.register_buffer("lost", torch.ones(2), persistent=False)
    assert set(fingerprints([part, Weights(torch.ones(1))])) == {"weight", "bias", "kept", "w"}
    assert fingerprints([]) == {}


def test_wrappers_do_not_show_in_names():
    plain, compiled = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3))
    compiled.load_state_dict(plain.state_dict())
    compiled[0] = torch.compile(compiled[0])
    assert fingerprints([compiled]) == fingerprints([plain])
