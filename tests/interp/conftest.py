"""Live models that tests of several files ask."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def chunks():
    """A small megatron-core GPT in this process."""
    from interp.live_models import gpt

    with gpt() as made:
        yield made


@pytest.fixture(scope="module")
def model(chunks):
    """The same, to be asked."""
    from mappnb.interp import Model

    return Model(chunks, "bytes")
