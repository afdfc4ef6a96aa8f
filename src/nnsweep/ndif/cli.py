"""The commands `nnsweep ndif …`: a real NDIF server on this machine, and what any server says."""

from pathlib import Path
from typing import Annotated

import typer

from nnsweep.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    help="Start, watch and stop a real NDIF server on this machine. Every user of this machine can "
    "reach it on the loopback address and run code in it: stop it when you are done.",
)

STATE = Path(".nnsweep/ndif")
State = Annotated[Path, typer.Option("--state", help="Folder of the server's state and logs.")]


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="smollm2-135m, a model folder, or a Hub id.")],
    trusted: Annotated[
        bool, typer.Option(help="Run code in the model's process, as for a trusted key.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="dtype of the served weights.")] = "float32",
    threads: Annotated[
        int, typer.Option(help="CPU threads; equal to the client's for equal bits.")
    ] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    timeout: Annotated[float, typer.Option(help="Seconds for the whole start.")] = 300,
    max_seconds: Annotated[
        float | None, typer.Option(help="End a request after so many seconds (default: never).")
    ] = None,
    python: Annotated[
        Path, typer.Option(help="Interpreter of the server's environment (make ndif-env).")
    ] = Path(".venv-ndif/bin/python"),
    state: State = STATE,
) -> None:
    """Start a server and return once a trace has gone through it; prints its NDIF_HOST."""
    from nnsweep.ndif import server

    running = server.serve(
        _folder(model),
        state_dir=state,
        python=python.absolute(),
        trusted=trusted,
        dtype=dtype,
        threads=threads,
        device=device,
        timeout_s=timeout,
        execution_timeout_s=max_seconds,
        progress=lambda line: typer.echo(line, err=True),
    )
    typer.echo(f"NDIF_HOST={running.host}")


def _folder(model: str) -> str:
    """The folder of a packaged model, prepared if need be; any other name as it is."""
    from nnsweep.models import PACKAGED, locate, prepare

    if model not in PACKAGED:
        return model
    spec = {"id": model, "revision": None, "dtype": "float32", "attention": "sdpa"}
    return str(locate(prepare(spec)))


@app.command()
def status(state: State = STATE) -> None:
    """Show the local server, and what the NDIF host of this shell says of itself."""
    from nnsweep.ndif import server
    from nnsweep.ndif.preflight import describe_service

    for name, value in server.status(state).items():
        typer.echo(f"{name:12} {value}")
    for line in describe_service():
        typer.echo(line)


@app.command()
def stop(state: State = STATE) -> None:
    """Stop everything that `serve` started, also after a crash."""
    from nnsweep.ndif import server

    typer.echo("stopped" if server.stop(state) else "no server runs from this folder")


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(help="Which log to print.")] = None,
    state: State = STATE,
) -> None:
    """List the logs, or print one."""
    from nnsweep.ndif import server

    found = server.logs(state)
    if name is None:
        for key, path in found.items():
            typer.echo(f"{key:12} {path}")
        return
    if name not in found:
        raise UserError(f"no log '{name}'. Logs: {', '.join(found) or 'none'}.")
    typer.echo(found[name].read_text(encoding="utf-8", errors="replace"))
