"""Plan of an evaluation: the scorings of each model, and the modes that are skipped."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.sums import MIN_HISTORY_SHARE
from evaluation.windows import Scoring
from training.language.config import TrainConfig

SLIDING = ("strided", "cross", "control")
MODES = ("chunk", *SLIDING)
CONTROLS = ("intact", "shuffle", "replace")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Requested scorings."""

    modes: tuple[str, ...] | None = None
    """None means all modes that apply."""
    strides: tuple[int, ...] | None = None
    """None means an eighth of each history, so that all tokens see MIN_HISTORY_SHARE of it."""
    histories: tuple[int, ...] = ()
    """For cross. Empty means the contexts of all runs."""
    near: int | None = None
    """For control: number of tokens before the scored ones that are left intact. Also the short
    history of key tokens. None means the shortest context of all runs, or a quarter of the context
    if all runs have the same."""
    first: int | None = None
    """Sliding windows score only positions after this one. None means the longest context."""
    document_masks: tuple[bool, ...] | None = None
    """Whether other documents are hidden from a token. None means as in training."""

    def check_lengths(self, contexts: Sequence[int]) -> None:
        """Raise ValueError for lengths below their minimum or above the longest context."""
        # with first=0, windows that slide by their own length would be the chunks
        for option, length, least in (("--first", self.first, 1), ("--near", self.near, 0)):
            if length is not None and length < least:
                raise ValueError(f"{option}={length} must be at least {least}")
        longest = max(*contexts, self.first or 0)
        for option, values in (("--histories", self.histories), ("--stride", self.strides or ())):
            for value in values:
                if not 1 <= value <= longest:
                    raise ValueError(
                        f"{option}={value} must be from 1 to the longest context, {longest} "
                        "tokens. Try a smaller number, or add a model of a longer context"
                    )

    def scorings(
        self, context_length: int, contexts: Sequence[int], *, document_mask: bool = False
    ) -> list[Scoring]:
        """Scorings of a model whose context length is one of `contexts`.

        Raises:
            ValueError: strided was requested, and all strides are longer than the context.
        """
        first, modes = self.first or max(contexts), self.modes or MODES
        if self.strides and "strided" in modes and not self._strides(context_length):
            raise ValueError(
                f"--stride={min(self.strides)} must be at most {context_length}, the context of a "
                "run to score. Try a shorter stride, or --modes without strided"
            )
        histories = {context_length} if "strided" in modes else set()
        if "cross" in modes:
            histories |= {h for h in self.histories or contexts if h <= context_length}
        windows = [(h, s, first) for h in sorted(histories) for s in self._strides(h)]
        if "chunk" in modes:
            windows.insert(0, (context_length, context_length, 0))
        masks = (document_mask,) if self.document_masks is None else self.document_masks
        scorings = [
            Scoring(history=history, stride=stride, first=first, document_mask=masked)
            for masked in masks
            for history, stride, first in windows
        ]
        near, stride = self._near(contexts), self._control_stride(context_length)
        if "control" in modes and not document_mask and near < context_length - stride:
            full = Scoring(history=context_length, stride=stride, first=first)
            scorings += [replace(full, control=control, near=near) for control in CONTROLS]
        return list(dict.fromkeys(scorings))

    def scorings_of(self, config: TrainConfig, contexts: Sequence[int]) -> list[Scoring]:
        """Scorings of a run with this configuration."""
        masked = config.data.document_mask
        return self.scorings(config.model.context_length, contexts, document_mask=masked)

    def key_scorings(
        self, context_length: int, contexts: Sequence[int], *, document_mask: bool = False
    ) -> tuple[Scoring, Scoring]:
        """Long and short history by which a run chooses key tokens for models of `contexts`.

        The short history is `near`, the text that controls leave intact.

        Raises:
            ValueError: the short history is not shorter than the long one, or empty.
        """
        near = self._near(contexts)
        if not 1 <= near < context_length:
            raise ValueError(
                f"--near={near} is the short history of key tokens, and must be from 1 to "
                f"{context_length - 1}, below the context of the run that chooses them. Try "
                f"--near {max(1, context_length // 4)}, or a run with a longer context"
            )
        masks = self.document_masks or (document_mask,)
        mask = document_mask if document_mask in masks else masks[0]
        stride, short = (
            min(self._strides(history), default=max(1, history // 8))
            for history in (context_length, near)
        )
        # the chooser's context may be longer than all others
        first = max(self.first or max(contexts), context_length - stride)
        long = Scoring(history=context_length, stride=stride, first=first, document_mask=mask)
        return long, replace(long, history=near, stride=short)

    def key_scorings_of(
        self, config: TrainConfig, contexts: Sequence[int]
    ) -> tuple[Scoring, Scoring]:
        """Scorings by which a run with this configuration chooses key tokens."""
        masked = config.data.document_mask
        return self.key_scorings(config.model.context_length, contexts, document_mask=masked)

    @property
    def slides(self) -> bool:
        """Whether identical tokens are scored, of which key tokens are a part."""
        return self.modes is None or not {"strided", "cross"}.isdisjoint(self.modes)

    def compared(self, contexts: Sequence[int]) -> list[Scoring]:
        """Scorings that decide which tokens count (`well_seen`): of all `contexts` and `histories`.

        Histories without a model are included. A run scored alone then counts the same tokens as
        all runs scored together.
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

    def skipped_modes(self, configs: Sequence[TrainConfig]) -> dict[str, str]:
        """Modes that score none of these runs, each with the reason and a remedy."""
        contexts = [config.model.context_length for config in configs]
        return {
            mode: self._reason(mode, configs)
            for mode in self.modes or MODES
            if not any(replace(self, modes=(mode,)).scorings_of(c, contexts) for c in configs)
        }

    def _reason(self, mode: str, configs: Sequence[TrainConfig]) -> str:
        """Reason why `mode` scores no run: cross or control, as other modes score or raise."""
        contexts = [config.model.context_length for config in configs]
        if mode == "cross":
            histories = ", ".join(map(str, sorted(set(self.histories or contexts))))
            least = f"--stride={min(self.strides)}" if self.strides else "1"
            source = "--histories" if self.histories else "the runs' contexts (--histories)"
            return (
                f"{source} {histories} must include one between {least} and the longest "
                f"context, {max(contexts)} tokens. Try other --histories or --stride"
            )
        packed = [c.model.context_length for c in configs if not c.data.document_mask]
        if not packed:
            return (
                "all runs were trained with data.document_mask, and such models have never seen "
                "distant text of other documents. Try a run without it"
            )
        context, stride = max(packed), self._control_stride(max(packed))
        windows = f"windows of {context} tokens that slide by {stride}"
        if stride >= context:
            return f"{windows} have no distant part. Try a shorter --stride"
        return (
            f"--near={self._near(contexts)} must be below {context - stride} for a distant part in "
            f"{windows}. Try a smaller --near, or a shorter --stride"
        )

    def _near(self, contexts: Sequence[int]) -> int:
        """Number of tokens that controls leave intact, given the `contexts` of all models."""
        if self.near is not None:
            return self.near
        shortest = min(contexts)
        # with a single context length, near = context would leave no distant part
        return shortest // 4 if shortest == max(contexts) else shortest

    def _control_stride(self, context_length: int) -> int:
        """Stride of controls, larger than that of others because they take three more passes."""
        return max(*(self.strides or ()), context_length // 4, 1)

    def _strides(self, history: int) -> tuple[int, ...]:
        """Strides of windows with this history."""
        if self.strides is None:
            return (max(1, int(history * (1 - MIN_HISTORY_SHARE))),)
        return tuple(stride for stride in self.strides if stride <= history)
