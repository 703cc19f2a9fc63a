"""OpenEnv's servers of the two environments."""

from games import Guess, Heard, Number, Tools
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

guess = create_app(Guess, Number, Heard, max_concurrent_envs=16)
tools = create_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=16)
