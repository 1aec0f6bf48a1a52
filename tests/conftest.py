import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import settings

from foretrain.lab import remove

# A deadline would make a test depend on how busy the machine is.
settings.register_profile("foretrain", deadline=None)
settings.load_profile("foretrain")


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a lab of one's own, which is gone after the test whatever happens."""
    if os.geteuid() != 0:
        pytest.skip("a lab needs root")
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("a lab needs iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make network namespaces")
    name = f"t{secrets.token_hex(5)}"
    yield name
    remove(name, kill=True)
