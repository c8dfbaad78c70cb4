"""What today's engines do: a cache in blocks that requests share.

Skip it until you know the loop: SARATHI's papers, the book and the first lessons need none of it.

blocks.py    blocks, tables, reference counts, prefix caching; no torch
prompts.py   placeholder prompts that say which tokens they share; no torch
cache.py     the tensors, read through a table
"""
