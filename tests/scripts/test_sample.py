import pytest

from configs.command_line import errors_as_sentences
from scripts import sample


def test_continues_the_prompt_from_the_newest_checkpoint(run, capsys):
    run()
    arguments = [str(run.out_dir), "--prompt", "the cat", "--tokens", "20"]
    sample.main(arguments)
    text = capsys.readouterr().out.splitlines()[-1]
    assert text.startswith("the cat")
    assert len(text) > len("the cat")


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
