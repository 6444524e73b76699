"""Fixtures of the tests of the harness."""

import pytest

from jobs.suites import new_suite


@pytest.fixture
def suite(tmp_path):
    return new_suite(tmp_path)
