"""What today's engines do: policies without phases, blocks, shared prefixes. Skip it: SARATHI's
papers, the book and the first lessons need none of it.
"""
