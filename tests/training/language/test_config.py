"""GPT settings that come from the prepared data, and combinations that are refused."""

import json

import pytest

from training.language.config import load_config

QUICKSTART = "configs/quickstart.yaml"


@pytest.fixture
def entries(corpus):
    """Number of entries in the corpus's tokenizer."""
    return json.loads((corpus / "manifest.json").read_text())["tokenizer"]["vocab_size"]


def vocab_size(*arguments):
    return load_config([*map(str, arguments)]).model.vocab_size


def test_vocab_size_comes_from_the_data(corpus, entries):
    assert vocab_size(QUICKSTART, f"data.path={corpus}") == entries


def test_a_given_vocab_size_is_kept(corpus, tmp_path):
    assert vocab_size(QUICKSTART, f"data.path={corpus}", "model.vocab_size=9") == 9
    (tmp_path / "manifest.json").write_text("damaged, and not read")
    assert vocab_size(QUICKSTART, f"data.path={tmp_path}", "model.vocab_size=9") == 9


def test_missing_or_damaged_data_is_refused(tmp_path):
    config = load_config([QUICKSTART, f"data.path={tmp_path / 'none'}"])
    assert config.model.vocab_size == 50_257
    with pytest.raises(FileNotFoundError) as error:
        config.check_prepared()
    assert str(error.value) == (
        f"data.path={tmp_path / 'none'} does not exist; create it from text files, or folders of "
        f"them, with: python -m scripts.prepare_text TEXT... --out {tmp_path / 'none'}"
    )
    with pytest.raises(FileNotFoundError, match=r"holds no manifest.json.* --out "):
        load_config([QUICKSTART, f"data.path={tmp_path}"]).check_prepared()
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        load_config([QUICKSTART, f"data.path={tmp_path}"])


def test_prepared_data_passes_the_check(corpus):
    load_config([QUICKSTART, f"data.path={corpus}"]).check_prepared()


def test_a_missing_data_path_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {}\ndata: {}\nrun: {out_dir: x}\n"
                    "optim: {max_steps: 1, batch_tokens: 1024, micro_batch_size: 1}\n")  # fmt: skip
    with pytest.raises(ValueError, match=r"data.path has no value: set .*m scripts.prepare_text "):
        load_config([str(path)])


def test_a_model_that_must_be_exportable_and_is_not_is_refused():
    modern = ["configs/long_4k.yaml", "run.exportable=true"]
    assert load_config(modern).run.exportable
    message = (
        "run.exportable=true must be false for this model. model.qk_norm=False cannot be exported: "
        "Hugging Face's Qwen3 only .* model.qk_norm=True. Change the model, or remove"
    )
    with pytest.raises(ValueError, match=message):
        load_config([*modern, "model.qk_norm=false"])
    assert not load_config([*modern, "model.qk_norm=false", "run.exportable=false"]).run.exportable
