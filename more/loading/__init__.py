"""From a model's name to weights in memory, and from what a user asks to requests.

Skip this folder: it knows nothing of scheduling.
"""
