"""Generation: greedy decoding, seeds, sliding windows, and a cache that changes no token."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ModelConfig
from model.generate import generate, probabilities, stream, window_start
from model.gpt import GPT
from model.mask_config import MaskConfig

VOCAB, CONTEXT = 61, 16


def make_model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
    }
    model = GPT(ModelConfig(**(shape | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.tensor([[3, 1, 4], [1, 5, 9]])


POSITIONS = pytest.mark.parametrize("positions", ["learned", "rotary"])


@POSITIONS
def test_greedy_is_argmax_step_by_step(positions: str, prompt: torch.Tensor) -> None:
    model = make_model(positions=positions).eval()
    expected = prompt
    window = prompt
    for _ in range(3 * CONTEXT):
        if window.shape[1] > CONTEXT:
            window = window[:, -(CONTEXT // 2) :]
        following = model(window)[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, following), dim=1)
        window = torch.cat((window, following), dim=1)
    assert torch.equal(generate(model, prompt, 3 * CONTEXT, temperature=0.0), expected)


def test_windows_match_the_docstring() -> None:
    assert [window_start(length, 4) for length in range(1, 10)] == [0, 0, 0, 0, 3, 3, 3, 6, 6]
    assert [window_start(length, 5) for length in range(5, 12)] == [0, 4, 4, 4, 4, 8, 8]


@pytest.mark.parametrize("context_length", [1, 2, 3, 7, 16])
def test_windows_keep_half_a_context_and_move_rarely(context_length: int) -> None:
    starts = [window_start(length, context_length) for length in range(1, 200)]
    read = 0
    for length, (before, start) in enumerate(zip([0, *starts], starts, strict=False), start=1):
        size = length - start
        assert 1 <= size <= context_length
        assert start == 0 or size >= max(1, context_length // 2)
        read += 1 if start == before else size
    assert read < 2 * len(starts)


DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 3},
    {"seed": 4, "temperature": 1.7, "top_k": 9, "top_p": 0.8},
]


@POSITIONS
@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("n_prompt", [1, 3, CONTEXT - 1, CONTEXT, CONTEXT + 1, 2 * CONTEXT + 5])
def test_the_cache_changes_no_token(positions: str, draws: dict[str, Any], n_prompt: int) -> None:
    model = make_model(positions=positions)
    prompts = torch.randint(VOCAB, (3, n_prompt))
    cached = generate(model, prompts, 3 * CONTEXT + 1, **draws)
    assert torch.equal(cached, generate(model, prompts, 3 * CONTEXT + 1, cached=False, **draws))
    assert torch.equal(cached[:, :n_prompt], prompts)


@POSITIONS
@pytest.mark.parametrize("context_length", [1, 2, 3, 7])
@pytest.mark.parametrize("draws", DRAWS)
def test_the_cache_changes_no_token_of_short_contexts(
    positions: str, context_length: int, draws: dict[str, Any]
) -> None:
    model = make_model(positions=positions, context_length=context_length)
    prompts = torch.tensor([[5, 9], [0, 1]])
    cached = generate(model, prompts, 20, **draws)
    assert torch.equal(cached, generate(model, prompts, 20, cached=False, **draws))


@POSITIONS
@pytest.mark.parametrize(("n_prompt", "draws"), [(1, DRAWS[1]), (37, DRAWS[2]), (150, DRAWS[1])])
def test_the_cache_changes_no_token_under_a_butterfly(
    positions: str, n_prompt: int, draws: dict[str, Any]
) -> None:
    mask = MaskConfig(pattern="butterfly", block_size=16, window_blocks=1, global_blocks=0)
    shape = {"context_length": 70, "positions": positions}  # five blocks, the last one partial
    model, prompts = make_model(**shape, mask=mask), torch.randint(VOCAB, (2, n_prompt))
    cached = generate(model, prompts, 150, **draws)  # the window moves three or four times
    assert torch.equal(cached, generate(model, prompts, 150, cached=False, **draws))
    assert not torch.equal(cached, generate(make_model(**shape), prompts, 150, **draws))


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_every_implementation_generates(attention: str, prompt: torch.Tensor) -> None:
    expected = generate(make_model(), prompt, 2 * CONTEXT, temperature=0.0)
    model = make_model(attention=attention)
    assert torch.equal(generate(model, prompt, 2 * CONTEXT, temperature=0.0), expected)


@pytest.mark.parametrize("n_prompt", [1, 3, CONTEXT + 2])
def test_the_cache_reads_one_token_per_step(n_prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = make_model(), []
    hidden = model.hidden

    def spy(tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        read.append(tokens.shape[1])
        return hidden(tokens, **options)

    monkeypatch.setattr(model, "hidden", spy)
    generate(model, torch.randint(VOCAB, (2, n_prompt)), 3 * CONTEXT)
    lengths = range(n_prompt, n_prompt + 3 * CONTEXT)
    starts = [window_start(length, CONTEXT) for length in lengths]
    new = [a != b for a, b in zip([-1, *starts], starts, strict=False)]
    assert read == [
        length - start if begins else 1
        for length, start, begins in zip(lengths, starts, new, strict=True)
    ]


@POSITIONS
def test_greedy_rows_do_not_depend_on_the_batch(positions: str) -> None:
    model = make_model(positions=positions)
    prompts = torch.randint(VOCAB, (5, 7))
    together = generate(model, prompts, 2 * CONTEXT, temperature=0.0)
    for prompt, row in zip(prompts, together, strict=True):
        assert torch.equal(generate(model, prompt[None], 2 * CONTEXT, temperature=0.0)[0], row)


def test_continuing_equals_generating_more_at_once(prompt: torch.Tensor) -> None:
    model = make_model()
    at_once = generate(model, prompt, 3 * CONTEXT, temperature=0.0)
    for first in (1, CONTEXT, 2 * CONTEXT - 1):
        part = generate(model, prompt, first, temperature=0.0)
        rest = generate(model, part, 3 * CONTEXT - first, temperature=0.0)
        assert torch.equal(rest, at_once)


def test_stream_yields_the_tokens_of_generate(prompt: torch.Tensor) -> None:
    model = make_model()
    drawn = list(stream(model, prompt, CONTEXT, seed=1, top_p=0.9))
    assert all(token.shape == (2,) and token.dtype == torch.int64 for token in drawn)
    expected = generate(model, prompt, CONTEXT, seed=1, top_p=0.9)[:, prompt.shape[1] :]
    assert torch.equal(torch.stack(drawn, dim=1), expected)


def test_stream_keeps_gradients_enabled_and_copies_its_tokens(prompt: torch.Tensor) -> None:
    model = make_model().train()
    expected = generate(model, prompt, 4, temperature=0.0)[:, prompt.shape[1] :]
    tokens = stream(model, prompt, 4, temperature=0.0)
    assert model.training
    got = []
    for token in tokens:
        assert torch.is_grad_enabled() and not model.training
        got.append(token.clone())
        token.zero_()  # the caller may modify a token
    assert torch.equal(torch.stack(got, dim=1), expected)
    assert model.training
    abandoned = stream(model, prompt, 4)
    next(abandoned)
    del abandoned
    assert model.training


def test_tokens_can_be_trained_on(prompt: torch.Tensor) -> None:
    model = make_model()
    tokens = generate(model, prompt, 4)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert model.tok_emb.weight.grad is not None


@pytest.mark.parametrize("cached", [True, False])
def test_rows_stop_and_generation_ends_with_the_last_one(cached: bool) -> None:
    model = make_model()
    prompts = torch.randint(VOCAB, (4, 3))
    free = generate(model, prompts, 40, seed=5)[:, 3:]
    stop_id = next(i for i in range(VOCAB) if (free == i).any(dim=1).sum() == 2)
    stopping = generate(model, prompts, 40, seed=5, stop_id=stop_id, cached=cached)[:, 3:]
    assert stopping.shape == (4, 40)  # two rows never sample it
    ends = []
    for row, expected in zip(stopping.tolist(), free.tolist(), strict=True):
        end = expected.index(stop_id) if stop_id in expected else 40
        assert row[:end] == expected[:end]
        assert set(row[end:]) <= {stop_id}
        ends.append(end)
    rows = torch.tensor([end < 40 for end in ends])
    same = generate(model, prompts[rows][:1], 40, temperature=0.0)[:, 3:]
    stop_id = int(same[0, 6])
    end = same[0].tolist().index(stop_id)
    early = generate(model, prompts[rows][:1], 40, temperature=0.0, stop_id=stop_id)
    assert torch.equal(early[:, 3:], same[:, : end + 1])


def test_a_prompt_may_contain_the_stop_id() -> None:
    model = make_model()
    prompts = torch.full((1, 4), 7)
    free = generate(model, prompts, 5, seed=0)
    assert 7 not in free[0, 4:]
    assert torch.equal(generate(model, prompts, 5, seed=0, stop_id=7), free)


def test_past_context_refuse_allows_a_full_context(prompt: torch.Tensor) -> None:
    model = make_model()
    full = generate(model, prompt, CONTEXT - 3, temperature=0.0, past_context="refuse")
    assert torch.equal(full, generate(model, prompt, CONTEXT - 3, temperature=0.0))
    with pytest.raises(ValueError, match=r"3 tokens and 14 new ones make 17.*length=16"):
        generate(model, prompt, CONTEXT - 2, past_context="refuse")


def brute_force(p: list[float], top_k: int | None, top_p: float | None) -> list[float]:
    """Compute probabilities token by token, in order of decreasing probability."""
    order = sorted(range(len(p)), key=lambda i: -p[i])[:top_k]
    total = sum(p[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += p[i] / total
        if top_p is not None and reached >= top_p:
            break
    mass = sum(p[i] for i in kept)
    return [p[i] / mass if i in kept else 0.0 for i in range(len(p))]


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**31),
    st.floats(0.3, 3.0),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.none(), st.floats(0.01, 0.99)),
)
def test_probabilities_match_brute_force(
    seed: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 12, generator=generator)
    got = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    for row, full_row in zip(got, (logits / temperature).softmax(dim=-1), strict=True):
        expected = brute_force(full_row.tolist(), top_k, top_p)
        torch.testing.assert_close(row, torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_the_nucleus_is_minimal() -> None:
    logits = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log()

    def kept(top_p: float) -> list[int]:
        return probabilities(logits, top_p=top_p)[0].nonzero()[:, 0].tolist()

    assert kept(1e-9) == [1]
    assert kept(0.4999) == kept(0.5) == [1]  # this token alone reaches p
    assert kept(0.5001) == kept(0.7499) == [1, 2]
    assert len(kept(0.7501)) == 3
    assert kept(0.9) == kept(1.0) == [0, 1, 2, 3]


def test_top_p_of_one_changes_nothing() -> None:
    logits = 8 * torch.randn(3, 50_257)
    assert torch.equal(probabilities(logits, top_p=1.0), logits.softmax(dim=-1))


@pytest.mark.parametrize("temperature", [1e-10, 1e-40, 5e-324])
def test_low_temperatures_choose_the_likeliest(temperature: float) -> None:
    p = probabilities(torch.tensor([[1.0, 3.0, 2.0], [-4.0, -5.0, -4.5]]), temperature=temperature)
    assert p.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(temperature: float, prompt: torch.Tensor) -> None:
    model = make_model()
    with torch.no_grad():
        model.tok_emb.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        generate(model, prompt, 2, temperature=temperature)
    with torch.no_grad():
        model.tok_emb.weight.fill_(1.0)
        model.ln_f.bias.fill_(1e30)
        model.tok_emb.weight[7] = 1e10  # a token that is not in the prompt
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        generate(model, prompt, 2, temperature=temperature)


def test_seeds_repeat_and_do_not_use_the_global_generator(prompt: torch.Tensor) -> None:
    model = make_model()
    before = torch.get_rng_state()
    first = generate(model, prompt, 12, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, generate(model, prompt, 12, seed=1))
    assert not torch.equal(first, generate(model, prompt, 12, seed=2))
    assert torch.equal(first[:, :3], prompt)
    assert first.shape == (2, 15) and first.max() < VOCAB


def test_without_a_seed_the_global_generator_is_used(prompt: torch.Tensor) -> None:
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


def test_top_k_draws_only_from_the_likeliest() -> None:
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


def test_zero_new_tokens_return_the_prompt(prompt: torch.Tensor) -> None:
    assert torch.equal(generate(make_model(), prompt, 0), prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.zeros(2, 0, dtype=torch.int64)}, "at least one token"),
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"shape \(3,\)"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0.*model.vocab_size=61"),
        ({"top_k": VOCAB + 1}, "top_k=62.*model.vocab_size=61"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5.*at most 1"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"seed": -1}, r"seed=-1 must be in \[0, 2\^63\)"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"past_context": "crop"}, "past_context='crop'.*slide, refuse"),
        ({"past_context": "refuse", "max_new_tokens": CONTEXT}, "more than model.context_length"),
        ({"stop_id": -1}, "stop_id=-1 must be between 0 and 60"),
        ({"stop_id": VOCAB}, "stop_id=61"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: dict[str, Any], message: str, prompt: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match=message):
        # refused by the call, before the first token is requested
        stream(make_model(), **({"tokens": prompt, "max_new_tokens": 4} | arguments))
