"""Help lists every setting of a task, and runs of another task are refused."""

import subprocess
import sys

import pytest

from configs.reader import ConfigError, read_config, to_yaml
from configs.settings import settings_of
from evaluation.runs import open_run
from experiments.classifier_runs import read_run_config
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.language.config import TrainConfig
from training.tasks import SCHEMAS, config_of, handle_settings_help, read_run


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def shown(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        handle_settings_help("Train.", arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_setting_has_help_text(schema):
    for setting in settings_of(schema).values():
        assert setting.text and setting.text[-1] == ".", setting.key
        assert "None" not in setting.text, f"{setting.key}: YAML says null"


@pytest.mark.parametrize("argument", ["-h", "--help"])
def test_help_lists_the_settings_of_a_gpt(capsys, argument):
    text = shown(capsys, argument)
    assert text.startswith("usage: train.py CONFIG [key=value ...]\n\nTrain.\n\nSettings of a GPT")
    assert all(f"\n  {key}" in text for key in settings_of(SCHEMAS["language"]))
    assert "\n  optim.lr=0.0006 " in text and "\n  objective" not in text


def test_help_lists_the_settings_of_the_given_file(capsys):
    text = shown(capsys, "configs/lra/image.yaml", "--help", "optim.lr=0.25")
    assert all(f"\n  {key}" in text for key in settings_of(SCHEMAS["classification"]))
    assert "\n  optim.lr=0.25 " in text and "default 0.0006)" in text
    assert "\n  data.path=out/data/lra/image " in text
    with pytest.raises(ConfigError, match="configs/none.yaml is not a file"):
        handle_settings_help("Train.", ["configs/none.yaml", "--help"])


def test_help_inside_a_value_is_not_an_option(capsys):
    handle_settings_help("Train.", ["configs/quickstart.yaml", "run.out_dir=--help"])
    assert capsys.readouterr().out == ""


def test_a_closed_stdout_ends_quietly():
    """A reader such as `head` closes the pipe early, which is not an error."""
    command = [sys.executable, "train.py", "--help"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.fixture
def run_of(tmp_path):
    """Folder with a configuration, and a checkpoint that must not be read."""

    def make(schema, path):
        (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
        (tmp_path / RUN_CONFIG).write_text(to_yaml(read_config(schema, [path])))
        return tmp_path

    return make


def test_opening_a_classifier_run_as_a_gpt_is_refused(run_of):
    run = run_of(ClassifyConfig, "configs/lra/image.yaml")
    assert config_of(run, ClassifyConfig).data.path.endswith("image")
    with pytest.raises(ValueError, match=r"but is one of a classifier \(task=classification\)"):
        open_run(run)


def test_opening_a_gpt_run_as_a_classifier_is_refused(run_of):
    run = run_of(TrainConfig, "configs/quickstart.yaml")
    assert config_of(run, TrainConfig).task == "language"
    with pytest.raises(ValueError, match=r"but is one of a GPT \(task=language\)"):
        read_run_config(run)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config.yaml is not a file"):
        config_of(tmp_path, TrainConfig)


DEEP, LONG = "[" * 2000, "9" * 5000
FOREIGN = {
    "nothing": "",
    "a list": "- s3cr3t",
    "a text": "s3cr3t",
    "a list for a section": "optim: [s3cr3t]",
    "a text for a section": "data: s3cr3t",
    "a key at the top": "s3cr3t: 1",
    "a key in a section": "run: {out_dir: x, of_the_future: s3cr3t}",
    "a wrong type": "optim: {max_steps: s3cr3t}",
    "a wrong choice": "task: s3cr3t",
    "a wrong list": "data: {path: x, mix: [s3cr3t]}",
    "a key twice": "task: language\ntask: s3cr3t",
    "an alias": "task: &a s3cr3t\nmodel: *a",
    "an alias of aliases": "a: &a [s3cr3t]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]",
    "a tag that calls": "task: !!python/object/apply:os.system [s3cr3t]",
    "a tab": "task:\n\ts3cr3t",
    "NUL": "task: s3cr3t\0",
    "Latin-1": "task: s3cr3t \xff",
    "an interpolation": "run: {out_dir: '${oc.env:SECRET}'}",
    "nested deeply": f"task: {DEEP} s3cr3t",
    "a long number": f"optim: {{max_steps: {LONG}}} # s3cr3t",
    "two documents": "task: language\n---\ns3cr3t",
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_errors_in_a_foreign_configuration_quote_nothing(tmp_path, monkeypatch, text):
    """The error quotes no values of the file, of a file it links to, or of our environment."""
    monkeypatch.setenv("SECRET", "s3cr3t")
    (tmp_path / "private").write_bytes(text.encode("latin-1"))
    path = tmp_path / RUN_CONFIG
    path.symlink_to(tmp_path / "private")
    for take in (lambda: config_of(tmp_path, TrainConfig), lambda: read_run([str(path)])):
        with pytest.raises(ConfigError, match=str(path)) as error:
            take()
        assert "s3cr3t" not in str(error.value)
