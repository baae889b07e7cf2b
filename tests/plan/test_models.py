"""Models by name: exact caches of the cards, configs, specs, stacking, drafts and every refusal."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.plan.model_views import brief, briefs, layers_of
from tools.models_page import document

from baton.errors import ConfigError
from baton.plan.models import active_parameters, card_names, load_cache
from baton.plan.ranges import from_ids

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
DOCS = Path(__file__).parent.parent.parent / "docs"

PAGED_CARDS = {
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b": (80, 8, 128),
    "llama-3-405b": (126, 8, 128),
    "qwen2.5-72b": (80, 8, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-30b-a3b": (48, 4, 128),
    "qwen3-235b-a22b": (94, 4, 128),
    "smollm2-135m": (30, 3, 64),
    "mixtral-8x7b": (32, 8, 128),
    "glm-4.5": (92, 8, 128),
}


@pytest.mark.parametrize("name", PAGED_CARDS)
def test_cards_with_plain_attention(name: str) -> None:
    num_layers, heads, dim = PAGED_CARDS[name]
    cache = load_cache(name)
    expected = (((0, num_layers),), heads, "head", (dim,), None, None)
    assert cache.num_layers == num_layers
    assert briefs(cache) == {"k": expected, "v": expected}
    assert cache == load_cache(f"paged:layers={num_layers},heads={heads},dim={dim}")


def test_cards_with_a_latent() -> None:
    latent = (((0, 61),), None, None, (576,), None, None)
    index = (((0, 61),), None, None, (128,), None, None)
    assert briefs(load_cache("deepseek-v3")) == briefs(load_cache("kimi-k2")) == {"latent": latent}
    assert briefs(load_cache("deepseek-v3.2")) == {"index_k": index, "latent": latent}
    assert load_cache("glm-5") == load_cache("latent:layers=78,dim=576,index=128")


def test_cards_with_windows() -> None:
    gemma = load_cache("gemma-3-27b")
    everywhere = from_ids(i for i in range(62) if i % 6 == 5)
    local = from_ids(i for i in range(62) if i % 6 != 5)
    assert len(everywhere) == 10
    assert briefs(gemma) == {
        "k": (everywhere, 16, "head", (128,), None, None),
        "k.w1024": (local, 16, "head", (128,), 1024, None),
        "v": (everywhere, 16, "head", (128,), None, None),
        "v.w1024": (local, 16, "head", (128,), 1024, None),
    }
    assert gemma.groups == ("tokens", "tokens.w1024")
    gpt_oss = load_cache("gpt-oss-120b")
    assert brief(gpt_oss.by_name["k.w128"]) == (from_ids(range(0, 36, 2)), 8, "head", (64,), 128, None)
    assert brief(gpt_oss.by_name["v"]) == (from_ids(range(1, 36, 2)), 8, "head", (64,), None, None)
    assert load_cache("gpt-oss-20b").num_layers == 24
    assert briefs(load_cache("mistral-7b-v0.1"))["k.w4096"] == (((0, 32),), 8, "head", (128,), 4096, None)


@pytest.mark.parametrize(
    ("name", "num_layers", "num_values", "dtype"),
    [("qwen3.5-397b-a17b", 60, 64, "fp32"), ("qwen3-next-80b-a3b", 48, 32, None)],
)
def test_cards_with_a_delta_net(name: str, num_layers: int, num_values: int, dtype: str | None) -> None:
    linear = from_ids(i for i in range(num_layers) if i % 4 != 3)
    full = from_ids(range(3, num_layers, 4))
    assert briefs(load_cache(name)) == {
        "conv.k": (linear, 16, "key head", (128, 3), None, None),
        "conv.q": (linear, 16, "key head", (128, 3), None, None),
        "conv.v": (linear, num_values, "value head", (128, 3), None, None),
        "k": (full, 2, "head", (256,), None, None),
        "ssm": (linear, num_values, "value head", (128 * 128,), None, dtype),
        "v": (full, 2, "head", (256,), None, None),
    }


def test_card_with_mamba_beside_attention() -> None:
    layers = ((0, 72),)
    assert briefs(load_cache("falcon-h1-34b")) == {
        "conv.B": (layers, 2, "group", (256, 3), None, None),
        "conv.C": (layers, 2, "group", (256, 3), None, None),
        "conv.x": (layers, 32, "head", (128, 3), None, None),
        "k": (layers, 4, "head", (128,), None, None),
        "ssm": (layers, 32, "head", (128 * 256,), None, None),
        "v": (layers, 4, "head", (128,), None, None),
    }


def test_every_card_says_what_it_costs_to_compute() -> None:
    assert active_parameters("deepseek-v3") == 37e9
    assert active_parameters("deepseek-v3+draft.latent:layers=1,dim=576") == 37e9
    assert active_parameters("llama-3-8b+qwen3-8b") == pytest.approx(8.03e9 + 8.19e9)
    assert active_parameters("llama-3-8b+paged:layers=1,heads=8,dim=128") is None
    assert all((active_parameters(name) or 0) > 0 for name in card_names())


def test_a_folder_or_a_file_is_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "a+b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    renamed = tmp_path / "other.json"
    renamed.write_text(json.dumps({**LLAMA, "baton": {"active_parameters": 1e6}}))
    expected = load_cache("paged:layers=4,heads=8,dim=64")
    assert (
        load_cache(str(folder))
        == load_cache(str(folder / "config.json"))
        == load_cache(str(renamed))
        == expected
    )
    assert active_parameters(str(folder)) is None
    assert active_parameters(str(renamed)) == 1e6
    drafted = load_cache(f"{renamed}+draft.paged:layers=1,heads=8,dim=64")
    assert layers_of(drafted, "draft.0.k") == ((4, 5),)


def test_a_folder_without_a_config_does_not_hide_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama-3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_cache("llama-3-8b").num_layers == 32


def test_parts_stack_their_layers() -> None:
    cache = load_cache("paged:layers=2,heads=8,dim=64+recurrent:layers=6,heads=16,state=4096")
    assert cache.num_layers == 8
    assert layers_of(cache, "k") == ((0, 2),)
    assert brief(cache.by_name["ssm"]) == (((2, 8),), 16, "head", (4096,), None, None)


def test_equal_shapes_merge_into_one_component() -> None:
    cache = load_cache(
        "paged:layers=2,heads=8,dim=64+latent:layers=1,dim=32+paged:layers=3,heads=8,dim=64,vdim=64"
        "+paged:layers=1,heads=8,dim=64,window=16"
    )
    assert [component.name for component in cache.components] == ["k", "k.w16", "latent", "v", "v.w16"]
    assert layers_of(cache, "k") == layers_of(cache, "v") == ((0, 2), (3, 6))
    assert load_cache("llama-3-8b+llama-3-8b") == load_cache("paged:layers=64,heads=8,dim=128")


def test_unlike_shapes_get_names_and_bundles_of_their_own() -> None:
    cache = load_cache(
        "paged:layers=1,heads=8,dim=64+paged:layers=1,heads=8,dim=64,vdim=32+paged:layers=1,heads=4,dim=64"
        "+paged:layers=2,heads=8,dim=64,vdim=32+recurrent:layers=1,heads=2,state=8+recurrent:layers=1,heads=4,state=8"
    )
    names = [component.name for component in cache.components]
    assert names == ["k", "k.1", "k.2", "ssm", "ssm.1", "v", "v.1", "v.2"]
    # K of the second part is shaped as that of the first, but it is stored beside another V.
    assert layers_of(cache, "k.1") == layers_of(cache, "v.1") == ((1, 2), (3, 5))
    assert [cache.by_name[name].bundle for name in names] == [
        "kv",
        "kv.1",
        "kv.2",
        "ssm",
        "ssm.1",
        "kv",
        "kv.1",
        "kv.2",
    ]
    assert {cache.by_name[name].group for name in ("k", "k.1", "v.2")} == {"tokens"}
    assert cache.by_name["ssm.1"].group == "state"


def test_packed_convolutions_of_two_models_stay_apart() -> None:
    cache = load_cache("qwen3-next-80b-a3b+falcon-h1-34b")
    assert cache.by_name["conv.q"].bundle == "conv"
    assert cache.by_name["conv.x.1"].bundle == "conv.1"
    assert layers_of(cache, "ssm.1") == ((48, 120),)


def test_draft_layers_come_last_wherever_they_stand() -> None:
    cache = load_cache(
        "draft.paged:layers=1,heads=8,dim=128+latent:layers=61,dim=576"
        "+draft.latent:layers=2,dim=576,index=128"
    )
    assert cache.num_layers == 61
    found = {component.name: component.layers for component in cache.components}
    assert found == {
        "draft.0.k": ((61, 62),),
        "draft.0.v": ((61, 62),),
        "draft.1.index_k": ((62, 63),),
        "draft.1.latent": ((62, 63),),
        "draft.2.index_k": ((63, 64),),
        "draft.2.latent": ((63, 64),),
        "latent": ((0, 61),),
    }
    assert cache.by_name["draft.1.latent"].bundle == "draft.1.latent"
    mtp = load_cache("deepseek-v3+draft.latent:layers=1,dim=576")
    assert (mtp.num_layers, layers_of(mtp, "draft.0.latent")) == (61, ((61, 62),))


def test_the_largest_sizes_are_possible_but_not_all_at_once() -> None:
    assert (
        load_cache("latent:layers=100000,dim=64+latent:layers=1,dim=16777216,window=1").num_layers == 100_001
    )
    with pytest.raises(ConfigError, match="component k has 1677721600000 elements"):
        load_cache("paged:layers=100000,heads=16777216,dim=1")


REFUSED = {
    "": "'' has an empty part",
    "llama-3-8b+": "'llama-3-8b+' has an empty part",
    "lama-3-8b": "'lama-3-8b' (did you mean llama-3-8b?); use a card (deepseek-v3",
    "no-such\nmodel": "'no-such\\nmodel'",
    "missing/config.json": "no file 'missing/config.json'",
    "pagd:layers=1": "unknown kind 'pagd' in 'pagd:layers=1' (did you mean paged?)",
    "draft.draft.paged:layers=1,heads=1,dim=1": "unknown kind 'draft.draft.paged'",
    "paged:": "lacks layers and heads and dim; write paged:layers=N,heads=N,dim=N,[vdim=N],[window=N]",
    "paged:layers=2,heads=8": "lacks dim",
    "paged:layers=2,heads=8,dim=64,": "'' in",
    "paged:layers=2,heads=8,dim": "'dim' in",
    "paged:layers=2,head=8": "unknown key 'head' in 'paged:layers=2,head=8' (did you mean heads?)",
    "paged:layers=2,heads=8,dim=64,index=1": "unknown key 'index'",
    "recurrent:layers=2,heads=8,state=64,unit=1": "unknown key 'unit'",
    "paged:layers=2,heads=8,dim=64,heads=8": "key 'heads' comes twice",
    "paged:layers=two,heads=8,dim=64": "layers is 'two'",
    "paged:layers=2,heads=0,dim=64": "heads is '0'",
    "paged:layers=2,heads=-8,dim=64": "heads is '-8'",
    "paged:layers=2,heads=08,dim=64": "heads is '08'",
    "paged:layers=2,heads=8,dim=64,window=0": "window is '0'",
    "paged:layers=2,heads=8,dim= 64": "dim is ' 64'",
    "paged:layers=2,heads=8,dim=\u0664": "dim is '\\u0664'",
    "paged:layers=100001,heads=8,dim=64": "layers is '100001' in",
    "draft.paged:layers=1001,heads=8,dim=64": "from 1 to 1000,",
    "paged:layers=2,heads=16777217,dim=64": "heads is '16777217'",
    "recurrent:layers=1,heads=1,state=99999999999999999999": "state is '99999999999999999999'",
    "draft.latent:layers=1,dim=576": "draft layers only",
}


@pytest.mark.parametrize("text", REFUSED)
def test_bad_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cache(text)
    assert REFUSED[text] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_an_unknown_model_names_every_card() -> None:
    with pytest.raises(ConfigError) as caught:
        load_cache("gpt-5")
    assert all(name in str(caught.value) for name in card_names())


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        load_cache("paged:layers=" + "9" * 1_000_000)
    assert len(str(caught.value)) < 400


PIECES = [
    "paged",
    "latent",
    "recurrent",
    "draft.",
    ":",
    ",",
    "=",
    "+",
    "layers",
    "heads",
    "dim",
    "state",
    "index",
]
PIECES += [
    "window",
    "0",
    "1",
    "8",
    "99",
    "llama-3-8b",
    "qwen3.5-397b-a17b",
    ".json",
    "/",
    ".",
    "\x00",
    "\ud800",
    "k",
]
SPEC = st.builds(
    lambda kind, options: f"{kind}:" + ",".join(f"{key}={value}" for key, value in options),
    st.sampled_from(["paged", "latent", "recurrent", "draft.paged", "draft.latent", "draft.recurrent", "x"]),
    st.lists(
        st.tuples(st.sampled_from(["layers", "heads", "dim", "vdim", "state", "window"]), st.integers(0, 9)),
        max_size=5,
        unique_by=lambda option: option[0],
    ),
)
TEXT = st.one_of(
    st.text(),
    st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
    st.lists(SPEC | st.sampled_from(card_names()), max_size=4).map("+".join),
)


def refusal(text: str) -> str | None:
    """Why the text is refused, if it is."""
    try:
        assert load_cache(text).components
    except ConfigError as error:
        return str(error)
    return None


@given(TEXT)
@example("x" * 5000)
@example("/")
def test_any_text_is_a_cache_or_a_refusal(text: str) -> None:
    assert len((refusal(text) or "").splitlines()) <= 1


def test_the_page_about_the_cards_is_not_stale() -> None:
    page = (DOCS / "models.md").read_text("utf-8")
    assert page == document(), "run: make docs"
