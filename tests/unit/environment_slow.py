"""A module of the user's that takes longer to load than a session may."""

import time

from tests.unit.environment_classes import Echo as Echo

LOADS_S = 4.0

time.sleep(LOADS_S)
