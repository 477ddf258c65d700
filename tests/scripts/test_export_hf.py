import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import RepoUrl
from safetensors import SafetensorError
from safetensors.torch import load_file

from evaluation.runs import open_run
from model.generate import generate
from scripts import export_hf, import_hf


@pytest.fixture(scope="module")
def imported(gpt2_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "run"
    import_hf.main([str(gpt2_folder), "--out", str(out)])
    return out


def test_transformers_loads_the_export(imported, tmp_path):
    from transformers import AutoTokenizer, GPT2LMHeadModel, GPT2TokenizerFast

    folder = tmp_path / "new" / "hf"
    export_hf.main([str(imported), str(folder)])
    theirs, report = GPT2LMHeadModel.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem]
    run = open_run(imported)
    vocab_size = run.config.model.vocab_size
    tokens = torch.randint(vocab_size, (2, 33))
    with torch.no_grad():
        logits = theirs.eval()(tokens).logits
        torch.testing.assert_close(run.model(tokens), logits, rtol=1e-4, atol=1e-4)
    assert theirs.config.eos_token_id == run.tokenizer.eot_id

    text = "the cat sees naïve 東京 🦋,\n\n  a dog's 42"
    for tokenizer in (
        AutoTokenizer.from_pretrained(folder),
        GPT2TokenizerFast.from_pretrained(folder),
    ):
        assert tokenizer(text)["input_ids"] == run.tokenizer.encode(text)
        assert tokenizer.decode(run.tokenizer.encode(text)) == text
        assert tokenizer.eos_token_id == run.tokenizer.eot_id
        assert tokenizer.model_max_length == 40


def test_round_trips_are_exact(gpt2_folder, imported, tmp_path):
    export_hf.main([str(imported), str(tmp_path / "hf")])
    expected = load_file(gpt2_folder / "model.safetensors")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())

    import_hf.main([str(tmp_path / "hf"), "--out", str(tmp_path / "run")])
    again, before = open_run(tmp_path / "run"), open_run(imported)
    assert again.config.model == before.config.model
    assert again.tokenizer.sha256 == before.tokenizer.sha256
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(gpt2_folder, imported, tmp_path, dtype):
    export_hf.main([str(imported), str(tmp_path / "hf"), "--dtype", dtype])
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in load_file(gpt2_folder / "model.safetensors").items():
        assert torch.equal(exported[name], tensor.to(getattr(torch, dtype)))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == dtype


def test_the_end_of_text_comes_from_the_tokenizer(imported, tmp_path, monkeypatch):
    run = open_run(imported)
    # in GPT-2, the end of text is the last id
    other = SimpleNamespace(
        eot_id=7,
        to_library_json=run.tokenizer.to_library_json,
        end_of_text="<end>",
        name="other",
        vocab_size=9,
    )
    monkeypatch.setattr(export_hf, "open_run", lambda *_: replace(run, tokenizer=other))
    export_hf.main([str(imported), str(tmp_path / "hf")])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (7, 7)
    config = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<end>"


def test_a_failed_export_leaves_no_folder(imported, tmp_path, monkeypatch):
    def disk_full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("scripts.export_hf.save_file", disk_full)
        message = rf"^{tmp_path}/hf could not be .*No space left on device\): make room on"
        with pytest.raises(OSError, match=message):
            export_hf.main([str(imported), str(tmp_path / "hf")])
    assert not (tmp_path / "hf").exists()
    export_hf.main([str(imported), str(tmp_path / "hf")])
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_export_through_a_link(imported, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    export_hf.main([str(imported), str(tmp_path / "link")])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "link"]


def test_invalid_exports_are_refused(imported, run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for out in (imported, tmp_path / "file"):
        with pytest.raises(ValueError, match="is not an empty folder: choose a folder that does"):
            export_hf.main([str(imported), str(out)])
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        export_hf.main([str(tmp_path), str(tmp_path / "hf")])
    run("model.mask.pattern=butterfly", "optim.max_steps=1", "optim.warmup_steps=0")
    with pytest.raises(ValueError, match="model.mask.pattern=butterfly cannot be exported"):
        export_hf.main([str(run.out_dir), str(tmp_path / "hf")])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="is the current folder: pass a new one"):
        export_hf.main([str(imported), "."])
    assert not (tmp_path / "hf").exists() and not list((tmp_path / "empty").iterdir())


MODERN = [
    *("model.norm=rms_norm", "model.mlp=swiglu", "model.n_head=4", "model.n_kv_head=2"),
    *("model.dropout=0", "model.bias=false"),
]
WINDOWS = ["model.qk_norm=true", "model.window_size=5", "model.full_every=2"]


@pytest.mark.parametrize(
    ("options", "model_type", "architecture"),
    [
        ([], "gpt_neox", "GPTNeoXForCausalLM"),
        (MODERN, "llama", "LlamaForCausalLM"),
        ([*MODERN, *WINDOWS], "qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_a_rotary_run_is_exported(run, tmp_path, options, model_type, architecture):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rotary = ["model.positions=rotary", "model.rope_scaling=linear", "model.rope_factor=2"]
    run(*rotary, *options, "optim.max_steps=2", "optim.warmup_steps=0")
    export_hf.main([str(run.out_dir), str(tmp_path / "hf")])
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert theirs.config.model_type == model_type
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem]
    ours = open_run(run.out_dir)
    tokens = torch.tensor([ours.tokenizer.encode("the cat sat on the mat")])
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == ours.tokenizer.eot_id
    with torch.no_grad():
        logits = theirs.eval()(tokens).logits
        torch.testing.assert_close(ours.model(tokens), logits, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    generated = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert generated.tolist() == generate(ours.model, tokens, 9, temperature=0.0).tolist()

    import_hf.main([str(tmp_path / "hf"), "--out", str(tmp_path / "back")])
    back = open_run(tmp_path / "back")
    assert replace(back.config.model, dropout=0.1) == replace(ours.config.model, dropout=0.1)
    for name, tensor in ours.model.state_dict().items():
        assert torch.equal(back.model.state_dict()[name], tensor)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"`{architecture}`" in card and "| trained | 2 steps" in card
    assert "| validation loss |" in card and "rope_scaling: linear" in card
    assert str(tmp_path) not in card
    export_hf.main([str(tmp_path / "back"), str(tmp_path / "twice")])
    assert "| trained |" not in (tmp_path / "twice" / "README.md").read_text()


def test_an_unfinished_run_is_exported_as_such(run, tmp_path, capsys):
    """Steps 0 to 3 have a context of 8 tokens, and 4 to 7 one of 32."""
    schedule = "model.context_schedule=[[8,0.5],[32,0.5]]"
    run("model.positions=rotary", schedule, "run.save_every=1", "run.keep_last=9")

    def export(step):
        capsys.readouterr()
        folder = tmp_path / f"hf{step}"
        export_hf.main([str(run.out_dir), str(folder), "--checkpoint", str(step)])
        return capsys.readouterr().out, (folder / "README.md").read_text()

    early = "Not trained to the end: {} (step 4 of 8). The longest context in training was 8 of 32 "
    printed, card = export(4)
    assert early.format("run") in printed.splitlines()[0]
    assert f"\n\n{early.format('hf4')}" in card and str(tmp_path) not in card
    assert "| context | 32 tokens, of which 8 were trained |" in card
    assert "nats per token, with 32 tokens of context |" in card

    printed, card = export(5)  # one step with the longest context
    assert printed.splitlines()[0] == "Not trained to the end: run (step 5 of 8)."
    assert "\nNot trained to the end: hf5 (step 5 of 8).\n" in card
    assert "| context | 32 tokens |" in card

    printed, card = export(8)
    assert printed == f"wrote {tmp_path / 'hf8'}\n" and "Not trained" not in card
    assert "instructions.\n\n```python" in card


@pytest.mark.slow
def test_lm_eval_scores_the_export(run, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    run("model.positions=rotary", *MODERN, *WINDOWS, "optim.max_steps=2", "optim.warmup_steps=0")
    export_hf.main([str(run.out_dir), str(tmp_path / "hf")])
    lm = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32")
    context, continuation = "a dog follows", " one bird. the cat hears a dog."
    request = Instance("loglikelihood", {}, (context, continuation), 0)
    [(log_likelihood, _)] = lm.loglikelihood([request], disable_tqdm=True)

    ours = open_run(run.out_dir)
    tokens = torch.tensor([ours.tokenizer.encode(context + continuation)])
    n_context = len(ours.tokenizer.encode(context))
    targets = tokens[:, n_context:]
    with torch.no_grad():
        expected = -ours.model(tokens[:, :-1], targets, reduction="sum").item()
    assert log_likelihood == pytest.approx(expected, abs=1e-4)


class Hub:
    """Fake hub that records created repositories and copies uploads."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.made, self.files = error, [], {}

    def create_repo(self, name, *, private, exist_ok):
        if self.error:
            raise self.error
        self.made.append((name, private, exist_ok))
        return RepoUrl(f"https://huggingface.co/{name}")

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.files = {path.name: path.read_bytes() for path in folder_path.iterdir()}
        assert repo_id == self.made[0][0] and commit_message


def test_push_to_the_hub(imported, tmp_path, monkeypatch, capsys):
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    export_hf.main([str(imported), str(tmp_path / "hf"), "--push-to-hub", "me/tiny", "--private"])
    assert hub.made == [("me/tiny", True, True)]
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert b'from_pretrained("me/tiny")' in hub.files["README.md"]
    assert "uploaded to https://huggingface.co/me/tiny" in capsys.readouterr().out


def test_a_failed_upload_keeps_the_export(imported, tmp_path, monkeypatch):
    hub = Hub(OSError("Token is required,\nbut no token found."))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    with pytest.raises(ValueError, match=r"but no token found\).*hf auth login"):
        export_hf.main([str(imported), str(tmp_path / "hf"), "--push-to-hub", "me/tiny"])
    assert (tmp_path / "hf" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="Repo id must"):
        export_hf.main([str(imported), str(tmp_path / "no"), "--push-to-hub", "me/not/tiny"])
    assert not (tmp_path / "no").exists()
    with pytest.raises(SystemExit):
        export_hf.main([str(imported), str(tmp_path / "no"), "--private"])
