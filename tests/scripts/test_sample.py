import json

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


def test_another_tokenizer_is_refused(run):
    run()
    state = run.out_dir / "checkpoints" / "step_00000008" / "state.json"
    values = json.loads(state.read_text())
    values["must_match"]["tokenizer"] = "0123"
    state.write_text(json.dumps(values))
    with pytest.raises(SystemExit, match="error: the tokenizer in .* was trained with 0123"):  # noqa: SIM117
        with errors_as_sentences():
            sample.main([str(run.out_dir)])


def test_run_without_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet: train it first"):
        sample.main([str(tmp_path)])
