"""The attentions that are compared."""

WINDOW_SHARE = 8
"""A window has one part of so many of the context."""
ATTENTIONS = ("dense", "window", "butterfly")


def settings_of(attention: str, context: int) -> tuple[str, ...]:
    """What a run has beside the configuration's dense attention, as key=value."""
    return {
        "dense": (),
        "window": (f"model.window_size={context // WINDOW_SHARE}",),
        "butterfly": ("model.mask.pattern=butterfly",),
    }[attention]
