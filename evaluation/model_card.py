"""What a model that leaves the project says of itself: the README.md beside its weights."""

import json
from pathlib import Path
from textwrap import indent

from configs.reader import to_yaml
from evaluation.markdown import escape, markdown_table
from evaluation.runs import Run, describe

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- papilio
- long-context
---
"""


def model_card(run: Run, name: str, architecture: str) -> str:
    """In Markdown, with the metadata that the Hugging Face hub reads.

    Folders of this machine are left out.

    Args:
        run: what was trained.
        name: what the model is called, of the hub's repository for example.
        architecture: of transformers, that computes it.
    """
    config, told = run.config.model, describe(run)
    here = [e for e in told["evaluations"] if e["step"] == run.progress.step]
    facts = {
        "parameters": f"{run.model.n_params():,}",
        "context": f"{config.context_length:,} tokens",
        "positions": config.positions,
        "tokenizer": f"{Path(run.tokenizer.name).name}, {run.tokenizer.vocab_size:,} entries",
    }
    if run.progress.step > 0:
        facts["trained"] = f"{run.progress.step:,} steps, {run.progress.tokens:,} tokens"
    if run.text_tokens is not None:
        facts["of a text of"] = f"{run.text_tokens:,} tokens"
    if run.config.run.init_from is not None:
        facts["began with"] = "the weights of another run"
    if here:
        facts["validation loss"] = f"{here[-1]['val_loss']:.4f} nats a token, at its own context"
    settings = {"model": config, "optim": run.config.optim}
    yaml = "".join(f"{key}:\n{indent(to_yaml(part), '  ')}" for key, part in settings.items())
    quoted = json.dumps(name)  # as Python takes it, too
    return f"""{_HEAD}
# {escape(name)}

A language model trained with Papilio, computed by transformers' `{architecture}`. It continues
text; it was not taught to follow instructions.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({quoted})
model = AutoModelForCausalLM.from_pretrained({quoted})
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))
```

{markdown_table(("", ""), ((key, escape(fact)) for key, fact in facts.items()))}
What is not said here, of the text it was trained on and of its licence, its author has to add.

## How it was trained

```yaml
{yaml}```
"""
