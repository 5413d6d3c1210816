"""Where there is no compiler the kernels cannot be built, and the tests that run them are skipped with the reason."""

import pytest

from triptych.models.native.build import NativeUnavailable, load_library


@pytest.fixture(scope="session")
def kernels():
    try:
        return load_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))
