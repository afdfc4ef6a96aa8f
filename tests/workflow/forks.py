"""Many dry runs for little more than one: Snakemake is imported once, and forked for each."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from workflow.project import Done, command

FORKS = """
import json, os, sys, traceback
from pathlib import Path

import nnsweep.config, nnsweep.cost, nnsweep.expansion, nnsweep.jobs, nnsweep.sites, nnsweep.sweep
from snakemake.cli import main

said, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
for number, words in enumerate(runs):
    child = os.fork()
    if not child:
        stream = (said / f"{number}.out").open("wb")
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        sys.argv = ["snakemake", "-n", "--nocolor", *words]
        code = 1
        try:
            main(sys.argv[1:])
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    (said / f"{number}.code").write_text(str(os.waitstatus_to_exitcode(status)))
"""


def dry_runs(folder: Path, runs: Iterable[tuple[str, ...]]) -> list[Done]:
    """`snakemake -n` in a folder with each of some lists of arguments, one after the other."""
    asked = list(runs)
    with TemporaryDirectory() as said:
        forked = command(sys.executable, "-P", "-c", FORKS, said, json.dumps(asked), cwd=folder)
        assert forked.code == 0, forked.out
        return [
            Done(
                int(Path(said, f"{number}.code").read_text()),
                Path(said, f"{number}.out").read_text(),
            )
            for number in range(len(asked))
        ]
