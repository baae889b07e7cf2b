"""What is derived and told before an instance starts, for models with windows and with an index."""

from pathlib import Path

import pytest
from tests.engine.tiny import WINDOW, WINDOWED, tiny, windowed

from baton.engine.instance.config import InstanceConfig, derive

GROUP = f"tokens.w{WINDOW}"
REASON = "prefixes are not kept: pages before a window are given back, so that no whole prefix stays"


@pytest.mark.parametrize("family", WINDOWED)
def test_windowed_models_have_their_own_pages_and_say_that_prefixes_are_not_kept(
    family: str, tmp_path: Path
) -> None:
    sizes = derive(InstanceConfig(str(windowed(family, tmp_path)), pool_tokens=1024, page_tokens=16))
    groups = {GROUP} if family == "mistral" else {"tokens", GROUP}
    assert dict(sizes.num_pages) == dict.fromkeys(groups, 64)
    assert sizes.lines()[-1] == REASON
    # The window is no limit of the context.
    assert sizes.context_max == 1024 > WINDOW


def test_an_index_shares_the_pages_of_its_latent_and_prefixes_are_kept(tmp_path: Path) -> None:
    sizes = derive(InstanceConfig(str(tiny("deepseek_v32", tmp_path)), pool_tokens=1024))
    assert list(sizes.num_pages) == ["tokens"]
    assert {each.name for each in sizes.cache.components} == {"latent", "index_k"}
    assert not any("prefixes" in line for line in sizes.lines())
