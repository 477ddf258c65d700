"""Which scorings an evaluation takes of which model, and what it leaves out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.sums import LEAST_SEEN
from evaluation.windows import Scoring
from training.language.config import TrainConfig

SLIDING = ("strided", "cross", "control")
MODES = ("chunk", *SLIDING)
CONTROLS = ("intact", "shuffle", "replace")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which scorings are wanted."""

    modes: tuple[str, ...] | None = None
    """None means all that there is something to score by."""
    strides: tuple[int, ...] | None = None
    """None means an eighth of each history, so that all tokens see LEAST_SEEN of it."""
    histories: tuple[int, ...] = ()
    """For cross; none means the contexts of all runs."""
    near: int | None = None
    """For control: tokens before the scored ones that stay as they are; None means the shortest
    context of all runs, or a quarter of it if they have no other."""
    first: int | None = None
    """Positions up to this one are scored in chunks only; None means the longest context."""
    document_masks: tuple[bool, ...] | None = None
    """Whether a token sees what stands before its document; None means as in training."""

    def check_lengths(self, contexts: Sequence[int]) -> None:
        """Refuse lengths that cannot be, or that neither a context nor `first` can hold."""
        # from 0 on, windows that slide by their length would be those of chunk
        for option, length, least in (("--first", self.first, 1), ("--near", self.near, 0)):
            if length is not None and length < least:
                raise ValueError(f"{option}={length} must be at least {least}")
        longest = max(*contexts, self.first or 0)
        for option, values in (("--histories", self.histories), ("--stride", self.strides or ())):
            for value in values:
                if not 1 <= value <= longest:
                    raise ValueError(
                        f"{option}={value} must be from 1 to the longest context, {longest} tokens"
                    )

    def scorings(
        self, context_length: int, contexts: Sequence[int], *, document_mask: bool = False
    ) -> list[Scoring]:
        """The scorings of a model of one of these `contexts`.

        Raises:
            ValueError: strided is wanted, and no stride fits into the context.
        """
        first, modes = self.first or max(contexts), self.modes or MODES
        if self.strides and "strided" in modes and not self._strides(context_length):
            raise ValueError(
                f"--stride={min(self.strides)} is longer than a context of {context_length} "
                "tokens that is to be scored: take a shorter one, or --modes without strided"
            )
        histories = {context_length} if "strided" in modes else set()
        if "cross" in modes:
            histories |= {h for h in self.histories or contexts if h <= context_length}
        slides = [(h, s, first) for h in sorted(histories) for s in self._strides(h)]
        if "chunk" in modes:
            slides.insert(0, (context_length, context_length, 0))
        masks = (document_mask,) if self.document_masks is None else self.document_masks
        wanted = [
            Scoring(history=history, stride=stride, first=first, document_mask=masked)
            for masked in masks
            for history, stride, first in slides
        ]
        near, stride = self._near(contexts), self._control_stride(context_length)
        if "control" in modes and not document_mask and near < context_length - stride:
            whole = Scoring(history=context_length, stride=stride, first=first)
            wanted += [replace(whole, control=control, near=near) for control in CONTROLS]
        return list(dict.fromkeys(wanted))

    def scorings_of(self, config: TrainConfig, contexts: Sequence[int]) -> list[Scoring]:
        """`scorings` of the model of a run."""
        masked = config.data.document_mask
        return self.scorings(config.model.context_length, contexts, document_mask=masked)

    def compared(self, contexts: Sequence[int]) -> list[Scoring]:
        """The scorings of models of these contexts, and of `histories` that no model has.

        A run alone then has the tokens counted that all together have (`well_seen`).
        """
        lengths = set(contexts)
        if "cross" in (self.modes or MODES):
            lengths |= {h for h in self.histories if h <= (self.first or max(contexts))}
        return [
            scoring
            for length in sorted(lengths)
            if self._strides(length)
            for scoring in self.scorings(length, contexts)
        ]

    def left_out(self, configs: Sequence[TrainConfig]) -> dict[str, str]:
        """The modes by which none of these runs is scored: why, and what to change."""
        contexts = [config.model.context_length for config in configs]
        return {
            mode: self._reason(mode, configs)
            for mode in self.modes or MODES
            if not any(replace(self, modes=(mode,)).scorings_of(c, contexts) for c in configs)
        }

    def _reason(self, mode: str, configs: Sequence[TrainConfig]) -> str:
        """For cross and control, as the others always score or refuse."""
        contexts = [config.model.context_length for config in configs]
        if mode == "cross":
            histories = ", ".join(map(str, sorted(set(self.histories or contexts))))
            least = f"--stride={min(self.strides)}" if self.strides else "1"
            return (
                f"of the histories {histories} none lies between {least} and "
                f"the longest context, {max(contexts)} tokens: change --histories or --stride"
            )
        packed = [c.model.context_length for c in configs if not c.data.document_mask]
        if not packed:
            return (
                "all runs were trained with data.document_mask, and such models have never seen "
                "the distant text of other documents: give a run without it"
            )
        context, stride = max(packed), self._control_stride(max(packed))
        windows = f"windows of {context} tokens that slide by {stride}"
        if stride >= context:
            return f"{windows} have no distant part: take a shorter --stride"
        return (
            f"--near={self._near(contexts)} leaves nothing distant in {windows}: take a --near "
            f"below {context - stride}, or a shorter --stride"
        )

    def _near(self, contexts: Sequence[int]) -> int:
        """The tokens that controls leave as they are; `contexts` are of all models."""
        if self.near is not None:
            return self.near
        shortest = min(contexts)
        # all of the only context would leave nothing distant
        return shortest // 4 if shortest == max(contexts) else shortest

    def _control_stride(self, context_length: int) -> int:
        """Larger than that of others, as controls take three more passes."""
        return max(*(self.strides or ()), context_length // 4, 1)

    def _strides(self, history: int) -> tuple[int, ...]:
        """By what windows of this history slide."""
        if self.strides is None:
            return (max(1, int(history * (1 - LEAST_SEEN))),)
        return tuple(stride for stride in self.strides if stride <= history)
