"""How fast the loop itself is: scheduled iterations per second with the cost model as executor, on one core.

The engine must never wait for its scheduler: an iteration of a real model takes 10 ms or more.
"""

import time

from cli import run_main
from engine import simulate
from experiments.common import make_parser, print_table
from scheduler import POLICIES, Request


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--max-batch-size", type=int, default=16, help="B (default: 16)")
    args = parser.parse_args()
    rows = []
    for policy in POLICIES:
        requests = [Request(i, range(956), 69) for i in range(64 if args.quick else 1024)]
        start = time.perf_counter()
        trace = simulate(requests, policy=policy, max_batch_size=args.max_batch_size)
        seconds = time.perf_counter() - start
        mean = f"{trace.mean_batch_size:.1f}"
        rows.append([policy, len(trace.iterations), f"{seconds:.3f}", f"{len(trace.iterations) / seconds:,.0f}", mean])
    print_table(["policy", "iterations", "seconds", "iterations/s", "mean batch"], rows)


if __name__ == "__main__":
    run_main(main)
