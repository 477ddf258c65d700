import re
from itertools import chain

import pytest

from configs.settings import settings_of
from configs.suggestions import OTHER_NAMES, unknown_key_message
from training.classification.config import ClassifyConfig
from training.language.config import TrainConfig

GPT = settings_of(TrainConfig)
CLASSIFIER = settings_of(ClassifyConfig)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("model.n_layers", "model.n_layers is not a setting: did you mean model.n_layer?"),
        ("optim.learning_rate", "optim.learning_rate is not a setting: did you mean optim.lr?"),
        ("learning_rate", "learning_rate is not a setting: did you mean optim.lr?"),
        ("model.block_size", "model.block_size is not a setting: did you mean model.context_len"),
        ("mask.block_size", "mask.block_size is not a setting: did you mean model.mask.block_size"),
        ("model.mask.window", "model.mask.window is not .* did you mean model.mask.window_blocks"),
        ("batch_size", "did you mean optim.micro_batch_size or optim.batch_tokens"),
        ("model.lr", "model.lr is not a setting: lr is a setting of optim: optim.lr$"),
        ("lr", "^lr is a setting of optim: optim.lr$"),
        ("optimizer.lr", "optimizer.lr is not a setting: lr is a setting of optim: optim.lr$"),
        ("pattern", "^pattern is a setting of model.mask: model.mask.pattern$"),
        ("objective", "^objective is a setting of task=classification$"),
        ("data.phases", "^data.phases is a setting of task=classification$"),
        ("grid_width", "not a setting: model.grid_width is a setting of task=classification$"),
        (
            "data.inertia",
            "not a setting: data has path, weight, mix, document_mask, align, consecutive_windows$",
        ),
        (
            "teacher.forcing",
            "not a setting: a configuration has task, model, data, optim, parallel, run$",
        ),
    ],
)
def test_suggestions(key, sentence):
    assert re.search(sentence, unknown_key_message(key, GPT, {"task=classification": CLASSIFIER}))


def test_suggestions_across_tasks():
    others = {"task=language": GPT}
    assert "mean optim.batch_size?" in unknown_key_message(
        "optim.total_batch_size", CLASSIFIER, others
    )
    assert unknown_key_message("optim.batch_tokens", CLASSIFIER, others) == (
        "optim.batch_tokens is a setting of task=language"
    )
    assert unknown_key_message("objectiv", CLASSIFIER, others).endswith("did you mean objective?")


def test_other_names_lead_to_settings():
    ours = {key.rpartition(".")[2] for key in {*GPT, *CLASSIFIER}}
    assert OTHER_NAMES.keys() <= ours
    # only one setting of a GPT is also listed as another name, with a different meaning
    others = set(chain(*OTHER_NAMES.values()))
    assert {key.rpartition(".")[2] for key in GPT} & others == {"block_size"}
