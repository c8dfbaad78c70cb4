"""Serve a model over HTTP, as OpenAI's API, with a page that shows the schedule as it happens.

    python serve.py                                      the demo model, on http://127.0.0.1:8000
    python serve.py --model Qwen/Qwen2.5-0.5B-Instruct --policy sarathi_serve --chunk-size 64
    python serve.py --gpu a6000 --model llama-13b        priced: as fast as that GPU, without text

Open the address in a browser, or point a client at ADDRESS/v1. Ctrl-C ends it in order: what runs
is run to its end. docs/serve.md says how to use it.
"""

import command.enter  # noqa: F401

import argparse
import logging
import os
import socket
import sys
import threading

from command.browser import find_browser
from command.checks import UserError
from command.cli import run_main
from command.flags import Flag, Parser
from configs import GPUS, gpu_named
from more.loading.policyfile import load_files, warn_if_crowded
from more.pipeline.policies import policy_names
from more.serving.calibration import cost_here
from more.web import explore_routes, live
from more.web.api import Api
from more.web.api import router as api_routes
from more.web.priced import PricedEngine
from more.web.runner import Engine, Runner
from more.web.server import Server, hash_of, listen
from more.web.trial import try_policy

KEY = "NANO_SARATHI_API_KEY"  # of the environment; a flag is seen by all who may list processes
REAL = {
    "dtype": "auto",
    "device": "auto",
    "attention": "auto",
    "cuda_graphs": "auto",
    "check": False,
    "cache": "slots",
    "block_size": None,
    "prefix_caching": False,
    "calibration": None,
}


FLAGS = {
    "model": Flag(
        "model: demo, a Hugging Face directory, or a hub id; with --gpu, also a"
        " name of configs.MODELS",
        shown="demo; with --gpu, llama-13b",
    ),
    "policy": Flag(f"policy, one of {policy_names()}", "sarathi_serve"),
    "policy_file": Flag(repeated=True),
    "chunk_size": Flag(default=256),
    "max_batch_size": Flag(shown="8; with --gpu, what fits its memory"),
    "max_length": Flag(shown="the model's, 8192 at most, and what fits"),
    "gpu": Flag(f"priced: GPU of the cost model, one of {', '.join(GPUS)}", type=gpu_named),
    "tp": Flag("priced: GPUs that share each layer", 1),
    "host": Flag(default="127.0.0.1"),
    "port": Flag(default=8000),
    "open": Flag(),
    "api_key": Flag(shown=f"${KEY}, else none", repeated=True),
    "queue": Flag("requests that may wait; one more is answered 429", 256),
    "drain": Flag(default=30),
    "pyodide": Flag(
        "folder with the files of Pyodide, for browsers without a network",
        shown="none: a browser loads it",
    ),
    "lenient": Flag(),
    **{name: Flag(default=usual) for name, usual in REAL.items()},
    "calibration": Flag(shown="results/calibration-MODEL.json"),
}


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__.splitlines()[0], FLAGS)
    args = parser.parse_args()
    load_files(args.policy_file, args.policy)
    return args


def make_engine(args: argparse.Namespace) -> Engine:
    shared = {"policy": args.policy, "chunk_size": args.chunk_size, "max_length": args.max_length}
    if args.gpu:
        given = [name for name, usual in REAL.items() if getattr(args, name) != usual]
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            raise UserError(f"{flag} is for a real model, and --gpu prices one: leave one out")
        return PricedEngine(
            args.model or "llama-13b",
            args.gpu,
            tp=args.tp,
            max_batch_size=args.max_batch_size,
            **shared,
        )
    if args.tp != 1:
        raise UserError("--tp is for a priced model: give --gpu, too")
    from more.web.real import RealEngine
    from nano_sarathi import LLM  # here: it needs torch, and a priced engine does not

    options = {name: getattr(args, name) for name in REAL}
    options["check_weights"] = options.pop("check")
    calibration = options.pop("calibration")
    if sys.stderr.isatty():  # it may take a minute
        print(f"loading    {args.model or 'demo'}", file=sys.stderr)
    llm = LLM(args.model or "demo", max_batch_size=args.max_batch_size or 8, **shared, **options)
    llm.cost = cost_here(llm.config.name, str(llm.device), str(llm.dtype), calibration)
    return RealEngine(llm)


def read_keys(args: argparse.Namespace) -> tuple[bytes, ...]:
    keys = args.api_key or list(filter(None, [os.environ.get(KEY)]))
    for key in keys:
        if not key.isascii() or not key.isprintable() or not key.strip():
            raise UserError("an API key must be made of ASCII letters that can be printed")
    return tuple(hash_of(key.strip()) for key in keys)


def address_in_network(host: str) -> str:
    """This machine's address for others. Empty if the server listens to this machine alone."""
    if host not in ("0.0.0.0", "::"):
        return "" if host in ("127.0.0.1", "::1") else host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of documentation's addresses: nothing is sent
        except OSError:  # no network
            return ""
        return probe.getsockname()[0]


def address_of(host: str, port: int) -> str:
    """A link. "All addresses" is none that a browser opens: it gets this machine's own."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def print_qr(link: str) -> None:
    """The link as a picture for a phone's camera, where a terminal shows it."""
    if not sys.stdout.isatty():
        return
    try:
        import segno
    except ModuleNotFoundError:
        print("QR code    none: pip install segno")
        return
    segno.make(link, micro=False).terminal(compact=True)


def serve(args: argparse.Namespace) -> bool:
    """Serve until a signal ends it. Returns whether all requests were run to their end."""
    listener = listen(args.host, args.port)
    keys = read_keys(args)
    engine = make_engine(args)
    try_policy(engine, engine.policy, engine.chunk_size)
    warn_if_crowded(engine.policy, engine.max_batch_size, engine.chunk_size)
    name = args.model or engine.name
    name = engine.name if os.path.isdir(name) else name
    api = Api(engine, name, args.lenient)
    runner = Runner(engine, queue=args.queue, deliver=api.deliver)
    api.runner = runner
    routers = [api_routes(api), live.router(runner), explore_routes.router(args.pyodide)]
    server = Server(api, routers, keys, args.drain)
    runner.start()
    host, port = listener.getsockname()[:2]
    address = address_of(host, port)
    print(f"serving    {engine.description}")
    if engine.priced and (doubts := engine.cost_model.doubts(engine.cache_tokens)):
        print(f"note       {doubts}")
    print(f"policy     {engine.policy}, C = {engine.chunk_size}, B = {engine.max_batch_size}")
    page = f"{address}/#show" if engine.priced else f"{address}/"
    if engine.priced:
        print(f"stalls     {page}  shows vllm_v0, then sarathi_serve: open this")
    print(f"API        {address}/v1, model {name!r}, {'with' if keys else 'without'} a key")
    print(f"page       {address}/")
    if there := address_in_network(host):
        for_class = f"{address_of(there, port)}/"  # to watch: one show is enough
        print(f"class      {for_class}  for phones and laptops of the same network")
        print_qr(for_class)
        if not keys:
            print("key        none: whoever is in this network may use it (--api-key gives one)")
    browser = find_browser() if args.open else None
    if browser:  # in a thread: some return when their window is closed
        threading.Thread(target=browser.open, args=[page], daemon=True).start()
    elif args.open:
        print("browser    none was found: open the link yourself")
    print(
        "Ctrl-C     ends it: running requests end first; a second one ends it at once", flush=True
    )
    try:
        server.run(sockets=[listener])
    finally:
        runner.close()
    return not server.cut


def main() -> None:
    args = parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if not serve(args):
        raise SystemExit("error: some requests had not ended after --drain seconds, and were cut")


if __name__ == "__main__":
    run_main(main)
