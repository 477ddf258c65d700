"""Text of token ids that come one at a time."""

from data.text.tokenizer import TextTokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Decodes ids as they come, in pieces that end between characters.

    A byte-level token can end inside a character, which decodes as U+FFFD until the rest of its
    bytes have come: so long, the whole piece is held back. All pieces together are
    `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        # the ids of the last piece are decoded along: some tokenizers drop a space at the beginning
        self._last: list[int] = []
        self._held: list[int] = []

    def feed(self, *ids: int) -> str:
        """Take over more ids; returns the text that they complete, perhaps none."""
        self._held += ids
        piece = self._piece()
        if not self._held or piece.endswith(_INCOMPLETE):
            return ""
        self._last, self._held = self._held, []
        return piece

    def finish(self) -> str:
        """What is still held back, if no more ids come."""
        piece = self._piece()
        self._last, self._held = [], []
        return piece

    def _piece(self) -> str:
        before = self._tokenizer.decode(self._last)
        return self._tokenizer.decode(self._last + self._held)[len(before) :]
