"""Suggestions for unknown keys in a configuration."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from configs.renamed import NEEDS_EARLIER, OF_WEIGHTS, REMOVED

OTHER_NAMES = {
    "lr": ["learning_rate", "max_lr"],
    "min_lr": ["min_learning_rate"],
    "schedule": ["lr_scheduler", "lr_scheduler_type", "decay_lr"],
    "max_steps": ["max_iters", "num_steps", "num_train_steps"],
    "warmup_steps": ["warmup_iters", "warmup_ratio"],
    "betas": ["beta1", "beta2", "adam_beta1", "adam_beta2"],
    "eps": ["adam_epsilon"],
    "grad_clip": ["max_grad_norm"],
    "micro_batch_size": ["batch_size", "per_device_train_batch_size"],
    "batch_tokens": [
        *("batch_size", "total_batch_size"),
        *("gradient_accumulation_steps", "accumulate_grad_batches"),
    ],
    "batch_size": ["total_batch_size"],
    "context_length": [
        *("block_size", "seq_len", "seq_length", "sequence_length", "max_seq_len"),
        *("max_length", "n_ctx", "n_positions", "max_position_embeddings"),
    ],
    "n_layer": ["num_hidden_layers", "num_layers", "depth"],
    "n_head": ["num_attention_heads", "num_heads"],
    "n_embd": ["hidden_size", "hidden_dim", "d_model"],
    "head_size": ["head_dim"],
    "n_inner": ["intermediate_size"],
    "norm_eps": ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"],
    "tie_embeddings": ["tie_word_embeddings"],
    "n_classes": ["num_labels"],
    "dropout": ["resid_pdrop", "embd_pdrop"],
    "attention_dropout": ["attn_pdrop"],
    "attention": ["attn_implementation"],
    "rope_base": ["rope_theta"],
    "rope_scaling": ["rope_type"],
    "context_schedule": ["max_seq_len_schedule", "seq_len_schedule", "curriculum"],
    "path": ["dataset", "data_dir"],
    "out_dir": ["output_dir"],
    "eval_every": ["eval_interval", "eval_steps"],
    "log_every": ["log_interval", "logging_steps"],
    "save_every": ["save_interval", "save_steps", "always_save_checkpoint"],
    "keep_last": ["save_total_limit"],
    "resume": ["resume_from_checkpoint"],
    "init_from": ["resume_from_checkpoint"],
    "dtype": ["bf16", "fp16", "precision", "torch_dtype"],
    "compile": ["torch_compile"],
    "wandb": ["wandb_log", "report_to"],
}
"""Names of our settings in nanoGPT, transformers and Lightning, if they differ."""


def unknown_key_message(
    key: str,
    known: Collection[str],
    other_schemas: Mapping[str, Collection[str]],
    shown_as: str | None = None,
) -> str:
    """Return an error message for a key that is not a setting, with a suggestion.

    Args:
        key: "section.name", as the user wrote it.
        known: keys of all settings.
        other_schemas: keys of other schemas, by the setting that selects them: "task=...".
        shown_as: text to print instead of the key, if the key must not be printed.
    """
    section, _, name = key.rpartition(".")
    verdict = f"{shown_as or key} is not a setting: "
    if key in REMOVED:
        old_weights = f"; {NEEDS_EARLIER}" if key in OF_WEIGHTS else ""
        return f"{verdict}it was removed. Leave it out{old_weights}"
    # Keys of list items are suggested only for keys of list items.
    known = [k for k in known if ("[]." in k) == ("[]." in key)]
    if section and (matches := [k for k in known if k.endswith(f".{key}")]):
        return f"{verdict}did you mean {_join(matches)}?"
    our_names = [our for our, others in OTHER_NAMES.items() if name in others]
    if matches := [k for our in our_names for k in _keys_named(our, known)]:
        return f"{verdict}did you mean {_join(matches)}?"
    if matches := _keys_named(name, known):
        sections = _join([k.rpartition(".")[0] or "no section" for k in matches])
        return f"{verdict if section else ''}{name} is a setting of {sections}: {_join(matches)}"
    for run, keys in other_schemas.items():
        if key in keys:
            return f"{key} is a setting of {run}"
        if matches := _keys_named(name, keys):
            return f"{verdict}{_join(matches)} is a setting of {run}"
    names = {k.rpartition(".")[2] for k in known}
    matches = get_close_matches(key, known, n=1, cutoff=0.8) or [
        k
        for close in get_close_matches(name, names, n=1, cutoff=0.7)
        for k in _keys_named(close, known)
    ]
    if matches:
        return f"{verdict}did you mean {_join(matches)}?"
    in_section = [k.removeprefix(f"{section}.") for k in known if k.startswith(f"{section}.")]
    if section and in_section:
        return f"{verdict}{section} has {', '.join(in_section)}"
    sections = dict.fromkeys(k.partition(".")[0] for k in known)
    return f"{verdict}a configuration has {', '.join(sections)}"


def _keys_named(name: str, keys: Collection[str]) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] == name]


def _join(keys: list[str]) -> str:
    return " or ".join(keys)
