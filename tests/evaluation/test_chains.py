"""Chains: models that make one hop or two, and the commands with --task chains."""

import json
import re
from contextlib import nullcontext

import pytest
import torch

from data.text.recall_tasks import CHAINS
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import load_tokenizer
from evaluation.passkey import Trials, draw, score
from model.config import ModelConfig
from model.gpt import GPT
from scripts import passkey, prepare_passkey
from training.metrics import read_metrics


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return load_tokenizer(str(corpus / TOKENIZER))


class Follower(GPT):
    """Model that answers with a code: of the right box after two hops, else of the first box."""

    def __init__(self, tokenizer, hops: int) -> None:
        super().__init__(
            ModelConfig(
                vocab_size=tokenizer.vocab_size, context_length=1000, n_layer=1, n_head=1, n_embd=8
            )
        )
        self.tokenizer, self.hops = tokenizer, hops

    def hidden(self, tokens, **_):
        wanted = torch.zeros_like(tokens)
        for row in range(len(tokens)):
            text = self.tokenizer.decode(tokens[row].tolist())
            codes = dict(re.findall(r"The code of box (\d+) is (\d+)\. ", text))
            boxes = dict(re.findall(r"Door (\d+) opens with the code of box (\d+)\.", text))
            (door,) = re.findall(r"Which code opens door (\d+)\?", text)
            code = codes[boxes[door]] if self.hops == 2 else next(iter(codes.values()))
            answer = self.tokenizer.encode(f" {code}.")[:-1]
            # the model predicts the answer shifted by one token
            wanted[row, -len(answer) :] = torch.tensor(answer)
        return wanted

    def head(self, hidden):
        return torch.nn.functional.one_hot(hidden, self.config.vocab_size).float()


@pytest.mark.parametrize("others", [0, 3])
def test_with_other_chains_an_answer_needs_two_hops(corpus, tokenizer, others) -> None:
    haystack = TokenStream(corpus, "train")
    trials = Trials(lengths=[1000], depths=[0.0, 0.5, 1.0], n=20, others=others, task=CHAINS)
    one, two = (
        sum(
            row["found"]
            for row in score(
                Follower(tokenizer, hops),
                tokenizer,
                haystack,
                trials,
                batch_tokens=4000,
                context=nullcontext,
            )
        )
        for hops in (1, 2)
    )
    assert two == 60
    # without distractors, the only code in the text is the answer
    assert one == 60 if others == 0 else 5 < one < 35


def test_at_most_450_chains_have_different_names() -> None:
    with pytest.raises(ValueError, match=r"others=450 must be in \[0, 449\]"):
        Trials(lengths=[100], depths=[0.5], n=1, others=450, task=CHAINS)


def test_heat_maps_name_the_first_sentence() -> None:
    rows = [{"length": 100, "depth": 0.5, "found": 1, "of": 2}]
    axes, bar = draw({"run": rows}, task=CHAINS).axes
    assert axes.get_xlabel() == "depth of the first sentence"
    assert bar.get_ylabel() == "codes found, of 100"


def test_prepare_and_evaluate_commands(run, corpus, tmp_path, capsys) -> None:
    taught = tmp_path / "taught"
    prepare_passkey.main([
        str(corpus), "--out", str(taught), "--documents", "800", "--longest", "600",
        "--task", "chains",
    ])  # fmt: skip
    assert json.loads((taught / "manifest.json").read_text())["settings"]["source"]["kind"] == (
        "chains"
    )
    mix = f"data.mix=[{{path: {taught}, weight: 1}}]"
    run(mix, "model.context_length=128", "optim.batch_tokens=512", "model.positions=rotary")
    assert read_metrics(run.out_dir)[-1]["val_loss_taught"] > 0
    capsys.readouterr()
    command = [
        str(run.out_dir), "--task", "chains", "--trials", "2", "--depths", "0", "1",
        "--lengths", "1100", "--data", str(taught), "--out", str(tmp_path / "out"),
        "--device", "cpu",
    ]  # fmt: skip
    results = []
    for order in ((), ("--order", "box-first", "--others", "1")):
        passkey.main([*command, *order])
        printed = capsys.readouterr().out
        assert "| run | tokens | codes found | depth of most misses |" in printed
        assert "chains.json and chains.png" in printed
        results.append(json.loads((tmp_path / "out" / "chains.json").read_text()))
    settings = [(result["others"], result["order"]) for result in results]
    assert settings == [(4, "random"), (1, "box-first")]
    for result in results:
        rows = result["runs"][0]["rows"]
        assert [(row["depth"], row["of"]) for row in rows] == [(0.0, 2), (1.0, 2)]
    assert (tmp_path / "out" / "chains.png").stat().st_size > 1000
    assert not (tmp_path / "out" / "passkey.json").exists()


def test_the_length_in_the_message_is_the_least_that_has_room(run, tmp_path) -> None:
    run("model.positions=rotary", "optim.max_steps=1", "optim.warmup_steps=0")
    command = [
        str(run.out_dir), "--task", "chains", "--trials", "3", "--depths", "0", "1",
        "--out", str(tmp_path / "out"), "--device", "cpu", "--lengths",
    ]  # fmt: skip
    # no clause on learned positions
    message = r"one of --lengths 300 must be at least (\d+): .* (\d+) tokens. Choose longer --len"
    with pytest.raises(ValueError, match=message) as error:
        passkey.main([*command, "300"])
    least, again = re.search(message, str(error.value)).groups()
    assert least == again
    with pytest.raises(ValueError, match="must be at least"):
        passkey.main([*command, str(int(0.97 * int(least)))])
    passkey.main([*command, least])
    (result,) = json.loads((tmp_path / "out" / "chains.json").read_text())["runs"]
    assert [row["of"] for row in result["rows"]] == [3, 3]


def test_an_order_of_keys_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="--order=box-first changes nothing with --task key"):
        passkey.main([str(tmp_path), "--order", "box-first"])
