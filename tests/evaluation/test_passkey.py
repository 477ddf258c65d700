"""Pass keys: prompts of exact length, and scores of models that look for the key."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.text.passkey import NoRoomError, PasskeySource, make_prompt
from data.text.prepare import prepare
from data.text.recall_tasks import CHAINS, KEYS, key
from data.text.shards import TOKENIZER, TokenStream
from data.text.sources import open_source
from data.text.tokenizer import load_tokenizer
from evaluation.passkey import (
    Trials,
    answered_correctly,
    by_length,
    draw,
    lengths_that_fit,
    score,
)
from evaluation.results import Row
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
@pytest.mark.parametrize("length", [190, 191, 500])
def test_a_prompt_has_its_length_needle_and_answer(tokenizer, haystack, depth, length) -> None:
    prompt = make_prompt(tokenizer, haystack.read(0, length), [key(417, 71432, depth)], length)
    assert len(prompt.tokens) == length
    text = tokenizer.decode(prompt.tokens)
    needle = (
        "\nThe pass key of door 417 is 71432. Remember it. 71432 is the pass key of door 417.\n"
    )
    before, after = text.split(needle)
    question = "\nWhat is the pass key of door 417? The pass key of door 417 is 71432"
    assert after.endswith(question)
    assert len(before) / len(before + after.removesuffix(question)) == pytest.approx(depth, abs=0.1)
    assert tokenizer.decode(prompt.tokens[-prompt.n_answer :]) == " 71432"


def test_several_keys_and_some_questions(tokenizer, haystack) -> None:
    numbers = [(100, 11111, 1.0), (101, 22222, 0.0), (102, 33333, 0.5)]
    keys = [key(*values) for values in numbers]
    prompt = make_prompt(tokenizer, haystack.read(0, 900), keys, 900, n_asked=2)
    assert len(prompt.tokens) == 900
    text = tokenizer.decode(prompt.tokens)
    parts = [text.index(f"door {door} is {digits}") for door, digits, _ in numbers]
    assert parts[1] == len("\nThe pass key of ") and parts[1] < parts[2] < parts[0]
    assert text.endswith(
        "\nWhat is the pass key of door 100? The pass key of door 100 is 11111."
        "\nWhat is the pass key of door 101? The pass key of door 101 is 22222"
    )
    assert text.count("What is the pass key") == 2
    assert tokenizer.decode(prompt.tokens[-prompt.n_answer :]) == " 22222"


def test_a_prompt_needs_room(tokenizer, haystack) -> None:
    with pytest.raises(ValueError, match="a prompt of 20 tokens has no room for needles"):
        make_prompt(tokenizer, haystack.read(0, 20), [key(417, 71432, 0.5)], 20)


def test_answers_match_greedy_decoding(tokenizer, haystack) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=200, n_layer=1, n_head=2, n_embd=16
    )
    model = GPT(config).eval()
    keys = [key(417, 12345, 0.5)]
    prompts = [make_prompt(tokenizer, haystack.read(n, 190), keys, 190) for n in range(6)]
    tokens = torch.tensor([p.tokens for p in prompts])
    n_answer = torch.tensor([3, 2, 3, 1, 3, 3])
    for row in (0, 1, 3):  # replace the answers of these rows by those of greedy decoding
        n = int(n_answer[row])
        tokens[row : row + 1] = generate(model, tokens[row : row + 1, :-n], n, temperature=0.0)
    expected = [
        torch.equal(
            generate(model, tokens[row : row + 1, : 190 - n], n, temperature=0.0)[0], tokens[row]
        )
        for row, n in enumerate(n_answer.tolist())
    ]
    assert answered_correctly(model, tokens, n_answer).tolist() == expected
    assert expected == [True, True, False, True, False, False]


class Finder(GPT):
    """Model that looks the door up in the last `reach` tokens and answers with its key."""

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
            _, _, asked = text.rpartition("What is the pass key of door ")
            _, needle, rest = text.partition(f"The pass key of door {asked[:3]} is ")
            answer = self.tokenizer.encode(f" {rest[:5]}.")[:-1]
            if needle and rest[5:7] == ". ":
                # the model predicts the answer shifted by one token
                wanted[row, -len(answer) :] = torch.tensor(answer)
        return wanted

    def head(self, hidden):
        return torch.nn.functional.one_hot(hidden, self.config.vocab_size).float()


@pytest.mark.parametrize("others", [0, 1])
def test_a_model_with_short_reach_finds_only_late_keys(tokenizer, haystack, others) -> None:
    trials = Trials(lengths=[300, 400], depths=[0.0, 0.5, 1.0], n=5, others=others)
    options = {"batch_tokens": 900, "context": nullcontext}
    rows = [*score(Finder(tokenizer, 512), tokenizer, haystack, trials, **options)]
    assert [(row["length"], row["depth"]) for row in rows] == [
        (length, depth) for length in (300, 400) for depth in (0.0, 0.5, 1.0)
    ]
    assert all(row["found"] == row["of"] == 5 for row in rows)
    if others:
        return
    near = [*score(Finder(tokenizer, 180), tokenizer, haystack, trials, **options)]
    assert [row["found"] for row in near if row["length"] == 400] == [0, 0, 5]
    joined = by_length(near)
    assert [(row["length"], row["of"]) for row in joined] == [(300, 15), (400, 15)]
    assert joined[1]["found"] == 5 and joined[1]["low"] < 1 / 3 < joined[1]["high"]
    axes = draw({"near": near, "all": rows}).axes
    assert [a.get_title() for a in axes[:2]] == ["near", "all"]
    assert {text.get_text() for text in axes[0].texts} == {"0", "100"}


def test_invalid_trials_are_refused(tokenizer, haystack) -> None:
    with pytest.raises(ValueError, match="need at least one length"):
        Trials(lengths=[], depths=[0.5], n=1)
    with pytest.raises(ValueError, match="depth=1.5 must be in"):
        Trials(lengths=[100], depths=[1.5], n=1)
    with pytest.raises(ValueError, match=r"others=900 must be in \[0, 899\]"):
        Trials(lengths=[100], depths=[0.5], n=1, others=900)
    long = Trials(lengths=[10**9], depths=[0.5], n=1)
    with pytest.raises(ValueError, match="must not be longer than the text: train of"):
        next(
            score(
                Finder(tokenizer, 9), tokenizer, haystack, long, batch_tokens=1, context=nullcontext
            )
        )


def test_training_documents(corpus, tokenizer) -> None:
    source = PasskeySource(corpus, 1000, longest=2000)
    documents = list(source.documents())
    assert list(source.documents(123)) == documents[123:]
    assert [d.number for d in documents if d.split == "val"] == [*range(99, 1000, 100)]
    lengths, n_keys = [], []
    for document in documents:
        text = document.text
        given = dict(re.findall(r"The pass key of door (\d+) is (\d{5})\. Remember it", text))
        asked = dict(re.findall(r"\? The pass key of door (\d+) is (\d{5})\.", text))
        assert given == asked and len(given) >= 1  # each is asked for, and the answer is right
        assert text.endswith(f"{[*asked.values()][-1]}.")
        n_keys.append(len(given))
        lengths.append(len(tokenizer.encode(text)))
    shortest, longest = min(lengths), max(lengths)
    assert 140 < shortest < 190 and 1800 < longest <= 2010
    assert n_keys[lengths.index(shortest)] == 1 and 4 < max(n_keys) < 10
    # as many tokens in short documents as in long ones
    below = sum(length for length in lengths if length < (shortest * longest) ** 0.5)
    assert below / sum(lengths) == pytest.approx(0.5, abs=0.1)
    assert PasskeySource(corpus, 300, longest=400, seed=1).describe() != source.describe()
    with pytest.raises(ValueError, match="longest=64 tokens must be above 1"):
        PasskeySource(corpus, 300, longest=64)
    with pytest.raises(ValueError, match="n_documents=99 must be at least 100"):
        PasskeySource(corpus, 99, longest=400)


def test_a_corpus_too_small_for_a_document_is_refused(corpus, tmp_path) -> None:
    for name, text in (("train", "the cat sees a dog. " * 200), ("val", "a dog.")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    source = open_source([str(tmp_path / "train.jsonl")], val=[str(tmp_path / "val.jsonl")])
    prepare(source, tmp_path / "shards", tokenizer=str(corpus / TOKENIZER))
    with pytest.raises(ValueError, match=r"val of .* tokens, but a document with a key needs 1"):
        PasskeySource(tmp_path / "shards", 100, longest=400)


def test_prepare_and_evaluate_commands(run, corpus, tmp_path, capsys) -> None:
    taught = tmp_path / "taught"
    prepare_passkey.main(
        [str(corpus), "--out", str(taught), "--documents", "300", "--longest", "300"]
    )
    mix = f"data.mix=[{{path: {taught}, weight: 1}}]"
    run(mix, "model.context_length=128", "optim.batch_tokens=512", "model.positions=rotary")
    assert read_metrics(run.out_dir)[-1]["val_loss_taught"] > 0
    capsys.readouterr()
    passkey.main([
        str(run.out_dir), "--trials", "2", "--depths", "0", "1", "--lengths", "300", "400",
        "--others", "1", "--out", str(tmp_path / "out"), "--device", "cpu",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "| run | 300 | " in printed and "| run | 400 | " in printed
    result = json.loads((tmp_path / "out" / "passkey.json").read_text())
    assert [row["of"] for row in result["runs"][0]["rows"]] == [2] * 4
    assert (tmp_path / "out" / "passkey.png").stat().st_size > 1000
    opened = open_run(run.out_dir)
    assert replace(opened.config.data).mix[0].path == str(taught)


def rows_of(length: int, *found: int | None, n: int = 4) -> list[Row]:
    """Rows of a length at depths 0, 0.5, 1; None was not measured."""
    of = [None if number is None else n for number in found]
    return [
        {"length": length, "depth": i / 2, "found": found[i], "of": of[i]}
        for i in range(len(found))
    ]


def test_default_lengths_are_those_that_fit_at_all_depths() -> None:
    whole, partial, empty = rows_of(9, 1, 0, 2), rows_of(8, None, 0, 2), rows_of(7, *[None] * 3)
    assert lengths_that_fit([*empty, *partial, *whole]) == whole
    # so that the run has a line in the results
    assert lengths_that_fit([*empty, *partial]) == partial


@pytest.mark.parametrize(
    ("found", "cell"),
    [((3, 1, 2), "50%"), ((1, 3, 1), "0%"), ((0, 0, 0), "all"), ((2, 2, 2), "all"),
     ((4, 4, 4), "-"), ((None, 2, None), "50%"), ((None, 4, None), "-")],
)  # fmt: skip
def test_the_depth_of_most_misses(found, cell) -> None:
    rows = [
        row | {"low": 0.0, "high": 1.0} for row in (*rows_of(100, *found), *rows_of(200, 0, 4, 4))
    ]
    lines = passkey.table_of({"run": rows}).splitlines()
    assert [line.split(" | ")[-1] for line in lines[2:]] == [f"{cell} |", "0% |"]


@pytest.mark.parametrize(("task", "others"), [(KEYS, 0), (KEYS, 5), (CHAINS, 4)])
def test_the_least_length_has_room_for_all_prompts(tokenizer, haystack, task, others) -> None:
    trials = Trials(lengths=[100], depths=[0.0, 0.5, 1.0], n=20, others=others, task=task)

    def without_room(length: int) -> int:
        """Number of prompts that do not fit."""
        n = 0
        for depth in trials.depths:
            for number in range(trials.n):
                rng = np.random.default_rng((0, length, round(1000 * depth), number))
                rng.integers(0, len(haystack) - length + 1)
                facts = task.draw(rng, [depth, *task.random_depths(rng, others)])
                try:
                    make_prompt(tokenizer, haystack.read(0, length), facts, length)
                except NoRoomError:
                    n += 1
        return n

    least = trials.least_length(tokenizer, haystack)
    assert without_room(least) == 0 and without_room(int(0.97 * least)) > 0
    # it is above lengths without room, even if those of a shorter one fit by chance
    refused = max(length for length in range(least - 20, least + 20) if without_room(length))
    above = replace(trials, lengths=[refused]).least_length(tokenizer, haystack)
    assert above > refused and without_room(above) == 0


@pytest.fixture(scope="module")
def short_and_long(make_run, tmp_path_factory):
    """Folders of runs with learned positions whose contexts have 32 and 250 tokens."""
    folders = []
    for context in (32, 250):
        run = make_run(tmp_path_factory.mktemp("runs"))
        batch = ("optim.micro_batch_size=1", f"optim.batch_tokens={context}")
        run(f"model.context_length={context}", "optim.max_steps=3", *batch)
        folders.append(str(run.out_dir.rename(run.out_dir.with_name(f"context{context}"))))
    return folders


@pytest.mark.parametrize(
    ("lengths", "measured", "empty"),
    [
        ([], [250], [("context32", 32)]),
        (["20", "251", "252"], [251], [("context32", 251), ("context250", 20)]),
    ],
)
def test_lengths_that_do_not_fit_a_run_are_left_empty(
    short_and_long, lengths, measured, empty, tmp_path, capsys
) -> None:
    passkey.main([
        *short_and_long, "--trials", "2", "--depths", "0", "1", "--device", "cpu",
        *(["--lengths", *lengths] if lengths else []), "--out", str(tmp_path),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    for label, length in empty:
        assert f"| {label} | {length} |  |  |\n" in printed
    short, long = json.loads((tmp_path / "passkey.json").read_text())["runs"]
    assert not any(row["of"] or row["low"] for row in short["rows"])
    assert {row["length"] for row in long["rows"] if row["of"]} == {*measured}
    assert (tmp_path / "passkey.png").stat().st_size > 1000
    # cells that were not measured have no number
    panels = draw({"short": short["rows"], "long": long["rows"]}).axes
    assert [len(panel.texts) for panel in panels[:2]] == [0, 2 * len(measured)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"the longest model.context_length=32 must be at least 1\d\d: .* a longer context$"),
        (["--lengths", "20", "34"],
         "one of --lengths 20 34 must be at least 1.*, and with learned positions at most 33 .*: "
         ".* Choose a run with a longer context$"),
        (["--others", "1"], "context_length=32 must .* with a longer context or fewer --others$"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_measured_are_refused(
    short_and_long, options, message, tmp_path
) -> None:
    with pytest.raises(ValueError, match=message):
        passkey.main([
            short_and_long[0], "--trials", "1", "--depths", "0", "--device", "cpu",
            *options, "--out", str(tmp_path),
        ])  # fmt: skip
    assert not any(tmp_path.iterdir())
