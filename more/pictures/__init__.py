"""A run as a picture, or as a file for ui.perfetto.dev. Skip this folder: it only shows."""
