"""Serve this stick to the room: the lecturer runs it, the students need a browser and no install.

    python serve_room.py            prints the room's address, such as http://192.168.0.7:8000/
    python serve_room.py 9000       on another port

It needs any Python from 3.8, and nothing else. It only reads, and gives nothing but what `make usb`
put on the stick. Ctrl-C ends it. Why a server: browsers allow no workers in a page that is opened
from a file, and the exercises run in a worker.
"""

import os
import socket
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

HERE = os.path.realpath(os.path.dirname(os.path.abspath(__file__)))
START = "START.html"
SERVED = ("", START, "site", "wheels", "nano-sarathi.zip")  # whatever else lies here stays private
PORT, TRIED = 8000, 20  # ports in a row, where the first ones are taken
# Windows keeps types in its registry, and some programs write wrong ones there.
TYPES = {
    "": "application/octet-stream",
    ".css": "text/css",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".json": "application/json",
    ".mjs": "text/javascript",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
    ".zip": "application/zip",
}
LAPTOPS = set()  # addresses that have come


class Handler(SimpleHTTPRequestHandler):
    """The files of the stick, with the types that browsers want of modules and WebAssembly."""

    protocol_version = "HTTP/1.1"  # a page has many files: one connection for all of them
    timeout = 60  # seconds, then a silent laptop loses its connection
    extensions_map = TYPES

    def translate_path(self, path):
        """A file of the stick; START.html for "/"; for all else, a name that is not there."""
        path = unquote(urlsplit(path).path)
        if "\0" in path or path.strip("/").partition("/")[0] not in SERVED:
            return os.path.join(HERE, "no such file")
        found = os.path.realpath(super().translate_path(path if path.strip("/") else f"/{START}"))
        inside = os.path.relpath(found, HERE).split(os.sep)[0]
        return found if inside in SERVED else os.path.join(HERE, "no such file")

    def end_headers(self):
        self.send_header("Cache-Control", "no-cache")  # asked again: 304 where nothing has changed
        super().end_headers()

    def log_message(self, *_):
        """One line for each laptop that comes."""
        if self.client_address[0] not in LAPTOPS:
            LAPTOPS.add(self.client_address[0])
            print(f"laptop {len(LAPTOPS)}: {self.client_address[0]}", flush=True)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a class that opens the page at once

    def handle_error(self, *_):
        """A laptop that closes its lid is no error."""


def addresses():
    """This machine's addresses in the room. No packet is sent."""
    found = []
    for target in ("10.255.255.255", "192.168.255.255", "172.31.255.255"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            try:
                asked.connect((target, 9))
                found.append(asked.getsockname()[0])
            except OSError:
                pass  # no way to that network
    return [each for each in dict.fromkeys(found) if not each.startswith(("127.", "0."))]


def listen(port):
    """A server on this port, or on the next free one unless the user named it."""
    last = port if port is not None else PORT + TRIED
    for each in range(port if port is not None else PORT, last + 1):
        try:
            return Server(("0.0.0.0", each), partial(Handler, directory=HERE))
        except OSError as error:
            reason = error.strerror
    raise SystemExit(f"error: port {last}: {reason}; name another one: python serve_room.py 9000")


def main(words):
    if not os.path.isfile(os.path.join(HERE, "site", "index.html")):
        raise SystemExit(f"error: {HERE} has no site/index.html: run this file on the stick")
    if len(words) > 1 or not all(word.isdecimal() and int(word) < 65536 for word in words):
        raise SystemExit(f"error: {' '.join(words)} is no port; give a number from 0 to 65535")
    with listen(int(words[0]) if words else None) as server:
        port = server.server_address[1]
        for each in addresses():
            print(f"Write on the board:  http://{each}:{port}/")
        print(f"On this machine:     http://127.0.0.1:{port}/\n")
        print("If a laptop cannot reach it: is it in the same Wi-Fi? Does this machine's firewall")
        print("ask whether Python may accept connections? Some guest networks keep laptops apart:")
        print("then open a hotspot on this machine. Ctrl-C ends this.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main(sys.argv[1:])
