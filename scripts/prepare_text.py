"""Turn text into token shards for training.

    python -m scripts.prepare_text --out out/openwebtext        # OpenWebText, nanoGPT's split
    python -m scripts.prepare_text stdlib --out out/stdlib --train-bpe 4096
    python -m scripts.prepare_text HuggingFaceFW/fineweb --stream --max-documents 1000000 --out X
    python -m scripts.prepare_text books/ --val val.jsonl.xz --out out/books --tokenizer gpt2.json
    python -m scripts.prepare_text my_project/ notes/*.md --as-text --out out/mine

Local files are .txt (one document each, or see --txt-separator), .jsonl (a JSON object per line),
both possibly compressed as .gz, .xz or .zst, and .parquet. Links in a folder are followed, each
file is read once, and names that begin with a dot are left out. In plain text, line ends of other
systems become "\\n", and a byte order mark is removed. Texts in .jsonl and .parquet files stay
unchanged.

If it is interrupted or killed, run the same command again to resume.
"""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from data.text.documents import OPENWEBTEXT, HubSource
from data.text.prepare import SHARD_TOKENS, PrepareReport, prepare
from data.text.shards import SplitInfo, total
from data.text.sources import CutSource, open_source
from data.text.tokenizer import GPT2_SHA256
from training.command_line import command_parser, parse_before_imports, user_errors_as_messages
from training.signals import on_interrupt

NANOGPT_TOKENS = {"train": 9_035_582_198, "val": 4_434_897}
"""Token counts of OpenWebText as nanoGPT prepares it."""


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add(
        "source", nargs="*", default=[OPENWEBTEXT],
        help="a dataset on the Hugging Face hub, `stdlib` (Python's standard library), or local "
        f"files, folders and globs (default: {OPENWEBTEXT})",
    )  # fmt: skip
    add("--out", required=True, help="folder for the shards")
    which = parser.add_mutually_exclusive_group().add_argument
    which("--tokenizer", help="gpt2 (default) or the path of a tokenizer.json")
    which("--train-bpe", type=int, metavar="N", help="train a byte-level BPE of N entries instead")
    add(
        "--end-of-text", metavar="TOKEN",
        help="special token of the tokenizer that ends each document, such as '</s>' (default: "
        "<|endoftext|>, or the token recorded in the tokenizer.json of a prepared text or a run)",
    )  # fmt: skip
    add("--val", nargs="+", default=(), metavar="FILE", help="local files for validation")
    add(
        "--val-ratio", type=float, metavar="R",
        help="without --val: share of the documents for validation (default: 0.0005 hub, 0.01 "
        "local); if that is less than one document, share of each document (default: 0.1)",
    )  # fmt: skip
    add("--text-field", default="text", metavar="NAME", help="JSON field or column")
    add(
        "--txt-separator", metavar="TEXT",
        type=lambda text: text.replace("\\n", "\n").replace("\\t", "\t"),
        help=r"separator of the documents in a .txt file; \n and \t are understood "
        "(default: a file is one document)",
    )  # fmt: skip
    add(
        "--as-text", action="store_true",
        help="also read UTF-8 files of other formats (.md, .py, .html, .csv ...) as plain text; "
        ".jsonl and .parquet files are still read by field. Without it, such files in a folder are "
        "left out and counted",
    )  # fmt: skip
    add(
        "--skip-bad", action="store_true",
        help="leave out documents that would be refused, and count them by reason: empty or null "
        "texts, texts that are not strings, lines that are not JSON or lack the field, and invalid "
        "UTF-8. It may be added after the command has stopped at such a document",
    )  # fmt: skip
    add("--hub-config", metavar="NAME", help="configuration of the hub dataset")
    add(
        "--stream", action="store_true",
        help="read a hub dataset while it downloads, without storing it on disk; the validation "
        "split is then drawn document by document",
    )  # fmt: skip
    add("--max-documents", type=int, metavar="N", help="with --stream: read the first N only")
    add(
        "--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N",
        help=f"tokens at which a shard ends with its document (default: {SHARD_TOKENS:,})",
    )  # fmt: skip
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    args = options(argv)
    console = Console()
    source = open_source(
        args.source,
        val=args.val,
        val_ratio=args.val_ratio,
        text_field=args.text_field,
        txt_separator=args.txt_separator,
        as_text=args.as_text,
        skip_bad=args.skip_bad,
        hub_config=args.hub_config,
        stream=args.stream,
        max_documents=args.max_documents,
    )
    if isinstance(source, CutSource):
        print(
            "There are too few documents to hold out whole ones for validation: the last "
            f"{source.val_ratio:.0%} of each is held out, starting at the beginning of a line."
        )
    with (
        on_interrupt(lambda: ": the same command resumes from here"),
        _Display(console) as display,
    ):
        report = prepare(
            source,
            args.out,
            tokenizer=args.tokenizer,
            train_bpe=args.train_bpe,
            end_of_text=args.end_of_text,
            shard_tokens=args.shard_tokens,
            on_progress=display.show,
        )
    if not report.new_text_bytes:
        print(f"{args.out} is already finished; nothing to do.")
    _print_report(report, console)
    if source == HubSource(OPENWEBTEXT):  # nanoGPT publishes its token counts
        return _compare_with_nanogpt(report)
    return 0


class _Display(Progress):
    """Progress bar with the counts so far and the rate of this run."""

    def __init__(self, console: Console) -> None:
        counts = TextColumn("{task.fields[counts]}")
        bar = BarColumn(), TaskProgressColumn(), counts, TimeRemainingColumn()
        super().__init__(TextColumn("{task.description}"), *bar, console=console)

    def show(self, counts: SplitInfo, done: float) -> None:
        if not self.tasks:
            self._first_time, self._first_bytes = self.get_time(), counts.text_bytes
            self.add_task("tokenizing", total=1.0, counts="")
        seconds = self.get_time() - self._first_time
        new_bytes = counts.text_bytes - self._first_bytes
        # There is no rate after the first batch of a run.
        rate = f"  {new_bytes / 1e6 / seconds:.1f} MB/s" if new_bytes else ""
        self.update(
            self.task_ids[0],
            completed=done,
            counts=f"{counts.documents:,} documents  {counts.tokens / 1e6:,.1f}M tokens{rate}",
        )


def _print_report(report: PrepareReport, console: Console) -> None:
    manifest = report.manifest
    tokenizer = manifest.tokenizer
    for key, value in manifest.settings["source"].items():
        if value is not None and not key.endswith("sha256"):
            print(f"  {key}: {value}")
    if manifest.left_out:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in manifest.left_out.items())
        print(f"  left_out_documents: {reasons}")
    print(f"  tokenizer: {tokenizer.name}, {tokenizer.vocab_size:,} entries ({manifest.dtype})")
    if end_of_text := manifest.settings["tokenizer"].get("end_of_text"):
        print(f"  end_of_text: {end_of_text}")
    table = Table(box=None, pad_edge=False)
    table.add_column("split", no_wrap=True)
    for heading in ("documents", "tokens", "shards", "seconds", "MB/s", ">1K", ">4K", ">16K"):
        table.add_column(heading, justify="right", no_wrap=True)
    this_run = [f"{report.seconds:.1f}", f"{report.new_text_bytes / 1e6 / report.seconds:.1f}"]
    for split, info in (*manifest.splits.items(), ("total", total(manifest.splits))):
        shares = [f"{share:.1%}" for share in report.long_document_shares.get(split, ())]
        counts = [f"{info.documents:,}", f"{info.tokens:,}", str(len(info.shards))]
        table.add_row(split, *counts, *(this_run if split == "total" else ["", ""]), *shares)
    console.print(table)
    print(
        "Seconds and MB/s are those of this run. >1K, >4K and >16K: the share of the tokens that\n"
        "are in documents of more than 1,024, 4,096 and 16,384 tokens."
    )
    tokens = manifest.splits["train"].tokens
    print(f"For 4 epochs, train with optim.max_steps = {4 * tokens:,} / optim.batch_tokens.")


def _compare_with_nanogpt(report: PrepareReport) -> int:
    """Compare the token counts of OpenWebText with nanoGPT's, and return the exit status.

    It is 1 if they differ although the tokenizer is the same.
    """
    tokenizer = report.manifest.tokenizer
    if tokenizer.sha256 != GPT2_SHA256:
        print(
            f"The tokenizer {tokenizer.name!r} is not GPT-2's, so the token counts cannot be "
            "compared with nanoGPT's."
        )
        return 0
    tokens = {split: info.tokens for split, info in report.manifest.splits.items()}
    if tokens == NANOGPT_TOKENS:
        print("OpenWebText matches nanoGPT's token counts exactly.")
        return 0
    print(
        f"error: OpenWebText has {tokens} tokens here, but nanoGPT has "
        f"{NANOGPT_TOKENS}; the dataset or its split has changed, so perplexities will not be "
        "comparable.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    with user_errors_as_messages():
        sys.exit(main())
