"""How wrappers are found and configured; the contract suite runs on them as on any transport."""

import numpy as np
import pytest
from tests.transport.subjects import WRAPPED

from baton.errors import ConfigError
from baton.transport import open_transport
from baton.transport.wrappers import wrap, wrapper_names
from baton.transport.wrappers.faulty import Fault, Faults, FaultyConfig


def test_wrappers_are_found_by_name():
    assert wrapper_names() == tuple(sorted(WRAPPED))
    inner = open_transport("memory")
    with pytest.raises(ConfigError, match="wrapper 'slow' is not known; write one of faulty, throttled"):
        wrap("slow", inner)
    with pytest.raises(ConfigError, match="has no option 'rate'; it has bytes_per_s, latency_s, is_shared"):
        wrap("throttled", inner, rate=1)
    inner.close()


@pytest.mark.parametrize(
    "options", [{"bytes_per_s": 0}, {"bytes_per_s": 1, "latency_s": -1}, {"bytes_per_s": float("nan")}]
)
def test_links_are_checked(options: dict[str, float]):
    inner = open_transport("memory")
    with pytest.raises(ConfigError, match="has to be"):
        wrap("throttled", inner, **options)
    inner.close()


def test_probabilities_are_checked():
    for wrong in ({"error_probability": 1.1}, {"hang_probability": -0.1}, {"late_s": -1.0}):
        with pytest.raises(ConfigError):
            FaultyConfig(**wrong)
    with pytest.raises(ConfigError, match=r"add up to at most 1; got 1\.200"):
        FaultyConfig(error_probability=0.6, late_probability=0.6)


def test_faults_are_as_frequent_as_configured():
    faults = Faults(
        FaultyConfig(seed=3, error_probability=0.1, late_probability=0.25, delay_probability=0.05)
    )
    drawn = [faults.draw() for _ in range(20_000)]
    shares = {fault: sum(found is fault for found, _ in drawn) / len(drawn) for fault in Fault}
    expected = {Fault.ERROR: 0.1, Fault.LATE: 0.25, Fault.DELAY: 0.05, Fault.NONE: 0.6}
    assert shares == pytest.approx({fault: expected.get(fault, 0.0) for fault in Fault}, abs=0.01)
    assert np.mean([strength for _, strength in drawn]) == pytest.approx(0.5, abs=0.01)
