"""Attentions compared by experiments.passkey."""

WINDOW_SHARE = 8
"""The window is context / WINDOW_SHARE."""
ATTENTIONS = ("dense", "window", "butterfly")


def settings_of(attention: str, context: int) -> tuple[str, ...]:
    """Overrides of the dense configuration, key=value."""
    return {
        "dense": (),
        "window": (f"model.window_size={context // WINDOW_SHARE}",),
        "butterfly": ("model.mask.pattern=butterfly",),
    }[attention]
