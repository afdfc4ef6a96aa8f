"""Logging of a job: one file, one format, warnings and the last error included."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nnsweep.errors import CheckFailed, NnsweepError, UserError

FORMAT = "%(asctime)s %(levelname)s %(message)s"


@contextmanager
def job_log(path: str | None) -> Iterator[None]:
    """Log to `path` (or to stderr), and end the job in one line where a person can mend it.

    Raises:
        SystemExit: 2 after a UserError, 1 after another NnsweepError; the message goes to the log
            and to stderr. Any other exception is logged with its traceback and raised.
    """
    handler = _handler(path)
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("nnsweep").setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    except NnsweepError as error:
        logging.getLogger("nnsweep").error("%s", error)
        if path:
            sys.stderr.write(f"nnsweep: {error}\n")
        raise SystemExit(exit_code(error)) from None
    except Exception:
        logging.getLogger("nnsweep").exception("the job failed")
        raise
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()


def exit_code(error: NnsweepError) -> int:
    """2 for what a user can mend, 1 for a check that did not hold or a damaged file."""
    return 2 if isinstance(error, UserError) and not isinstance(error, CheckFailed) else 1


def _handler(path: str | None) -> logging.Handler:
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler()
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    return handler


def quiet_libraries() -> None:
    """Switch off the progress bars and chatter of the model libraries (their errors stay)."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.filterwarnings("ignore", message=".*clean_up_tokenization_spaces.*")
