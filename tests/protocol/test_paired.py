from hypothesis import given
from tests.protocol.choices import Choices, choices
from tests.protocol.paired_setup import faults_of, setup_of, Faults
from tests.protocol.paired_world import World


@given(choices(400))
def test_whatever_happens(found: Choices):
    setup = setup_of(found, faults_of(found))
    World(setup, found).run()
