"""From a model's name to weights in memory. Skip this folder: it knows nothing of scheduling."""
