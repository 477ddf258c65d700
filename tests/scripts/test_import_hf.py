import json
import shutil

import pytest
import torch

import train
from data.text.tokenizer import load_tokenizer, train_tokenizer
from evaluation.runs import open_run
from scripts import import_hf, sample
from training.command_line import user_errors_as_messages
from training.config import RUN_CONFIG


@pytest.fixture
def folder(gpt2_folder, tmp_path):
    """Copy of the folder to modify."""
    return shutil.copytree(gpt2_folder, tmp_path / "hf")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def import_to(out, folder, *options):
    import_hf.main([str(folder), "--out", str(out), *options])


def test_run_gives_the_logits_of_transformers(gpt2, gpt2_folder, out, capsys):
    import_to(out, gpt2_folder)
    run = open_run(out)
    tokens = torch.randint(gpt2.config.vocab_size, (2, 33))
    with torch.no_grad():
        expected = gpt2(tokens).logits
        torch.testing.assert_close(run.model(tokens), expected, rtol=1e-4, atol=1e-4)
    assert run.progress.step == 0
    assert run.tokenizer.sha256 == load_tokenizer(str(gpt2_folder)).sha256
    assert (run.config.model.dropout, run.config.model.attention_dropout) == (0.1, 0.0)
    assert run.config.data.path == "out/data/openwebtext"
    assert run.config.run.out_dir == str(out)
    sample.main([str(out), "--prompt", "the cat", "--tokens", "3"])
    assert "the cat" in capsys.readouterr().out


def test_training_further_in_the_same_folder_is_refused(gpt2_folder, corpus, out):
    import_to(out, gpt2_folder, "--data", str(corpus))
    before = (out / "config.yaml").read_bytes()
    arguments = [str(out / "config.yaml"), "run.device=cpu", "run.compile=false"]
    with pytest.raises(SystemExit, match=f"error: .*run.out_dir and set run.init_from={out}$"):  # noqa: SIM117
        with user_errors_as_messages():
            train.main(arguments)
    assert (out / "config.yaml").read_bytes() == before


def test_training_further_with_more_ids_than_the_tokenizer_has(
    make_gpt2, corpus, folder, out, tmp_path
):
    make_gpt2(vocab_size=307).save_pretrained(folder)
    import_to(out, folder, "--data", str(corpus))
    train.main(
        [str(out / RUN_CONFIG), "run.device=cpu", "run.compile=false", "optim.max_steps=1",
         "optim.warmup_steps=0", f"run.out_dir={tmp_path / 'on'}", f"run.init_from={out}"]
    )  # fmt: skip
    assert open_run(tmp_path / "on").config.model.vocab_size == 307


def test_a_llama_is_continued_at_a_longer_context(gpt2, corpus, out, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=gpt2.config.vocab_size,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    llama = LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path / "hf")
    shutil.copy(corpus / "tokenizer.json", tmp_path / "hf")
    import_to(out, tmp_path / "hf", "--data", str(corpus))
    tokens = torch.randint(config.vocab_size, (2, 33))
    with torch.no_grad():
        expected = llama(tokens).logits
        torch.testing.assert_close(open_run(out).model(tokens), expected, rtol=1e-4, atol=1e-6)

    longer = [f"run.init_from={out}", f"run.out_dir={tmp_path / 'longer'}"]
    longer += ["model.context_length=64", "model.rope_base=5e5", "optim.batch_tokens=512"]
    cpu = ["run.device=cpu", "run.compile=false", "optim.max_steps=1", "optim.warmup_steps=0"]
    # a learning rate that changes nothing, so that the weights can be compared
    train.main([str(out / RUN_CONFIG), *longer, *cpu, "optim.lr=1e-30"])
    run = open_run(tmp_path / "longer")
    assert (run.config.model.context_length, run.config.model.rope_base) == (64, 500_000.0)
    llama.model.rotary_emb.inv_freq.copy_(5e5 ** (-torch.arange(0, 8, 2) / 8))
    tokens = torch.randint(config.vocab_size, (2, 64))
    with torch.no_grad():
        expected = llama(tokens).logits
        torch.testing.assert_close(run.model(tokens), expected, rtol=1e-4, atol=1e-6)


def shard(folder, gpt2):
    (folder / "model.safetensors").unlink()
    gpt2.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def pickle_with_buffers(folder, gpt2):
    (folder / "model.safetensors").unlink()
    tensors = {k.removeprefix("transformer."): v for k, v in gpt2.state_dict().items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 40, 40).tril().bool()
    torch.save(tensors, folder / "pytorch_model.bin")


@pytest.mark.parametrize("change", [shard, pickle_with_buffers])
def test_other_files_hold_the_same_weights(gpt2, gpt2_folder, folder, tmp_path, change):
    change(folder, gpt2)
    import_to(tmp_path / "a", gpt2_folder)
    import_to(tmp_path / "b", folder)
    expected = open_run(tmp_path / "a").model.state_dict()
    state = open_run(tmp_path / "b").model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_tokenizer_of_two_files(folder, out):
    expected = load_tokenizer(str(folder)).sha256
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    import_to(out, folder)
    assert open_run(out).tokenizer.sha256 == expected


def test_tokenizer_from_elsewhere(gpt2_folder, folder, out, tmp_path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer.*pass --tokenizer FILE"):
        import_to(out, folder)
    large = tmp_path / "large.json"
    words = " ".join(f"{a}{b}{c}" for a in "xyzuv" for b in "klmno" for c in "abcde")
    large.write_text(train_tokenizer([words], 350).to_json(), encoding="utf-8")
    with pytest.raises(ValueError, match=r"has 350 entries and the model vocab_size=\d+: pass"):
        import_to(out, folder, "--tokenizer", str(large))
    import_to(out, folder, "--tokenizer", str(gpt2_folder / "tokenizer.json"))
    assert open_run(out).tokenizer.sha256 == load_tokenizer(str(gpt2_folder)).sha256


def test_a_tokenizer_with_another_end_of_text(folder, out):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with pytest.raises(ValueError, match="--end-of-text: '</s>'"):
        import_to(out, folder)
    import_to(out, folder, "--end-of-text", "</s>")
    assert open_run(out).tokenizer.end_of_text == "</s>"


def test_the_end_of_text_is_the_models_eos_token(folder, out):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))
    config = json.loads((folder / "config.json").read_text())
    (eos,) = [x["id"] for x in json.loads(path.read_text())["added_tokens"]]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    import_to(out, folder)
    assert open_run(out).tokenizer.end_of_text == "</s>"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["manifest.json", "tokenizer.json", "train_00000.bin"], "manifest.json, tokenizer.json"),
        (["config.yaml", "metrics.jsonl", "tokenizer.json"], "config.yaml, metrics.jsonl"),
        (
            ["tokenizer.json"],
            "tokenizer.json",
        ),  # killed imports write config.yaml first
        (["config.yaml", "tokenizer.json", "checkpoints/mine"], "mine"),
    ],
)
def test_existing_files_are_not_overwritten(gpt2_folder, out, names, named):
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    before = contents(out)
    with pytest.raises(ValueError, match=f"--out {out} already has {named}.*: choose a"):
        import_to(out, gpt2_folder)
    assert contents(out) == before


def test_runs_models_and_files_are_not_overwritten(folder, out, tmp_path):
    import_to(out, folder)
    (tmp_path / "file").write_text("mine")
    for target, reason in (
        (out, "already has step_00000000, .*: choose a"),
        (folder, "already has config.json, .*: choose"),
        (tmp_path / "file", "is not a folder: choose"),
    ):
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=f"--out {target} {reason}"):
            import_to(target, folder, "--data", "elsewhere")
        assert contents(tmp_path) == before


def test_a_killed_import_can_be_repeated(gpt2_folder, out, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    out.mkdir()  # an empty folder is also allowed
    with monkeypatch.context() as patched:
        patched.setattr("training.checkpoint.files.save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            import_to(out, gpt2_folder)
    assert [path.name for path in (out / "checkpoints").iterdir()] == [".unfinished_step_00000000"]
    import_to(out, gpt2_folder)
    assert open_run(out).progress.step == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", b"{", r"config.json is damaged \(.*\); download it again"),
        (
            "config.json",
            b"[]",
            r"config.json is damaged \(it holds list, not an object\)",
        ),
        ("model.safetensors", None, "holds no weights: neither model.safetensors"),
        ("model.safetensors", b"short", "cannot be read as safetensors and may be truncated"),
    ],
)
def test_damaged_folder_leaves_no_run(folder, out, name, content, message):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message):
        import_to(out, folder)
    assert not out.exists()


def test_damaged_index(gpt2, folder, out):
    shard(folder, gpt2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = min(index["weight_map"])
    for value, message in (
        ({**index["weight_map"], first: "absent.safetensors"}, "names absent.safetensors, which"),
        ({**index["weight_map"], first: "../x"}, "names ../x, which is not in its folder"),
        (
            {**index["weight_map"], "more": index["weight_map"][first]},
            "about the file of more",
        ),
        (None, "must have a weight_map from tensors to files"),
    ):
        path.write_text(json.dumps({"weight_map": value}))
        with pytest.raises((ValueError, OSError), match=message):
            import_to(out, folder)


def test_invalid_pickles_are_refused(folder, out):
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save({"wte.weight": torch.ones(9)}, path)
    cut_short = path.read_bytes()[:-50]
    torch.save({"wte.weight": print}, path)
    code = path.read_bytes()
    for content in (
        code,
        cut_short,
        b"",
        b"Repository not found",
        b"caf\xe9\nfull\n",
    ):
        path.write_bytes(content)
        message = "must be a PyTorch checkpoint .*download it again"
        with pytest.raises(ValueError, match=message) as refused:
            import_to(out, folder)
        assert "weights_only" not in str(refused.value)
    torch.save({"wte.weight": 3}, path)
    with pytest.raises(ValueError, match="must hold tensors by name and nothing else"):
        import_to(out, folder)


@pytest.fixture
def downloads(gpt2_folder, tmp_path, monkeypatch):
    """Fake a hub that has `gpt2_folder` as "some/gpt2"; returns the requested names."""
    files = []

    def download(name, *, allow_patterns, revision=None):
        if name != "some/gpt2":
            raise ConnectionError("no such\nrepository")
        assert revision == (None if not files else "commit")
        files.append(allow_patterns)
        for pattern in allow_patterns:
            for path in gpt2_folder.glob(pattern):
                (tmp_path / "commit").mkdir(exist_ok=True)
                shutil.copy(path, tmp_path / "commit")
        return str(tmp_path / "commit")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return files


def test_download_from_the_hub(downloads, gpt2_folder, out):
    import_to(out, "some/gpt2")
    assert open_run(out).tokenizer.sha256 == load_tokenizer(str(gpt2_folder)).sha256
    weights, rest = downloads
    assert "model.safetensors" in weights and "tokenizer.json" in rest
    assert "pytorch_model.bin" not in weights + rest  # a copy of the same weights


def test_download_falls_back_to_the_pickle(downloads, monkeypatch, out):
    monkeypatch.setattr("data.hf_folder.WEIGHTS", "absent.safetensors")
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        import_to(out, "some/gpt2")
    assert "pytorch_model.bin" in downloads[1]


def test_a_failed_download_prints_one_sentence(downloads, out, monkeypatch):
    monkeypatch.setattr("data.hub.why_offline", lambda: None)
    message = r"absent/gpt2 is not a local folder.*\(no such repository\)"
    with pytest.raises(ValueError, match=message):
        import_to(out, "absent/gpt2")
