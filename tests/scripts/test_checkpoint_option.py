"""Option --checkpoint of the commands that open a run."""

import pytest
from safetensors.torch import load_file

from evaluation.runs import open_run
from scripts import evaluate, export_hf, passkey, repeats, sample
from training.checkpoint.folders import checkpoint_folder
from training.language.task import LanguageTask
from training.metrics import Record

LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0}
COMMANDS = [
    (sample, "scripts.sample"),
    (passkey, "evaluation.prompts"),
    (repeats, "evaluation.prompts"),
    (evaluate, "evaluation.evaluate"),
]


@pytest.fixture(scope="module")
def trained(make_run, tmp_path_factory):
    """Run whose best checkpoint is at step 4 and whose newest is at step 8."""
    run = make_run(tmp_path_factory.mktemp("trained"))

    def validate(self, model, step, stop):
        return Record("", {"val_loss": LOSSES[step]})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageTask, "validate", validate)
        run("run.save_every=2", "run.eval_every=2", "run.keep_last=1")
    return run.out_dir


class Opened(Exception):  # noqa: N818
    """Raised with the checkpoint instead of opening it."""


@pytest.mark.parametrize(("command", "module"), COMMANDS)
def test_a_command_opens_the_chosen_checkpoint(trained, command, module, monkeypatch):
    def fake_open_run(folder, checkpoint):
        raise Opened(checkpoint)

    monkeypatch.setattr(f"{module}.open_run", fake_open_run)
    for options, step in (([], 8), (["--checkpoint", "best"], 4), (["--checkpoint", "8"], 8)):
        with pytest.raises(Opened) as opened:
            command.main([str(trained), *options])
        assert opened.value.args[0] == checkpoint_folder(trained, step)
    with pytest.raises(FileNotFoundError, match="has no checkpoint 6: it has step_00000004, step"):
        command.main([str(trained), "--checkpoint", "6"])


def test_exports_the_best_checkpoint(trained, tmp_path):
    export_hf.main([str(trained), str(tmp_path / "hf"), "--checkpoint", "best"])
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    run = open_run(trained, checkpoint_folder(trained, 4))
    expected = run.model.state_dict()["pos_emb.weight"]
    assert (tensors["transformer.wpe.weight"] == expected).all()
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| trained | 4 steps" in card and "| validation loss | 1.0000" in card
