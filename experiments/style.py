"""Colours and lines of Papilio, its peers and the paper in the pictures of results."""

from typing import Any

from evaluation.style import COLOURS, PLAIN

# The paper is black. Papilio has the two warm colours, its peers have cool ones.
OURS, OUR_SPARSE, PAPER = COLOURS[0], COLOURS[4], "#000000"
PEERS = {
    "SDPA flash": "#0072B2",
    "SDPA cuDNN": "#56B4E9",
    "SDPA math": PLAIN,
    "standard": PLAIN,
    "FlexAttention": "#009E73",
    "FlexAttention, FLASH": "#7FCDB5",
    "flash-attn-4": "#CC79A7",
    "Triton tutorial": "#7B4FA3",
    "nanoGPT, flash": "#0072B2",  # the colours of the attention backend
    "nanoGPT, cuDNN": "#56B4E9",
    "Hugging Face, eager": PLAIN,
    "Hugging Face, sdpa": "#009E73",
    "Hugging Face, compiled": "#CC79A7",
    "transformers, eager": PLAIN,
    "transformers, compiled": "#009E73",
    "transformers, compiled, logits of masked tokens": "#7FCDB5",
    "ModernBERT-large, compiled": "#CC79A7",
}


APPROXIMATIONS = {
    "Linformer": "#0072B2",
    "Performer": "#56B4E9",
    "Local": "#009E73",
    "Longformer": "#7FCDB5",
    "BigBird": "#CC79A7",
    "Reformer": "#7B4FA3",
    "Nystromformer": PLAIN,
    "fla linear attention": "#444444",
}


def approximate_line(name: str) -> dict[str, Any]:
    """Matplotlib options of a line in the picture of approximate attention."""
    kind, _, rest = name.partition(", ")
    if kind == "Papilio":
        style = {"": {"color": OURS}, "block-sparse": {"color": OUR_SPARSE}}
        return {"lw": 4, "zorder": 3, **style.get(rest, {"color": OUR_SPARSE, "lw": 2, "ls": ":"})}
    return {"color": APPROXIMATIONS[kind], "lw": 1.5, "ls": "--" if rest == "compiled" else "-"}


def line_of(name: str, *, sparse: bool = False) -> dict[str, Any]:
    """Matplotlib options of an attention's line; Papilio's is thick and in front."""
    if name == "ours, portable":
        return {"color": OURS, "lw": 1.5, "ls": ":"}
    if name != "ours":
        return {"color": PEERS[name], "lw": 1.5}
    if sparse:  # narrower, so that both stay visible where they coincide
        return {"color": OUR_SPARSE, "lw": 1.5, "zorder": 4}
    return {"color": OURS, "lw": 4, "zorder": 3}
