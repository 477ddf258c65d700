from types import SimpleNamespace

import pytest
import torch

from configs.command_line import errors_as_sentences
from data.text.tokenizer import train_tokenizer
from model import GPT, ModelConfig
from model.generate import generate
from scripts import sample
from scripts.sample import continuations, pieces
from training.numerics import autocast


@pytest.fixture(scope="module")
def untrained():
    """A run of random weights, whose text is random bytes."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["plain text"], vocab_size=257)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=16, n_layer=2, n_head=2, n_embd=16
    )
    model = GPT(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return SimpleNamespace(model=model, tokenizer=tokenizer)


def test_continues_the_prompt_from_the_newest_checkpoint(run, capsys):
    run()
    arguments = [str(run.out_dir), "--prompt", "the cat", "--tokens", "20"]
    capsys.readouterr()
    sample.main(arguments)
    text = capsys.readouterr().out
    assert text.startswith("the cat")
    assert len(text) > len("the cat\n")
    sample.main([*arguments, "--samples", "2"])
    # the first row of a batch is not drawn like a batch of one
    printed = capsys.readouterr().out
    assert printed.startswith("--- prompt 1, sample 1 ---\nthe cat")
    assert "\n\n--- prompt 1, sample 2 ---\nthe cat" in printed
    greedy = [*arguments, "--temperature", "0"]
    sample.main(greedy)
    text = capsys.readouterr().out
    sample.main([*greedy, "--prompt", "a", "--top-p", "0.9", "--top-k", "5"])
    assert capsys.readouterr().out.startswith(f"--- prompt 1, sample 1 ---\n{text}\n--- prompt 2")


def test_prompt_from_a_file(run, capsys, tmp_path):
    run()
    (tmp_path / "prompt.txt").write_bytes(b"the cat\r\n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    capsys.readouterr()
    sample.main([str(run.out_dir), "--prompt-file", str(tmp_path / "prompt.txt"), "--tokens", "2"])
    assert capsys.readouterr().out.startswith("the cat\r\n")
    with pytest.raises(ValueError, match=r"--prompt-file .*latin.txt must be UTF-8 text"):
        sample.main([str(run.out_dir), "--prompt-file", str(tmp_path / "latin.txt")])


def test_refuses_what_is_longer_than_the_context(run):
    run()
    with pytest.raises(ValueError, match="make 20[0-9], more than model.context_length=32"):
        sample.main([str(run.out_dir), "--prompt", "the cat", "--past-context", "refuse"])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 1}])
@pytest.mark.parametrize("prompt", ["", "a", "naïve 🦋"])
def test_pieces_are_the_one_continuation(untrained, prompt, options):
    streamed = list(pieces(untrained, prompt, 60, **options))
    assert continuations(untrained, [prompt], 60, **options) == [["".join(streamed)]]
    assert streamed[0] == prompt
    assert len(streamed) == 62


def test_prompts_come_back_in_order_each_as_if_alone(untrained):
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


def test_samples_differ(untrained):
    (texts,) = continuations(untrained, ["abc"], 20, samples=5, seed=0)
    assert len(set(texts)) == 5


def test_a_text_ends_before_the_stop_id(untrained):
    tokenizer = untrained.tokenizer
    ((free,),) = continuations(untrained, ["x"], 60, seed=2)
    cut = next(c for c in free[1:] if ord(c) < 128)
    options = {"seed": 2, "stop_id": tokenizer.encode(cut)[0]}
    expected = "x" + free[1:].partition(cut)[0]
    assert continuations(untrained, ["x"], 60, **options) == [[expected]]
    assert "".join(pieces(untrained, "x", 60, **options)) == expected


def test_end_of_text_stops_unless_told_otherwise(run, capsys, monkeypatch):
    run()
    seen = []
    monkeypatch.setattr(sample, "pieces", lambda *_, **options: seen.append(options) or [])
    sample.main([str(run.out_dir)])
    sample.main([str(run.out_dir), "--no-stop"])
    assert seen[0]["stop_id"] == sample.open_run(run.out_dir).tokenizer.eot_id
    assert "stop_id" not in seen[1]


def test_options_reach_the_draws(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sample, "sample", lambda *args, **options: calls.append((args, options)))
    words = "--tokens 7 --samples 3 --temperature 0.5 --top-k 4 --top-p 0.25 --seed 9"
    words = f"--prompt a --prompt b {words} --past-context refuse --no-stop"
    sample.main([str(tmp_path), *words.split()])
    sample.main([str(tmp_path)])
    draws = {"temperature": 0.5, "top_k": 4, "top_p": 0.25, "seed": 9, "past_context": "refuse"}
    default = {"temperature": 0.8, "top_k": None, "top_p": None, "seed": 0, "past_context": "slide"}
    assert calls == [
        ((tmp_path, ["a", "b"], 7), {"samples": 3, "stop": False, **draws}),
        ((tmp_path, [""], 200), {"samples": 1, "stop": True, **default}),
    ]


def test_a_cpu_computes_in_float32(run, monkeypatch):
    run("run.dtype=bfloat16", "optim.max_steps=1", "optim.warmup_steps=0")
    dtypes = []

    def record(dtype, device):
        dtypes.append(dtype)
        return autocast(dtype, device)

    monkeypatch.setattr(sample, "autocast", record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sample.main([str(run.out_dir), "--tokens", "1"])
    assert dtypes == ["float32"]


def test_run_trained_with_our_kernels_on_a_machine_without_a_gpu(run, capsys, monkeypatch):
    run("optim.max_steps=1", "optim.warmup_steps=0")
    arguments = [str(run.out_dir), "--prompt", "the cat", "--tokens", "5", "--temperature", "0"]
    config = run.out_dir / "config.yaml"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("kernels.triton._INTERPRETED", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    capsys.readouterr()
    sample.main(arguments)
    expected = capsys.readouterr().out
    config.write_text(config.read_text().replace("attention: auto", "attention: triton"))
    assert sample.open_run(run.out_dir).config.model.attention == "triton"
    sample.main(arguments)
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("attention", "interpret", "taken"),
    [("triton", "0", "auto"), ("triton", "1", "triton"), ("reference", "0", "reference")],
)
def test_attention_without_kernels(opened, monkeypatch, attention, interpret, taken):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    run = sample.without_kernels(opened("run", f"model.attention={attention}"))
    assert run.config.model.attention == taken


def test_nothing_is_printed_where_an_option_is_refused(run, capsys):
    run()
    folder = run.out_dir
    capsys.readouterr()
    with pytest.raises(ValueError, match="top_k=0 must lie"):
        sample.main([str(folder), "--prompt", "some text", "--top-k", "0"])
    with pytest.raises(ValueError, match=r"--prompt='a\\udcff' is not UTF-8"):
        sample.main([str(folder), "--prompt", "a\udcff"])
    assert capsys.readouterr().out == ""


def test_no_samples(untrained):
    with pytest.raises(ValueError, match="samples=0 must be at least 1"):
        continuations(untrained, ["a"], 3, samples=0)


def test_run_outlives_its_data(run, corpus, tmp_path, capsys):
    run()
    (run.out_dir / "config.yaml").write_text(
        (run.out_dir / "config.yaml").read_text().replace(str(corpus), str(tmp_path / "gone"))
    )
    sample.main([str(run.out_dir), "--prompt", "the cat", "--tokens", "3"])
    assert "the cat" in capsys.readouterr().out


def test_run_without_its_tokenizer(run):
    run()
    (run.out_dir / "tokenizer.json").unlink()
    with pytest.raises(SystemExit, match=r"error: Tokenizer '.*tokenizer.json' must be"):  # noqa: SIM117
        with errors_as_sentences():
            sample.main([str(run.out_dir)])


def test_run_without_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet: train it first"):
        sample.main([str(tmp_path)])
