"""Send one tiny trace through a server, as a client would, and say what came back.

Run as a script by the client's own Python (``python -P probe.py HOST MODEL``); prints one line
of JSON. It is a file of its own because a traced block is shipped as source.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(host: str, model_id: str) -> dict[str, float | int | str]:
    """Trace two tokens and return the token that the model says next.

    Args:
        host: base URL of the server.
        model_id: model folder or repository id.

    Returns:
        The model's key, the predicted token id, and the seconds the trace took.
    """
    from nnsight import CONFIG, TransformersModel
    from nnsight.modeling import huggingface

    CONFIG.API.HOST = host
    CONFIG.API.APIKEY = ""
    CONFIG.APP.REMOTE_LOGGING = False
    if Path(model_id).is_dir():
        # nnsight asks the Hub for the canonical name of every id; a folder has none.
        huggingface._ID_CACHE[model_id] = model_id
    model = TransformersModel(model_id, task="text-generation")
    start = time.monotonic()
    with model.trace("One two", remote=True):
        token = model.output.logits[0, -1].argmax().cpu().save()
    return {
        "model_key": model.to_model_key(),
        "token": int(token),
        "seconds": round(time.monotonic() - start, 3),
    }


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.stdout.write(json.dumps(main(*sys.argv[1:3])) + "\n")
