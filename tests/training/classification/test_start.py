"""Initial weights of runs that predict labels or tokens, and the settings a resume must share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.reader import read_config
from model.classifier import Classifier
from model.token_predictor import TokenPredictor
from tests.experiments.tiny_lra import TINY, make_tasks
from training.classification.config import ClassifyConfig
from training.classification.scoring import save_best
from training.classification.start import AnyModel, load_initial_weights, make_model, must_match

OBJECTIVES = ("labels", "masked", "causal")


def made(*overrides: str, seed: int = 0, objective: str = "labels") -> Any:
    torch.manual_seed(seed)
    arguments = ["configs/lra/image.yaml", *TINY, f"objective={objective}", *overrides]
    return make_model(read_config(ClassifyConfig, arguments))


def kept(folder: Path, model: AnyModel) -> Path:
    folder.mkdir()
    save_best(folder, model, 3, 0.5)
    return folder


def same(one: torch.nn.Module, other: torch.nn.Module, *, but: tuple[str, ...] = ()) -> bool:
    these, those = one.state_dict(), other.state_dict()
    assert these.keys() == those.keys()
    return all(torch.equal(these[x], those[x]) for x in these if not x.startswith(but or " "))


def test_objectives_have_their_models():
    assert isinstance(made(), Classifier)
    masked, causal = (made(objective=name) for name in ("masked", "causal"))
    assert isinstance(masked, TokenPredictor) and masked.mask_token is not None
    assert isinstance(causal, TokenPredictor) and causal.mask_token is None


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_same_objective_takes_all(tmp_path: Path, objective: str, pooling: str):
    first, second = (
        made(f"model.pooling={pooling}", seed=seed, objective=objective) for seed in (1, 2)
    )
    assert not same(first, second)
    load_initial_weights(kept(tmp_path / "run", first), second)
    assert same(first, second)


@pytest.mark.parametrize("objective", OBJECTIVES[1:])
def test_labels_take_all_but_the_head_from_tokens(tmp_path: Path, objective: str):
    """Whatever the head of either: classes, documents and kind of pooling may differ."""
    head = ("head_in", "head_out")
    first = made("model.pooling=max", "model.n_classes=2", seed=1, objective=objective)
    second, drawn = (made("model.pooling=mean_max", seed=2) for _ in range(2))
    load_initial_weights(kept(tmp_path / "run", first), second)
    assert same(second.head_in, drawn.head_in) and same(second.head_out, drawn.head_out)
    for name, weight in first.classifier.state_dict().items():
        assert name.startswith(head) or torch.equal(second.state_dict()[name], weight)
    assert all(p.requires_grad for p in second.parameters())


@pytest.mark.parametrize("objectives", [("masked", "labels"), ("masked", "masked")])
def test_learned_positions_of_tokens_grow_gridwise(tmp_path: Path, objectives: tuple[str, str]):
    first, second = made(seed=1, objective=objectives[0]), made(
        "model.grid_width=16", "model.context_length=256", seed=2, objective=objectives[1]
    )  # fmt: skip
    load_initial_weights(kept(tmp_path / "run", first), second)
    grown = second.pos_emb if objectives[1] == "labels" else second.classifier.pos_emb
    small = first.classifier.pos_emb.view(8, 8, -1)
    assert torch.equal(grown.view(16, 16, -1)[::2, 1::2], small)


@pytest.mark.parametrize(
    ("first", "second", "overrides", "differing"),
    [
        ("masked", "labels", ["model.n_inner=8"], r"blocks.0.mlp.fc_in.weight"),
        ("causal", "labels", ["model.n_layer=2"], r"blocks.1.attn"),
        ("masked", "labels", ["model.pooling=cls"], r"cls differ"),
        ("masked", "masked", ["model.vocab_size=300"], r"tok_emb.weight"),
        ("masked", "causal", [], r"mask_token differ"),
        ("labels", "masked", [], r"tok_emb.weight, tokens_out.bias, tokens_out.weight differ"),
        ("labels", "labels", ["model.n_classes=3"], r"head_out.bias, head_out.weight differ"),
    ],
)
def test_all_else_is_strict(
    tmp_path: Path, first: str, second: str, overrides: list[str], differing: str
):
    run = kept(tmp_path / "run", made(objective=first))
    with pytest.raises(ValueError, match=rf"has another model: .*{differing}") as error:
        load_initial_weights(run, made(*overrides, objective=second))
    assert "its objective unless this run has objective=labels" in str(error.value)


def test_a_gpt_gives_no_weights(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(Path("configs/quickstart.yaml").read_text())
    with pytest.raises(ValueError, match="but is one of a GPT"):
        load_initial_weights(tmp_path, made())


def test_a_checkpoint_is_of_one_objective(tmp_path: Path):
    data = make_tasks(tmp_path, "image") / "image"

    def settings(*overrides: str) -> dict[str, Any]:
        arguments = ["configs/lra/image.yaml", *TINY, f"data.path={data}", *overrides]
        return must_match(read_config(ClassifyConfig, arguments))

    labels, masked = settings(), settings("objective=masked")
    assert {k for k in labels if labels[k] != masked[k]} == {"objective"}
    other = settings("objective=masked", "hidden_share=0.25")
    assert {k for k in other if other[k] != masked[k]} == {"hidden_share"}
