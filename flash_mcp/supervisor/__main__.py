"""`python -m flash_mcp.supervisor --home DIR`."""

from flash_mcp.supervisor.loop import main

if __name__ == "__main__":
    main()
