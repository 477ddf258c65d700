"""Pass keys: prompts of exact lengths, and who finds the key."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.text.passkey import PasskeySource, draw_key, make_prompt
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import load_tokenizer
from evaluation.passkey import Trials, answers, by_length, draw, score
from evaluation.runs import open_run
from model.config import ModelConfig
from model.generate import generate
from model.gpt import GPT
from scripts import passkey, prepare_passkey
from training.metrics import read_metrics


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return load_tokenizer(str(corpus / TOKENIZER))


@pytest.fixture(scope="module")
def haystack(corpus):
    return TokenStream(corpus, "train")


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("length", [150, 151, 400])
def test_a_prompt_has_its_length_needle_and_answer(tokenizer, haystack, depth, length) -> None:
    prompt = make_prompt(tokenizer, haystack.read(0, length), "71432", depth, length)
    assert len(prompt.tokens) == length
    text = tokenizer.decode(prompt.tokens)
    needle = "\nThe pass key is 71432. Remember it. 71432 is the pass key.\n"
    before, after = text.split(needle)
    assert after.endswith("\nWhat is the pass key? The pass key is 71432")
    share = len(before) / (len(before) + len(after))
    assert share == pytest.approx(depth * (1 - 60 / length), abs=0.25)
    assert tokenizer.decode(prompt.tokens[-prompt.n_answer :]) == " 71432"


def test_a_prompt_needs_room(tokenizer, haystack) -> None:
    with pytest.raises(ValueError, match="a prompt of 20 tokens has no room for needle"):
        make_prompt(tokenizer, haystack.read(0, 20), "71432", 0.5, 20)


def test_answers_are_those_of_greedy_decoding(tokenizer, haystack) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=200, n_layer=1, n_head=2, n_embd=16
    )
    model = GPT(config).eval()
    prompts = [make_prompt(tokenizer, haystack.read(n, 150), "12345", 0.5, 150) for n in range(6)]
    tokens = torch.tensor([p.tokens for p in prompts])
    n_answer = torch.tensor([3, 2, 3, 1, 3, 3])
    for row in (0, 1, 3):  # give these what greedy decoding gives
        n = int(n_answer[row])
        tokens[row : row + 1] = generate(model, tokens[row : row + 1, :-n], n, temperature=0.0)
    expected = [
        torch.equal(
            generate(model, tokens[row : row + 1, : 150 - n], n, temperature=0.0)[0], tokens[row]
        )
        for row, n in enumerate(n_answer.tolist())
    ]
    assert answers(model, tokens, n_answer).tolist() == expected
    assert expected == [True, True, False, True, False, False]


class Finder(GPT):
    """Looks the key up in the needle: every key is found where the needle is within reach."""

    def __init__(self, tokenizer, reach: int) -> None:
        super().__init__(
            ModelConfig(
                vocab_size=tokenizer.vocab_size, context_length=512, n_layer=1, n_head=1, n_embd=8
            )
        )
        self.tokenizer, self.reach = tokenizer, reach

    def hidden(self, tokens, **_):
        wanted = torch.zeros_like(tokens)
        for row in range(len(tokens)):
            text = self.tokenizer.decode(tokens[row, -self.reach :].tolist())
            _, needle, rest = text.partition("The pass key is ")
            answer = self.tokenizer.encode(f" {rest[:5]}.")[:-1]
            if needle and rest[5:7] == ". ":
                # what follows the last token before the answer, and each of its own
                wanted[row, -len(answer) :] = torch.tensor(answer)
        return wanted

    def head(self, hidden):
        return torch.nn.functional.one_hot(hidden, self.config.vocab_size).float()


def test_a_model_of_short_reach_finds_late_keys_alone(tokenizer, haystack) -> None:
    trials = Trials(lengths=[150, 300], depths=[0.0, 0.5, 1.0], n=5)
    options = {"batch_tokens": 700, "context": nullcontext}
    rows = [*score(Finder(tokenizer, 512), tokenizer, haystack, trials, **options)]
    assert [(row["length"], row["depth"]) for row in rows] == [
        (length, depth) for length in (150, 300) for depth in (0.0, 0.5, 1.0)
    ]
    assert all(row["found"] == row["of"] == 5 for row in rows)
    near = [*score(Finder(tokenizer, 120), tokenizer, haystack, trials, **options)]
    assert [row["found"] for row in near if row["length"] == 300] == [0, 0, 5]
    joined = by_length(near)
    assert [(row["length"], row["of"]) for row in joined] == [(150, 15), (300, 15)]
    assert joined[1]["found"] == 5 and joined[1]["low"] < 1 / 3 < joined[1]["high"]
    axes = draw({"near": near, "all": rows}).axes
    assert [a.get_title() for a in axes[:2]] == ["near", "all"]
    assert {text.get_text() for text in axes[0].texts} == {"0%", "100%"}


def test_trials_that_cannot_be(tokenizer, haystack) -> None:
    with pytest.raises(ValueError, match="need a length"):
        Trials(lengths=[], depths=[0.5], n=1)
    with pytest.raises(ValueError, match="depth=1.5 must lie in"):
        Trials(lengths=[100], depths=[1.5], n=1)
    long = Trials(lengths=[10**9], depths=[0.5], n=1)
    with pytest.raises(ValueError, match="need as much text, and train of"):
        next(
            score(
                Finder(tokenizer, 9), tokenizer, haystack, long, batch_tokens=1, context=nullcontext
            )
        )


def test_documents_that_teach(corpus, tokenizer) -> None:
    source = PasskeySource(corpus, 300, longest=400)
    documents = list(source.documents())
    assert list(source.documents(123)) == documents[123:]
    assert {d.split for d in documents} == {"train", "val"}
    lengths = []
    for document in documents:
        needle = document.text.split("The pass key is ")[1][:5]
        assert document.text.endswith(f"What is the pass key? The pass key is {needle}.")
        lengths.append(len(tokenizer.encode(document.text)))
    shortest, longest = min(lengths), max(lengths)
    assert 100 < shortest < 125 and 380 < longest <= 410
    # as many below the geometric mean as above it
    assert np.mean(np.array(lengths) < (shortest * longest) ** 0.5) == pytest.approx(0.5, abs=0.1)
    assert PasskeySource(corpus, 300, longest=400, seed=1).describe() != source.describe()
    with pytest.raises(ValueError, match="longest=64 tokens must be above 1"):
        PasskeySource(corpus, 300, longest=64)
    with pytest.raises(ValueError, match="n_documents=0 must be at least 1"):
        PasskeySource(corpus, 0, longest=400)


def test_keys_have_five_digits() -> None:
    keys = {draw_key(np.random.default_rng(n)) for n in range(200)}
    assert len(keys) > 190 and {len(key) for key in keys} == {5}


def test_the_commands(run, corpus, tmp_path, capsys) -> None:
    taught = tmp_path / "taught"
    prepare_passkey.main(
        [str(corpus), "--out", str(taught), "--documents", "300", "--longest", "200"]
    )
    mix = f"data.mix=[{{path: {taught}, weight: 1}}]"
    run(mix, "model.context_length=128", "optim.batch_tokens=512", "model.positions=rotary")
    assert read_metrics(run.out_dir)[-1]["val_loss_taught"] > 0
    capsys.readouterr()
    passkey.main([
        str(run.out_dir), "--trials", "2", "--depths", "0", "1", "--lengths", "120", "200",
        "--out", str(tmp_path / "out"), "--device", "cpu",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "| run | 120 | " in printed and "| run | 200 | " in printed
    result = json.loads((tmp_path / "out" / "passkey.json").read_text())
    assert [row["of"] for row in result["runs"][0]["rows"]] == [2] * 4
    assert (tmp_path / "out" / "passkey.png").stat().st_size > 1000
    opened = open_run(run.out_dir)
    assert replace(opened.config.data).mix[0].path == str(taught)
