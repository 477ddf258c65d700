"""Runs of one task where those of the other are needed."""

import pytest

from configs.reader import ConfigError, read_config, to_yaml
from evaluation.runs import open_run
from experiments.classifier_runs import read_run_config
from training.classification.config import ClassifyConfig
from training.config import RUN_CONFIG
from training.language.config import TrainConfig
from training.tasks import config_of


@pytest.fixture
def run_of(tmp_path):
    """A folder with a configuration, and a checkpoint that nobody should come to read."""

    def make(schema, path):
        (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
        (tmp_path / RUN_CONFIG).write_text(to_yaml(read_config(schema, [path])))
        return tmp_path

    return make


def test_a_classifier_is_named_as_such(run_of):
    run = run_of(ClassifyConfig, "configs/lra/image.yaml")
    assert config_of(run, ClassifyConfig).data.path.endswith("image")
    with pytest.raises(ValueError, match=r"is a run of a classifier \(task: classification\)"):
        open_run(run)


def test_a_gpt_is_named_as_such(run_of):
    run = run_of(TrainConfig, "configs/quickstart.yaml")
    assert config_of(run, TrainConfig).task == "language"
    with pytest.raises(ValueError, match=r"is a run of a GPT \(task: language\)"):
        read_run_config(run)


def test_a_folder_of_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"config.yaml is not a file"):
        config_of(tmp_path, TrainConfig)
