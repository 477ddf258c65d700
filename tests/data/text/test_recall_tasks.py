"""Recall tasks: sentences and their places, and prompts of pass keys that never change."""

import re
from dataclasses import replace

import numpy as np
import pytest

from data.text.passkey import PasskeySource, make_prompt, tokens_of_fact
from data.text.recall_tasks import CHAINS, KEYS, NAMES, chain, chains_in_order
from data.text.shards import TOKENIZER, TokenStream
from data.text.tokenizer import load_tokenizer
from evaluation.passkey import Trials

CODE = r"\nThe code of box (\d+) is (\d+)\. Remember it\. \2 is the code of box \1\.\n"
DOOR = (
    r"\nDoor (\d+) opens with the code of box (\d+)\. Remember it\. "
    r"The code of box \2 opens door \1\.\n"
)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return load_tokenizer(str(corpus / TOKENIZER))


@pytest.fixture(scope="module")
def text(corpus):
    return TokenStream(corpus, "train")


def key_texts(door: int, digits: int) -> tuple[str, str, str]:
    """Needle, question and answer of a pass key, spelled out again."""
    return (
        f"\nThe pass key of door {door} is {digits}. Remember it. "
        f"{digits} is the pass key of door {door}.\n",
        f"\nWhat is the pass key of door {door}? The pass key of door {door} is",
        f" {digits}.",
    )


def old_prompt(tokenizer, haystack, doors, digits, depths, length, n_asked=1) -> list[int]:
    """Prompt of pass keys, as built before there were other tasks."""
    texts = [key_texts(*numbers) for numbers in zip(doors, digits, strict=True)]
    end = []
    for _, question, answer in texts[:n_asked]:
        end += tokenizer.encode(question) + tokenizer.encode(answer)
    end = end[: -len(tokenizer.encode("."))]
    needles = [tokenizer.encode(needle) for needle, _, _ in texts]
    room = length - len(end) - sum(map(len, needles))
    prompt = haystack[:room].tolist()
    for number in sorted(range(len(depths)), key=lambda n: -depths[n]):
        place = round(depths[number] * room)
        prompt[place:place] = needles[number]
    return prompt + end


@pytest.mark.parametrize("others", [0, 3])
def test_prompts_of_keys_never_change(tokenizer, text, others) -> None:
    trials = Trials(lengths=[900], depths=[0.0, 0.3, 1.0], n=3, others=others, seed=5)
    for depth in trials.depths:
        for number, prompt in enumerate(trials.prompts(tokenizer, text, 900, depth)):
            rng = np.random.default_rng((5, 900, round(1000 * depth), number))
            haystack = text.read(int(rng.integers(0, len(text) - 899)), 900)
            depths = [depth, *rng.random(others)]
            doors = rng.permutation(range(100, 1000))[: 1 + others]
            digits = rng.integers(10_000, 100_000, 1 + others)
            expected = old_prompt(tokenizer, haystack, doors, digits, depths, 900)
            assert prompt.tokens == expected
            assert tokenizer.decode(expected[-prompt.n_answer :]) == f" {digits[0]}"


def test_documents_of_keys_never_change(corpus, tokenizer, text) -> None:
    source = PasskeySource(corpus, 100, longest=1500, seed=3)
    assert source.describe() == {
        **{"kind": "passkey", "corpus": "shards", "n_documents": 100, "longest": 1500, "seed": 3},
        "tokens": len(text),
    }
    one_key = sum(len(tokenizer.encode(part)) for part in key_texts(999, 99_999))
    assert tokens_of_fact(KEYS, tokenizer) == one_key
    eot = text.manifest.tokenizer.eot_id
    for document in source.documents():
        if document.split == "val":
            continue
        rng = np.random.default_rng((3, document.number))
        length = int(1 / rng.uniform(1 / 1500, 1 / (16 + one_key)))
        haystack = text.read(int(rng.integers(0, len(text) - length + 1)), length)
        n = int(max(1, length // (2 * one_key)) ** rng.random())
        depths = rng.random(n)
        doors = rng.permutation(range(100, 1000))[:n]
        digits = rng.integers(10_000, 100_000, n)
        tokens = old_prompt(tokenizer, haystack, doors, digits, depths, length, n)
        assert document.text == tokenizer.decode([t for t in tokens if t != eot]) + "."


def test_short_documents_have_room_for_facts_longer_than_the_example(corpus) -> None:
    task = replace(CHAINS, example=chain(1, 1, 1, (0.0, 0.0), box_first=True))
    source = PasskeySource(corpus, 100, longest=800, task=task)
    for document in source.documents():
        codes, boxes = dict(re.findall(CODE, document.text)), dict(re.findall(DOOR, document.text))
        asked = re.findall(r"Which code opens door (\d+)\? .* is (\d+)\.", document.text)
        assert len(asked) >= task.least
        assert dict(asked) == {door: codes[box] for door, box in boxes.items()}


def test_keys_have_five_digits_and_different_doors() -> None:
    facts = KEYS.draw(np.random.default_rng(0), [0.5] * KEYS.most)
    doors = [int(re.findall(r"door (\d+)", fact.question)[0]) for fact in facts]
    assert sorted(doors) == [*range(100, 1000)]
    digits = {fact.answer for fact in facts}
    assert all(re.fullmatch(r" [1-9]\d{4}\.", answer) for answer in digits) and len(digits) > 880


def test_a_chain_has_two_sentences_in_either_order() -> None:
    depths = [n / CHAINS.most for n in range(CHAINS.most)]
    names, box_first = [], []
    for fact, depth in zip(CHAINS.draw(np.random.default_rng(0), depths), depths, strict=True):
        (first, a), (second, b) = fact.sentences
        assert first == depth <= second <= 1
        box_first.append(re.fullmatch(CODE, a) is not None)
        of_box, of_door = (a, b) if box_first[-1] else (b, a)
        (box, digits), (door, link) = (
            re.fullmatch(pattern, sentence).groups()
            for pattern, sentence in ((CODE, of_box), (DOOR, of_door))
        )
        assert link == box and fact.answer == f" {digits}."
        assert (
            fact.question == f"\nWhich code opens door {door}? The code that opens door {door} is"
        )
        names += [int(box), int(door)]
    assert sorted(names) == [*NAMES]  # all different
    assert 0.4 < np.mean(box_first) < 0.6
    for order, pattern in (("box-first", CODE), ("door-first", DOOR)):
        for fact in chains_in_order(order).draw(np.random.default_rng(1), [0.2] * 20):
            assert re.fullmatch(pattern, fact.sentences[0][1])


def test_depths_of_all_sentences_are_uniform() -> None:
    rng = np.random.default_rng(0)
    facts = [
        fact for _ in range(20) for fact in CHAINS.draw(rng, CHAINS.random_depths(rng, CHAINS.most))
    ]
    depths = np.array([[depth for depth, _ in fact.sentences] for fact in facts])
    assert np.all(depths[:, 0] <= depths[:, 1])
    shares, _ = np.histogram(depths, bins=10, range=(0, 1))
    np.testing.assert_allclose(shares / depths.size, 0.1, atol=0.01)


@pytest.mark.parametrize("box_first", [True, False])
@pytest.mark.parametrize("depths", [(0.0, 0.4), (1.0, 1.0)])
def test_a_prompt_has_both_sentences_in_order(tokenizer, text, box_first, depths) -> None:
    fact = chain(233, 417, 71432, depths, box_first=box_first)
    prompt = make_prompt(tokenizer, text.read(0, 800), [fact], 800)
    assert len(prompt.tokens) == 800
    decoded = tokenizer.decode(prompt.tokens)
    code, door = re.search(CODE, decoded), re.search(DOOR, decoded)
    assert code.groups() == ("417", "71432") and door.groups() == ("233", "417")
    first, second = (code, door) if box_first else (door, code)
    assert first.end() <= second.start()
    assert decoded.endswith("\nWhich code opens door 233? The code that opens door 233 is 71432")
    assert tokenizer.decode(prompt.tokens[-prompt.n_answer :]) == " 71432"
    # everything but the sentences and the end is text from the corpus, cut at the depths
    sentences = [tokenizer.encode(sentence) for _, sentence in fact.sentences]
    room = len(prompt.tokens) - len(tokenizer.encode(fact.question)) - prompt.n_answer
    room -= sum(map(len, sentences))
    haystack = text.read(0, room).tolist()
    one, two = (round(depth * room) for depth in depths)
    expected = haystack[:one] + sentences[0] + haystack[one:two] + sentences[1] + haystack[two:]
    assert prompt.tokens[: len(expected)] == expected


def test_documents_of_chains_ask_for_each(corpus, tokenizer) -> None:
    source = PasskeySource(corpus, 300, longest=2500, task=CHAINS)
    assert source.describe()["kind"] == "chains"
    documents = list(source.documents())
    assert list(source.documents(123)) == documents[123:]
    n_chains = []
    for document in documents:
        codes = dict(re.findall(CODE, document.text))
        doors = dict(re.findall(DOOR, document.text))
        asked = dict(re.findall(r"\? The code that opens door (\d+) is (\d{5})\.", document.text))
        assert asked == {door: codes[box] for door, box in doors.items()}
        assert len(asked) == len(codes) >= 2  # with one, repeating its code needs no hop
        n_chains.append(len(asked))
    assert min(n_chains) == 2 and max(n_chains) > 3
    with pytest.raises(ValueError, match="most of which are a chain and its question"):
        PasskeySource(corpus, 300, longest=64, task=CHAINS)
