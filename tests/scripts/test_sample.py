from types import SimpleNamespace

import pytest
import torch

from data.text.tokenizer import train_tokenizer
from model.config import ModelConfig
from model.generate import generate
from model.gpt import GPT
from scripts import sample
from scripts.sample import continuations, pieces
from training.command_line import user_errors_as_messages


@pytest.fixture(scope="module")
def untrained():
    """Run with random weights, which generates random bytes."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["plain text"], vocab_size=257)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=16, n_layer=2, n_head=2, n_embd=16
    )
    model = GPT(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return SimpleNamespace(model=model, tokenizer=tokenizer)


def test_continues_prompts_from_the_newest_checkpoint(train, capsys, tmp_path):
    folder = str(train("run"))
    (tmp_path / "prompt.txt").write_bytes(b"the cat\r\n")

    def printed(*options):
        capsys.readouterr()
        sample.main([folder, "--tokens", "20", *options])
        return capsys.readouterr().out

    assert printed("--prompt-file", str(tmp_path / "prompt.txt")).startswith("the cat\r\n")
    text = printed("--prompt", "the cat", "--temperature", "0")
    assert text.startswith("the cat") and len(text) > len("the cat\n")
    # the first row of a batch is not sampled like a batch of one
    several = printed("--prompt", "the cat", "--samples", "2")
    assert several.startswith("--- prompt 1, sample 1 ---\nthe cat")
    assert "\n\n--- prompt 1, sample 2 ---\nthe cat" in several
    options = ("--temperature", "0", "--top-p", "0.9", "--top-k", "5")
    several = printed("--prompt", "the cat", "--prompt", "a", *options)
    assert several.startswith(f"--- prompt 1, sample 1 ---\n{text}\n--- prompt 2")


@pytest.mark.parametrize("samples", ["1", "2"])
def test_a_terminal_gets_no_control_characters(train, capsys, monkeypatch, samples):
    """Control characters could change its title, or fill the clipboard."""
    folder, prompt = str(train("run")), "a\x1b]52;c;\x07\x9b\r\tb\n"
    arguments = [folder, "--tokens", "1", "--prompt", prompt, "--samples", samples]
    sample.main(arguments)
    assert prompt in capsys.readouterr().out  # unchanged in a file or a pipe
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    sample.main(arguments)
    assert "a\ufffd]52;c;\ufffd\ufffd\ufffd\tb\n" in capsys.readouterr().out


def test_invalid_options_are_refused(train, capsys, tmp_path):
    folder = train("run")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    capsys.readouterr()
    for options, message in (
        (
            ["--past-context", "refuse"],
            "make 20[0-9], more than model.context_length=32: shorten .* with past_context='slide' "
            r"\(--past-context slide\)",
        ),
        (["--prompt-file", str(latin)], r"--prompt-file .*latin.txt must be UTF-8 text"),
        (["--prompt", "some text", "--top-k", "0"], "top_k=0 must be"),
        (["--prompt", "a\udcff"], r"--prompt='a\\udcff' is not UTF-8"),
        (["--samples", "0"], "samples=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sample.main([str(folder), *options])
    assert capsys.readouterr().out == ""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SystemExit, match=r"error: Tokenizer '.*tokenizer.json' must be"):  # noqa: SIM117
        with user_errors_as_messages():
            sample.main([str(folder)])
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet. Train it first"):
        sample.main([str(tmp_path)])
    for name in ("nowhere", "prompt.txt"):
        (tmp_path / "prompt.txt").touch()
        message = f"{tmp_path}/{name} must be the folder of a run, but there is no such folder"
        with pytest.raises(FileNotFoundError, match=message):
            sample.main([str(tmp_path / name), "--checkpoint", "best"])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 1}])
@pytest.mark.parametrize("prompt", ["", "a", "naïve 🦋"])
def test_pieces_join_to_the_continuation(untrained, prompt, options):
    streamed = list(pieces(untrained, prompt, 60, **options))
    assert continuations(untrained, [prompt], 60, **options) == [["".join(streamed)]]
    assert streamed[0] == prompt
    assert len(streamed) == 62


def test_prompts_keep_their_order_and_do_not_affect_each_other(untrained):
    prompts = ["abc", "d", "", "efg", "d", "hij"]
    together = continuations(untrained, prompts, 40, samples=2, temperature=0.0)
    for prompt, texts in zip(prompts, together, strict=True):
        (alone,) = continuations(untrained, [prompt], 40, temperature=0.0)
        assert texts == [alone[0], alone[0]]
        assert texts[0].startswith(prompt)


def test_an_empty_prompt_begins_after_the_end_of_text(untrained, monkeypatch):
    monkeypatch.setattr(untrained.tokenizer, "eot_id", 7)
    ((text,),) = continuations(untrained, [""], 20, temperature=0.0)
    drawn = generate(untrained.model, torch.tensor([[7]]), 20, temperature=0.0)
    assert text == untrained.tokenizer.decode(drawn[0, 1:].tolist())
    assert "".join(pieces(untrained, "", 20, temperature=0.0)) == text
    monkeypatch.setattr(untrained.tokenizer, "eot_id", 0)
    assert continuations(untrained, [""], 20, temperature=0.0) != [[text]]


def test_a_text_ends_before_the_stop_id(untrained):
    tokenizer = untrained.tokenizer
    ((free,),) = continuations(untrained, ["x"], 60, seed=2)
    cut = next(c for c in free[1:] if ord(c) < 128)
    options = {"seed": 2, "stop_id": tokenizer.encode(cut)[0]}
    expected = "x" + free[1:].partition(cut)[0]
    assert continuations(untrained, ["x"], 60, **options) == [[expected]]
    assert "".join(pieces(untrained, "x", 60, **options)) == expected


def test_options_reach_the_draws(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sample, "sample", lambda *args, **options: calls.append((args, options)))
    words = "--tokens 7 --samples 3 --temperature 0.5 --top-k 4 --top-p 0.25 --seed 9"
    words = f"--checkpoint best --prompt a --prompt b {words} --past-context refuse --no-stop"
    sample.main([str(tmp_path), *words.split()])
    draws = {"temperature": 0.5, "top_k": 4, "top_p": 0.25, "seed": 9, "past_context": "refuse"}
    chosen = {"checkpoint": "best", "samples": 3, "stop": False}
    assert calls == [((tmp_path, ["a", "b"], 7), chosen | draws)]


def test_end_of_text_stops_by_default(train, monkeypatch):
    folder, calls = train("run"), []
    monkeypatch.setattr(sample, "pieces", lambda *_, **options: calls.append(options) or [])
    sample.main([str(folder)])
    sample.main([str(folder), "--no-stop"])
    assert calls[0]["stop_id"] == sample.open_run(folder).tokenizer.eot_id
    assert "stop_id" not in calls[1]


def test_run_trained_with_our_kernels_on_a_machine_without_a_gpu(
    train, corpus, capsys, monkeypatch
):
    folder = train("run")
    arguments = [str(folder), "--prompt", "the cat", "--tokens", "5", "--temperature", "0"]
    config = folder / "config.yaml"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("kernels.triton._INTERPRETED", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    capsys.readouterr()
    sample.main(arguments)
    expected = capsys.readouterr().out
    elsewhere = config.read_text().replace(str(corpus), "gone")  # its data is not needed
    config.write_text(elsewhere.replace("attention: auto", "attention: triton"))
    assert sample.open_run(folder).config.model.attention == "triton"
    sample.main(arguments)
    assert capsys.readouterr().out == expected
