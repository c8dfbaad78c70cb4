"""Try a policy before requests depend on it: on a scheduler of its own, without a model.

Made-up requests come as a server's do: some were there before the policy, half prefilled; some come
while others run, with tags and without; some hang up; and their cache is so small that some are
preempted.
"""

from types import SimpleNamespace

from batch import Request
from command.checks import UserError, shown
from loop import Loop
from more.simulate import CostExecutor
from more.web.runner import LAST_RESORT, Engine, take_over, why
from scheduler import make_scheduler

# tokens
LONGEST_PROMPT = 600
OUTPUT = 6
MOST_STEPS = 20_000
NO_MODEL = SimpleNamespace(seconds=lambda batch: 1e-3)


def try_policy(engine: Engine, policy: str, chunk_size: int) -> None:
    """Raise a UserError, one line, if the engine's requests could not run under this policy."""
    make_scheduler(policy, engine.max_batch_size, chunk_size)  # refuses a wrong name
    try:
        rehearse(engine, policy, chunk_size)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a policy of a user's own)
        said = f"policy {shown(policy)} fails as it is tried: {why(error)}"
        raise UserError(said) from None


def rehearse(engine: Engine, policy: str, chunk_size: int) -> None:
    """Run requests under LAST_RESORT, then under the policy."""
    most = engine.max_batch_size
    longest = max(1, engine.max_length - OUTPUT + 1)
    sizes = [min(size, longest, LONGEST_PROMPT) for size in (3, 2 * chunk_size + 1, 1, chunk_size)]
    # so few that decodes must preempt, but each request fits
    room = max(sizes) + OUTPUT + sizes[0]
    before, after = (make_scheduler(n, most, chunk_size, room) for n in (LAST_RESORT, policy))
    executor = CostExecutor(NO_MODEL)
    executor.cost = engine.cost
    loop = Loop(before, executor)
    made = []

    def come(count: int, steps: int) -> None:
        for size in (sizes * count)[:count]:
            output = min(OUTPUT, engine.max_length - size + 1)
            tags = {"user": "trial", "priority": "1"} if len(made) % 2 else {}
            made.append(Request(len(made), [0] * size, output, arrival=executor.now(), tags=tags))
            loop.add(made[-1])
        while steps and loop.step():
            steps -= 1

    come(min(most, 4) + 3, 3)
    take_over(loop, after)
    come(4, 3)
    for request in (made[1], made[-1]):  # one that has run, if any, and one that waits
        loop.cancel(request)
    come(2, MOST_STEPS)
    if left := sum(request.finish_reason is None for request in made):
        how = f"still run after {MOST_STEPS} batches" if loop.busy else "neither wait nor run"
        raise UserError(f"{left} of {len(made)} requests {how}")
