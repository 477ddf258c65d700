"""Model card: the README.md exported alongside the weights of a model."""

import json
from pathlib import Path
from textwrap import indent

from configs.reader import to_yaml
from evaluation.markdown import escape, markdown_table
from evaluation.runs import Run, describe
from evaluation.summary import unfinished

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- papilio
- long-context
---
"""


def early_note(run: Run, name: str) -> str:
    """Sentences that say if the run was not trained to the end, and up to which context; or ""."""
    config = run.config
    progress = {"step": run.progress.step, "max_steps": config.optim.max_steps}
    sentences = unfinished([{"label": name, **progress}])
    if run.trained_context < config.model.context_length:
        sentences.append(
            f"The longest context in training was {run.trained_context:,} of "
            f"{config.model.context_length:,} tokens (model.context_schedule)."
        )
    return " ".join(sentences)


def model_card(run: Run, name: str, architecture: str) -> str:
    """Write a model card in Markdown, with the metadata that the Hugging Face hub reads.

    Local paths are left out.

    Args:
        run: the trained model.
        name: name of the model, for example of its repository on the hub.
        architecture: transformers class that runs the model.
    """
    config = run.config.model
    evaluations = [e for e in describe(run)["evaluations"] if e["step"] == run.progress.step]
    facts = {
        "parameters": f"{run.model.n_params():,}",
        "context": f"{config.context_length:,} tokens",
        "positions": config.positions,
        "tokenizer": f"{Path(run.tokenizer.name).name}, {run.tokenizer.vocab_size:,} entries",
    }
    if run.trained_context < config.context_length:
        facts["context"] += f", of which {run.trained_context:,} were trained"
    if run.progress.step > 0:
        facts["trained"] = f"{run.progress.step:,} steps, {run.progress.tokens:,} tokens"
    if run.text_tokens is not None:
        facts["training text"] = f"{run.text_tokens:,} tokens"
    if run.config.run.init_from is not None:
        facts["initialized from"] = "the weights of another run"
    if evaluations:
        loss = evaluations[-1]["val_loss"]
        facts["validation loss"] = (
            f"{loss:.4f} nats per token, with {config.context_length:,} tokens of context"
        )
    settings: dict[str, object] = {"model": config}
    if run.progress.step > 0:
        settings["optim"] = run.config.optim
    origin = "trained with Papilio" if run.progress.step > 0 else "imported into Papilio as it was"
    yaml = "".join(f"{key}:\n{indent(to_yaml(part), '  ')}" for key, part in settings.items())
    note = early_note(run, escape(name))
    early = f"\n{note}\n" if note else ""
    quoted = json.dumps(name)  # a JSON string is a valid Python literal
    return f"""{_HEAD}
# {escape(name)}

A language model {origin}, run by transformers' `{architecture}`. It continues text and
was not trained to follow instructions.
{early}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({quoted})
model = AutoModelForCausalLM.from_pretrained({quoted})
tokens = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))
```

{markdown_table(("", ""), ((key, escape(fact)) for key, fact in facts.items()))}
The author has to add what is missing here about the training text and the licence.

## {"How it was trained" if run.progress.step > 0 else "Its configuration"}

```yaml
{yaml}```
"""
