"""A quick server with the routes of vLLM's that deployments use; run as worker.engine.serve is.

The model's name says how it behaves: `silent` never listens, `crash` ends with a traceback,
`stuck` computes no token when it is asked for one, `idle` has not been used for long. An
adapter folder with a file `broken` in it is refused. Like vLLM it has a child process, which it
ends with itself; killed, it leaves it behind."""

import argparse
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from worker.process import COMPUTES_IN


class Handler(BaseHTTPRequestHandler):
    adapters: dict[str, str] = {}  # noqa: RUF012  one server per process

    model = ""
    request_body: Any = None
    """The newest request for an answer."""

    def do_GET(self) -> None:
        if self.path == "/v1/request_body":
            return self.reply(200, Handler.request_body)
        if self.path == "/v1/idle":
            return self.reply(200, {"idle_s": 1e9 if self.model == "idle" else 0.0})
        return self.reply(200, {"data": [{"id": name} for name in self.adapters]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_admin = self.path.endswith("_lora_adapter") or self.path == "/v1/completions"
        names = ["FLASH_ADMIN_KEY"] if is_admin else ["FLASH_ADMIN_KEY", "VLLM_API_KEY"]
        keys = [f"Bearer {os.environ[name]}" for name in names]
        if self.headers["Authorization"] not in keys:
            self.reply(401, {"error": "Unauthorized"})
        elif self.path == "/v1/load_lora_adapter":
            if Path(body["lora_path"], "broken").exists():
                return self.reply(400, {"error": {"message": "the adapter's shapes do not fit"}})
            self.adapters[body["lora_name"]] = body["lora_path"]
            self.reply(200, "loaded")
        elif self.path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
            self.reply(200, "unloaded")
        elif self.path == "/v1/completions" and self.model == "stuck":
            time.sleep(1000)
        elif body["model"] in self.adapters and body.get("stream"):
            Handler.request_body = body
            self.stream({"choices": [{"delta": {"content": "hello"}, "finish_reason": "stop"}]})
        elif body["model"] in self.adapters:
            self.reply(200, {"choices": [{"message": {"content": "hello"}}]})
        else:
            self.reply(404, {"error": {"message": f"no model {body['model']}"}})
        return None

    def stream(self, chunk: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def reply(self, status: int, body: Any) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--model", "--name", "--port", "--max-lora-rank", "--tls", "--precision"):
        parser.add_argument(option)
    args = parser.parse_args()
    engine = subprocess.Popen(["/bin/sleep", "1000"])
    sys.stderr.write(f"engine={engine.pid} rank={args.max_lora_rank}\n")
    sys.stderr.write(f"{COMPUTES_IN}{args.precision or 'float32'}\n")

    def leave(*_: object) -> None:
        engine.kill()
        sys.exit()

    signal.signal(signal.SIGTERM, leave)
    if args.model == "crash":
        raise ValueError("the weights are of another model")
    Handler.model = args.model
    if args.model == "silent":
        signal.pause()
    server = ThreadingHTTPServer(("127.0.0.1", int(args.port)), Handler)
    if args.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f"{args.tls}/certificate.pem", f"{args.tls}/key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
