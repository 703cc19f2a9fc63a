"""What the tests of tools and of the server use, for those of extensions."""

from tests.server.conftest import team as team
from tests.tools.conftest import client as client
from tests.tools.conftest import supervisor as supervisor
