"""The command `nnsweep`: thin; every command calls one function of the package."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from nnsweep import __version__
from nnsweep.errors import NnsweepError, UserError
from nnsweep.ndif.cli import app as ndif_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Sweeps of interventions on language models, here or on NDIF. A whole sweep runs with "
    "`snakemake --cores 2`; these commands look at a sweep, or run one of its parts by hand.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(ndif_app, name="ndif")

SweepFile = Annotated[Path, typer.Argument(metavar="FILE", help="A sweep file (YAML).")]


def main() -> None:
    """Entry point: a NnsweepError is one line on stderr and an exit code, never a traceback."""
    from nnsweep.log import exit_code

    try:
        app()
    except NnsweepError as error:
        sys.stderr.write(f"nnsweep: {error}\n")
        sys.exit(exit_code(error))


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Sweeps of interventions on language models."""
    if show:
        typer.echo(f"nnsweep {__version__}")
        raise typer.Exit


@app.command()
def validate(file: SweepFile) -> None:
    """Check a sweep file and the files it names, as far as no model is needed (under a second)."""
    from nnsweep.grid import check_axes
    from nnsweep.prompts import records_of
    from nnsweep.sweep_file import read_sweep
    from nnsweep.vectors import check_vectors

    sweep = read_sweep(file)
    with _about(file):
        check_axes(sweep)
        check_vectors(sweep)
    records = records_of(sweep, Path(sweep.prompts.file))
    axes = ", ".join(f"{name}: {_size(axis)}" for name, axis in sweep.axes.items()) or "none"
    typer.echo(f"{file}: valid. Prompt rows: {len(records)}. Axes: {axes}.")


@contextmanager
def _about(file: Path) -> Iterator[None]:
    """Name the sweep file in a message about what stands in it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _size(axis: Any) -> str:
    from nnsweep.sweep import Range

    if axis == "all":
        return "all"
    return f"{len(axis.values() if isinstance(axis, Range) else axis)} values"


@app.command()
def explain(
    file: SweepFile,
    rows: Annotated[int, typer.Option(help="Prompt rows to show with their tokens.")] = 2,
    batch_rows: Annotated[str, typer.Option(help="As batch_rows in config.yaml.")] = "256",
    memory_gb: Annotated[float | None, typer.Option(help="What batch_rows auto may fill.")] = None,
    chunk_passes: Annotated[int, typer.Option(help="As chunk_passes in config.yaml.")] = 64,
    recompute: Annotated[str, typer.Option(help="fast or exact.")] = "fast",
    engine: Annotated[str, typer.Option(help="ndif adds requests and bytes.")] = "local",
) -> None:
    """Show what a sweep will run and cost, and every position and answer as tokens.

    Of a model from the Hub only config and tokenizer are fetched; a packaged one is converted once.
    """
    from nnsweep.config import read_config
    from nnsweep.explain import explain as describe
    from nnsweep.log import quiet_libraries
    from nnsweep.models import load_tokenizer, prepare
    from nnsweep.sweep_file import read_sweep

    number = int(batch_rows) if batch_rows.isdecimal() else batch_rows
    given = {"batch_rows": number, "chunk_passes": chunk_passes, "recompute": recompute}
    config = read_config(given | {"engine": engine, "memory_gb": memory_gb})
    sweep = read_sweep(file)
    _log_to_stderr()
    quiet_libraries()
    model = prepare(sweep.model.model_dump(), weights=False)
    with _about(file):
        shown = describe(sweep, model, load_tokenizer(model), config, rows)
    typer.echo(shown)


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="smollm2-135m, a Hugging Face id, or a folder.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    attention: Annotated[str, typer.Option(help="sdpa or eager.")] = "sdpa",
    weights: Annotated[
        bool, typer.Option("--weights", help="Fetch the weights, for machines without a network.")
    ] = False,
) -> None:
    """Show what a model offers: sizes, and every site with place, width and heads.

    Of a model from the Hub only config and tokenizer are fetched; a packaged one is converted once.
    """
    from nnsweep.documents import parse
    from nnsweep.explain import describe_model
    from nnsweep.log import quiet_libraries
    from nnsweep.models import prepare
    from nnsweep.sweep import ModelSpec

    _log_to_stderr()
    quiet_libraries()
    given = {"id": name, "revision": revision, "attention": attention}
    spec = parse(ModelSpec, given, "nnsweep model")
    typer.echo(describe_model(prepare(spec.model_dump(), weights)))


@app.command(name="run-chunk")
def run_chunk(
    chunk: Annotated[Path, typer.Argument(help="results/SWEEP/chunks/ID.json")],
    output: Annotated[Path, typer.Argument(help="Folder for ID.parquet and ID.json.")],
    engine: Annotated[str, typer.Option(help="local, ndif or reference.")] = "local",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Run one chunk by hand, as rule run_chunk does."""
    from nnsweep import jobs
    from nnsweep.config import read_config

    _log_to_stderr()
    config = read_config({"engine": engine, "device": device, "threads": threads})
    part, facts = output / f"{chunk.stem}.parquet", output / f"{chunk.stem}.json"
    jobs.run_chunk(chunk, engine, config, part, facts)
    typer.echo(str(part))


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("nnsweep").setLevel(logging.INFO)


@app.command()
def parity(
    a: Annotated[Path, typer.Argument(help="results/SWEEP/ENGINE")],
    b: Annotated[Path, typer.Argument(help="results/SWEEP/OTHER_ENGINE")],
) -> None:
    """Compare two engines' finished tables, value by value (exit 1 when they do not agree)."""
    from nnsweep.parity import compare, sentence

    verdict, _ = compare(a, b)
    typer.echo(f"parity {'holds' if verdict['holds'] else 'fails'}: {sentence(verdict)}")
    if not verdict["holds"]:
        raise typer.Exit(1)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="results/SWEEP/ENGINE")],
) -> None:
    """Show a finished run in a few lines: extremes, null controls, cost, files."""
    from nnsweep.show import show as describe

    typer.echo(describe(folder))


@app.command()
def status(
    folder: Annotated[
        Path | None,
        typer.Argument(help="results/SWEEP/ENGINE; without it, the one written to last."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until the run is finished.")
    ] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
) -> None:
    """Show how far a run is, while it runs: chunks, rate, time left, bytes, last lines of logs."""
    from rich.console import Console

    from nnsweep.status import newest, read_status, show_status, watch_status

    place = folder or newest(Path())
    if watch:
        watch_status(place, Console(), every)
    else:
        show_status(read_status(place), Console())


@app.command()
def gc(
    results: Annotated[Path, typer.Argument(help="The folder of all results.")] = Path("results"),
    sweeps: Annotated[
        Path | None, typer.Option(help="Folder of the sweep files; without it, config.yaml's.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is listed.")] = False,
) -> None:
    """List what no sweep refers to any more: old chunks and parts, journals, half-written files."""
    from nnsweep import leftovers

    found = leftovers.find_leftovers(results, sweeps)
    for line in leftovers.lines(found):
        typer.echo(line)
    if delete:
        leftovers.delete(results, found)
        typer.echo("Deleted.")
    elif found:
        typer.echo("Nothing was deleted; --delete deletes all of them.")


@app.command(hidden=True)
def schemas(
    root: Annotated[Path, typer.Argument(help="The project's root.")],
) -> None:
    """Write the schemas and the generated parts of the docs."""
    from nnsweep.generated import generated
    from nnsweep.tables import write_text

    for path, text in generated(root).items():
        write_text(path, text)
        typer.echo(str(path))
