"""Beam search over a segment KV cache. Skip it until you know the loop: no policy needs it.

A beam search is one request whose decode has several rows. The prompt's keys and values lie once in
a slot of the cache, for all beams. Those of the response lie in segments that grow, and a table
says which of them each beam reads ("segment KV cache", Intel, 2024).

    request.py    what a search asks for, and what it takes of the cache; no torch
    cost.py       its seconds on a GPU that you do not have; no torch
    search.py     the beams: who survives, who has finished, when to stop
    memory.py     the two caches: segment, and the standard one that it is compared with
    attention.py  attention over two segments and a table, written out
    native.py     the same in C++, on a CPU
    executor.py   a batch with beams in it, on the model
"""
