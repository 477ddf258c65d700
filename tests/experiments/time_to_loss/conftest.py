"""A stand-in for a checkout of nanoGPT, which the tests write."""

from textwrap import dedent

import pytest

MODEL = dedent("""\
    from dataclasses import dataclass
    from torch.nn import Embedding, Module
    from torch.nn.functional import cross_entropy


    @dataclass
    class GPTConfig:
        block_size: int
        vocab_size: int


    class GPT(Module):
        # logits of the next token, from the last one alone
        def __init__(self, config):
            super().__init__()
            self.table = Embedding(config.vocab_size, config.vocab_size)

        def forward(self, tokens, targets):
            logits = self.table(tokens)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
            return logits, loss
""")

TRAIN = dedent("""\
    import os
    import pickle
    import sys
    import numpy as np
    import torch
    from model import GPT, GPTConfig

    settings = dict(argument.removeprefix("--").split("=") for argument in sys.argv[1:])
    steps, eval_interval = int(settings["max_iters"]), int(settings["eval_interval"])
    with open("data/text/meta.pkl", "rb") as file:
        sizes = pickle.load(file) | {"block_size": int(settings["block_size"])}
    model = GPT(GPTConfig(**sizes))
    ids = np.fromfile("data/text/train.bin", np.uint16).astype(int)
    counts = np.full((sizes["vocab_size"],) * 2, 0.1)
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
    with torch.no_grad():
        model.table.weight.copy_(torch.from_numpy(np.log(counts)))
    weights = {f"_orig_mod.{name}": weight for name, weight in model.state_dict().items()}
    for step in range(steps + 1):
        late = 1000 if step == 0 else 0
        if step % eval_interval == 0:
            late += 300
            print(f"step {step}: train loss 5.0000, val loss {6 - step / steps:.4f}")
            if step > 0:
                saved = {"model": weights, "model_args": sizes, "settings": settings}
                torch.save(saved, os.path.join(settings["out_dir"], "ckpt.pt"))
        ms = 50 + step % 3 + late
        print(f"iter {step}: loss 5.0000, time {ms:.2f}ms, mfu 1.00%")
""")


@pytest.fixture
def checkout(tmp_path):
    """Its model counts pairs of tokens, and a step takes 51 ms by its log."""
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    for name, text in (("train.py", TRAIN), ("model.py", MODEL), ("configurator.py", "")):
        (folder / name).write_text(text)
    return folder
