"""Generation: greedy is argmax, seeds repeat, the context is cropped where it must be."""

from typing import Any

import pytest
import torch

from model import GPT, ModelConfig
from model.generate import generate

VOCAB, CONTEXT = 61, 16


def make_model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCAB, context_length=CONTEXT, n_layer=2, n_head=4, n_embd=32, **changes
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.tensor([[3, 1, 4], [1, 5, 9]])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_greedy_is_argmax_step_by_step(positions: str, prompt: torch.Tensor) -> None:
    model = make_model(positions=positions).eval()
    expected = prompt
    for _ in range(CONTEXT + 4):  # past the context length
        window = expected[:, -CONTEXT:] if positions == "learned" else expected
        expected = torch.cat((expected, model(window)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(generate(model, prompt, CONTEXT + 4, temperature=0.0), expected)


def test_seeds_repeat_and_leave_the_global_generator_alone(prompt: torch.Tensor) -> None:
    model = make_model()
    before = torch.get_rng_state()
    first = generate(model, prompt, 12, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, generate(model, prompt, 12, seed=1))
    assert not torch.equal(first, generate(model, prompt, 12, seed=2))
    assert torch.equal(first[:, :3], prompt)
    assert first.shape == (2, 15) and first.max() < VOCAB


def test_without_a_seed_the_global_generator_draws(prompt: torch.Tensor) -> None:
    model = make_model()
    torch.manual_seed(7)
    first = generate(model, prompt, 12)
    assert not torch.equal(first, generate(model, prompt, 12))
    torch.manual_seed(7)
    assert torch.equal(first, generate(model, prompt, 12))


def test_draws_follow_the_distribution() -> None:
    model = make_model().eval()
    prompts = torch.full((4000, 1), 5)
    drawn = generate(model, prompts, 1, temperature=2.0, seed=0)[:, 1]
    expected = (model(prompts[:1])[0, 0] / 2.0).softmax(-1)
    torch.testing.assert_close(drawn.bincount(minlength=VOCAB) / 4000, expected, rtol=0, atol=0.03)


def test_top_k_draws_from_the_likeliest_alone() -> None:
    model = make_model().eval()
    prompts = torch.full((500, 1), 5)
    drawn = generate(model, prompts, 1, temperature=5.0, top_k=3, seed=0)[:, 1]
    assert set(drawn.tolist()) == set(model(prompts[:1])[0, 0].topk(3).indices.tolist())


def test_top_k_of_one_is_greedy(prompt: torch.Tensor) -> None:
    model = make_model()
    greedy = generate(model, prompt, 8, temperature=0.0)
    assert torch.equal(generate(model, prompt, 8, top_k=1, seed=0), greedy)


@pytest.mark.parametrize("training", [True, False])
def test_no_dropout_while_generating_and_the_mode_is_restored(
    training: bool, prompt: torch.Tensor
) -> None:
    model = make_model(dropout=0.5, attention_dropout=0.5).train(training)
    out = generate(model, prompt, 8, temperature=0.0)
    assert model.training is training
    assert torch.equal(out, generate(make_model(), prompt, 8, temperature=0.0))
    assert not out.requires_grad


def test_nothing_to_add(prompt: torch.Tensor) -> None:
    assert torch.equal(generate(make_model(), prompt, 0), prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, "at least one token"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"shape \(3,\)"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0.*model.vocab_size=61"),
        ({"top_k": VOCAB + 1}, "top_k=62.*model.vocab_size=61"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str, prompt: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        generate(make_model(), **({"tokens": prompt, "max_new_tokens": 4} | arguments))
