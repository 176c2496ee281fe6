"""`corellm batch`: its options. What they set in motion is in `batch_run`, imported when the command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from corellm.config import EngineOptions
from corellm.errors import OptionError

from .options import AttachTo, NewEngine, SamplingDefaults, check_attach, counted, expand, is_set

HELP = "Answer the rows of a JSONL file; run the same command again to go on after any interruption."


@expand(sampling=SamplingDefaults, engine=EngineOptions)
def batch(
    context: typer.Context,
    input: Annotated[
        str, typer.Argument(metavar="IN.jsonl", help="Rows, one JSON object a line; - is stdin, gzip is read as is.")
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="OUT.jsonl", help="Default IN.out.jsonl, for stdin and pipes -; - is stdout."
        ),
    ] = None,
    order: Annotated[
        str, typer.Option(metavar="completion|input", help="Write rows as they finish, or in input order.")
    ] = "completion",
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew: throw an earlier run's output away.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Run the rows again that failed in an earlier run.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Check the whole input first; stop at the first bad row.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(parser=counted("--limit"), help="Only the first N rows.", metavar="N")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every row and count tokens; run nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    json_summary: Annotated[
        bool, typer.Option("--json-summary", help="Summary as JSON, on stdout (on stderr if rows go there).")
    ] = False,
    attach_to: AttachTo = None,
    new_engine: NewEngine = False,
    *,
    sampling: SamplingDefaults,
    engine: EngineOptions,
) -> None:
    """Check the options, run the batch, leave with its exit code."""
    output = output or default_output(input)
    if restart and retry_errors:
        raise OptionError("--restart and --retry-errors contradict each other; give one of them")
    if output == "-" and (restart or retry_errors):
        flag = "--restart" if restart else "--retry-errors"
        raise OptionError(f"{flag} needs an output that can be gone on with, and rows go to stdout; give -o OUT.jsonl")
    check_attach(attach_to, new_engine)
    defaults = sampling.given()
    if is_set(context, "seed"):
        defaults["seed"] = engine.seed  # not otherwise: rows with the same prompt are to differ
    from .batch_run import BatchCommand, run_batch

    code = run_batch(
        BatchCommand(
            input=input,
            output=output,
            order=order,
            restart=restart,
            retry_errors=retry_errors,
            strict=strict,
            limit=limit,
            dry_run=dry_run,
            quiet=quiet,
            json_summary=json_summary,
            defaults=defaults,
            engine=engine,
            attach_to=attach_to,
            new_engine=new_engine,
        )
    )
    raise typer.Exit(code)


def default_output(input: str) -> str:
    """IN.out.jsonl for IN.jsonl and IN.jsonl.gz; stdout for stdin and named pipes, such as a shell's <(command)."""
    from corellm.batch.lines import is_pipe

    if is_pipe(input):
        return "-"
    return input.removesuffix(".gz").removesuffix(".jsonl") + ".out.jsonl"
