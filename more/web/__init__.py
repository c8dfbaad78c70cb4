"""Serve it and watch it. Skip this folder: it brings requests to the loop, and shows its steps.

`runner.py` is the bridge: one thread steps the `Loop`, and all others send it requests.
"""
