"""What somebody meant who wrote a key that is no setting."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

OTHER_NAMES = {
    "learning_rate": ["lr"],
    "max_lr": ["lr"],
    "min_learning_rate": ["min_lr"],
    "lr_scheduler": ["schedule"],
    "lr_scheduler_type": ["schedule"],
    "decay_lr": ["schedule"],
    "max_iters": ["max_steps"],
    "num_steps": ["max_steps"],
    "num_train_steps": ["max_steps"],
    "warmup_iters": ["warmup_steps"],
    "warmup_ratio": ["warmup_steps"],
    "beta1": ["betas"],
    "beta2": ["betas"],
    "adam_beta1": ["betas"],
    "adam_beta2": ["betas"],
    "adam_epsilon": ["eps"],
    "max_grad_norm": ["grad_clip"],
    "batch_size": ["micro_batch_size", "batch_tokens"],
    "per_device_train_batch_size": ["micro_batch_size"],
    "total_batch_size": ["batch_tokens", "batch_size"],
    "gradient_accumulation_steps": ["batch_tokens"],
    "accumulate_grad_batches": ["batch_tokens"],
    "block_size": ["context_length"],
    "seq_len": ["context_length"],
    "seq_length": ["context_length"],
    "sequence_length": ["context_length"],
    "max_seq_len": ["context_length"],
    "max_length": ["context_length"],
    "n_ctx": ["context_length"],
    "n_positions": ["context_length"],
    "max_position_embeddings": ["context_length"],
    "num_hidden_layers": ["n_layer"],
    "num_layers": ["n_layer"],
    "depth": ["n_layer"],
    "num_attention_heads": ["n_head"],
    "num_heads": ["n_head"],
    "hidden_size": ["n_embd"],
    "hidden_dim": ["n_embd"],
    "d_model": ["n_embd"],
    "intermediate_size": ["n_inner"],
    "num_labels": ["n_classes"],
    "resid_pdrop": ["dropout"],
    "embd_pdrop": ["dropout"],
    "attn_pdrop": ["attention_dropout"],
    "attn_implementation": ["attention"],
    "rope_theta": ["rope_base"],
    "dataset": ["path"],
    "data_dir": ["path"],
    "output_dir": ["out_dir"],
    "eval_interval": ["eval_every"],
    "eval_steps": ["eval_every"],
    "log_interval": ["log_every"],
    "logging_steps": ["log_every"],
    "save_interval": ["save_every"],
    "save_steps": ["save_every"],
    "always_save_checkpoint": ["save_every"],
    "save_total_limit": ["keep_last"],
    "resume_from_checkpoint": ["resume", "init_from"],
    "bf16": ["dtype"],
    "fp16": ["dtype"],
    "precision": ["dtype"],
    "torch_dtype": ["dtype"],
    "torch_compile": ["compile"],
    "wandb_log": ["wandb"],
    "report_to": ["wandb"],
}
"""What nanoGPT, transformers and Lightning call settings, where ours are called otherwise."""


def refuse(
    key: str,
    known: Collection[str],
    elsewhere: Mapping[str, Collection[str]],
    called: str | None = None,
) -> str:
    """Say that `key` is no setting, and which of the `known` ones was meant.

    Args:
        key: "section.name", as somebody wrote it.
        known: the keys of all settings.
        elsewhere: those of other schemas, by what makes a run one of them: "task=...".
        called: what to call the key, where it must not be printed.
    """
    section, _, name = key.rpartition(".")
    verdict = f"{called or key} is not a setting: "
    known = [k for k in known if ("[]." in k) == ("[]." in key)]  # items of a list for themselves
    if section and (ends := [k for k in known if k.endswith(f".{key}")]):
        return f"{verdict}did you mean {_either(ends)}?"
    if ours := [k for other in OTHER_NAMES.get(name, ()) for k in _named(other, known)]:
        return f"{verdict}did you mean {_either(ours)}?"
    if owned := _named(name, known):
        owners = _either([owner.rpartition(".")[0] or "no section" for owner in owned])
        return f"{verdict if section else ''}{name} is a setting of {owners}: {_either(owned)}"
    for run, keys in elsewhere.items():
        if key in keys:
            return f"{key} is a setting of {run}"
        if there := _named(name, keys):
            return f"{verdict}{_either(there)} is a setting of {run}"
    names = {k.rpartition(".")[2] for k in known}
    near = get_close_matches(key, known, n=1, cutoff=0.8) or [
        k for near in get_close_matches(name, names, n=1, cutoff=0.7) for k in _named(near, known)
    ]
    if near:
        return f"{verdict}did you mean {_either(near)}?"
    inside = [k.removeprefix(f"{section}.") for k in known if k.startswith(f"{section}.")]
    if section and inside:
        return f"{verdict}{section} has {', '.join(inside)}"
    sections = dict.fromkeys(k.partition(".")[0] for k in known)
    return f"{verdict}a configuration has {', '.join(sections)}"


def _named(name: str, keys: Collection[str]) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] == name]


def _either(words: list[str]) -> str:
    return " or ".join(words)
