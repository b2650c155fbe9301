"""Programs of the harness travel by value, as those of the tests do."""

from __future__ import annotations

import cloudpickle
import pytest
from tests.frameworks import harness


@pytest.fixture(autouse=True, scope="package")
def the_harness_travels_by_value() -> None:
    cloudpickle.register_pickle_by_value(harness)
