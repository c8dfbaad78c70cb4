"""Beam search over a segment KV cache. Skip it until you know the loop: no policy needs it.

A beam search is one request whose decode has several rows. A slot of the cache holds the prompt's
keys and values once, for all beams. Segments that grow hold those of the response. A table says
which of them each beam reads ("segment KV cache", Intel, 2024).

    request.py    the parameters of a search, and how much cache it takes; no torch
    cost.py       how long it takes on a GPU that you do not have; no torch
    search.py     the beams: who survives, who has finished, when to stop
    memory.py     the two caches: segment, and the standard one that it is compared with
    attention.py  attention over two segments and a table, written out
    native.py     the same in C++, on a CPU
    executor.py   a batch with beams in it, on the model
"""
