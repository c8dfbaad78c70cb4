"""The same results, faster. Skip this folder: nothing in it is needed to understand the engine.

`LLM(fast=False)` runs without it.
"""
