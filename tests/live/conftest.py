import pytest


@pytest.fixture(scope="session")
def device() -> None:
    """The simulated GPU compiled, once for all tests: other processes wait for the lock and find it in the cache."""
    from foretrain.live.device.native_build import built

    built()
