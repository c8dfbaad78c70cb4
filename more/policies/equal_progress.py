"""EQUAL_PROGRESS (TensorRT-LLM): prompts prefill side by side, some tokens each in turn.

What is left of the budget C goes round: every started prompt gets a turn of tokens, then every one
a second turn, until the budget is spent. So short prompts pass a long one, and nobody needs to know
lengths or deadlines: it is processor sharing. A long prompt alone gets all.

Not different from sarathi_serve: the budget, and that no decode waits.
Different: as many prompts are admitted as the budget has turns for, not only the first. Each holds
cache while it waits for its turns, and all end late: the mean may be worse.

github.com/NVIDIA/TensorRT-LLM: `setCtxRequestsChunkSize` of
cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp (ContextChunkingPolicy)
"""

from batch import Chunk
from scheduler import SarathiServe


class EqualProgress(SarathiServe):
    """ "equal_progress:64" has turns of 64 tokens (TensorRT-LLM: a block of its cache)."""

    name = "equal_progress"
    example = "equal_progress:64"
    most_tokens = 64  # of a turn

    def prefills(self, decode_rows: int) -> list[Chunk]:
        room = self.chunk_size - decode_rows
        prompts = self.started()
        while len(prompts) * self.most_tokens < room and (new := self.admit()):
            prompts.append(new)
        shares = dict.fromkeys(prompts, 0)
        while room > 0 and prompts:
            for request in list(prompts):
                left = request.prefill_length - request.prefilled - shares[request]
                turn = min(self.most_tokens, left, room)
                shares[request] += turn
                room -= turn
                if turn == left:
                    prompts.remove(request)
        return [self.plan(request, share) for request, share in shares.items() if share]
