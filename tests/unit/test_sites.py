"""Where sites live: paths, slices and the order of the forward pass."""

import pytest
from examples import model_of

from nnsweep.errors import UserError
from nnsweep.sites import ORDER, resumes_at, site_table, tap

SHAPE = model_of(layers=3, heads=4)["shape"]
PATHS = {
    "embed": "embed",
    "layer": "layers.{layer}",
    "attn": "layers.{layer}.attn",
    "mlp": "layers.{layer}.mlp",
    "projection": "layers.{layer}.attn.o_proj",
    **{site: f"layers.{{layer}}.attn.{site}_proj" for site in ("q", "k", "v")},
    **{name: f"layers.{{layer}}.{name}" for name in ("ln1", "ln2", "mid", "up", "down")},
    "softmax": "layers.{layer}.attn.source.softmax",
    "ln_final": "norm",
}
SIZES = {"hidden": 32, "vocab": 100, "heads": 4, "head_dim": 16, "neurons": 64}


@pytest.mark.parametrize("head", range(4))
def test_heads_are_adjacent_slices_of_their_own_width(head):
    sites, _ = site_table("any", PATHS, SIZES)
    place = tap(SHAPE | {"sites": sites}, "z", 1, head)
    assert (place["low"], place["high"]) == (16 * head, 16 * head + 16)
    assert place["side"] == "input"
    assert place["path"] == "layers.1.attn.o_proj"


def test_the_stream_into_a_layer_is_the_stream_out_of_the_one_before():
    """The very same tensor; reading the inputs of a layer would read all keys and values too."""
    into, out = tap(SHAPE, "resid_pre", 2, None), tap(SHAPE, "resid_post", 1, None)
    assert into | {"order": None} == out | {"order": None}
    assert out["order"] == into["order"] < tap(SHAPE, "z", 2, 0)["order"]
    assert tap(SHAPE, "resid_pre", 0, None)["side"] == "input"


@pytest.mark.parametrize("site", ["resid_post", "attn_out", "mlp_out"])
def test_other_sites_have_the_whole_width(site):
    place = tap(SHAPE, site, 2, None)
    assert (place["low"], place["high"]) == (0, SHAPE["hidden"])
    assert ".2" in place["path"]


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_what_reaches_the_stream_of_a_post_norm_family_is_the_norms_output(family):
    sites, _ = site_table(family, PATHS, SIZES)
    assert sites["attn_out"]["path"] == "layers.{layer}.post_attention_layernorm"
    assert sites["mlp_out"]["path"] == "layers.{layer}.post_feedforward_layernorm"


@pytest.mark.parametrize(("missing", "site"), [("projection", "z"), ("mlp", "mlp_out"), ("k", "k")])
def test_a_family_without_a_site_says_why(missing, site):
    sites, refused = site_table("any", PATHS | {missing: None}, SIZES)
    assert site not in sites
    with pytest.raises(UserError, match=f"site {site}: {refused[site]}"):
        tap(SHAPE | {"sites": sites, "refused": refused}, site, 0, 0)


def test_sites_follow_the_order_of_the_forward_pass():
    places = [("embed", None)]
    places += [(site, layer) for layer in range(3) for site in ORDER[1:-2]]
    places += [("ln_final", None), ("logits", None)]
    orders = [tap(SHAPE, site, layer, None)["order"] for site, layer in places]
    assert orders == sorted(orders)


@pytest.mark.parametrize(
    ("site", "layer", "untouched"),
    [
        ("embed", None, 0),
        ("resid_pre", 0, 0),
        ("resid_pre", 2, 2),
        ("z", 2, 2),
        ("attn_out", 2, 2),
        ("mlp_out", 2, 2),
        ("resid_post", 2, 3),
        ("logits", None, 3),
    ],
)
def test_layers_before_a_write_are_untouched(site, layer, untouched):
    assert resumes_at(site, layer, 3) == untouched
