"""Sampling: repeatable, restricted, cropped, and side-effect free."""

import pytest
import torch

from offloadtrain.config.model_shape import ModelShape
from offloadtrain.model.language_model import generate
from offloadtrain.model.transformer import Transformer

SHAPE = ModelShape(vocab_size=23, num_layers=1, d_model=32, num_heads=2, max_seq_len=8, dropout=0.3)
PROMPT_BT = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture
def model() -> Transformer:
    return Transformer(SHAPE, seed=1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_same_generator_gives_the_same_text(model: Transformer) -> None:
    first, again, other = (
        generate(model, PROMPT_BT, 12, generator=seeded(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2, 15)
    assert torch.equal(first[:, :3], PROMPT_BT)


@pytest.mark.parametrize("choice", [{"temperature": 0.0}, {"top_k": 1}])
def test_zero_temperature_and_one_candidate_are_greedy(
    model: Transformer, choice: dict[str, float]
) -> None:
    sampled_BT = generate(model, PROMPT_BT, 10, generator=seeded(), **choice)  # type: ignore[arg-type]
    model.eval()
    for at in range(3, 13):
        logits_BV = model(sampled_BT[:, max(0, at - 8) : at])[:, -1]
        assert torch.equal(sampled_BT[:, at], logits_BV.argmax(dim=1))


def test_top_p_keeps_the_fewest_that_reach_the_sum(model: Transformer) -> None:
    model.eval()
    prompt_BT = PROMPT_BT[:1].expand(400, -1)
    likely, order = model(PROMPT_BT[:1])[0, -1].div(0.2).softmax(0).sort(descending=True)
    count = int((likely.cumsum(0) < 0.5).sum()) + 1
    assert 1 < count < 23
    drawn = generate(model, prompt_BT, 1, temperature=0.2, top_p=0.5, generator=seeded())[:, -1]
    assert set(drawn.tolist()) == set(order[:count].tolist())


def test_a_diverged_model_is_refused(model: Transformer) -> None:
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        generate(model, PROMPT_BT, 1, generator=seeded())
    assert model.training
