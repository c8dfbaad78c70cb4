"""What today's engines do: policies without phases, and a cache in blocks that requests share.

Skip it until you know the loop: SARATHI's papers, the book and the first lessons need none of it.

policies.py  vllm_v1, prefill_first, no_evict; no torch
blocks.py    blocks, tables, reference counts, prefix caching; no torch
prompts.py   placeholder prompts that say which tokens they share; no torch
cache.py     the tensors, read through a table
"""
