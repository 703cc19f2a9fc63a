"""`python -m flash_mcp.cli`."""

import sys

from flash_mcp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
