"""What the tests of tools use, for those of tools that are extensions."""

from tests.tools.conftest import client as client
from tests.tools.conftest import supervisor as supervisor
