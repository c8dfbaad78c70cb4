"""What the scripts of experiments/ share. Skip it: every script tells what it does by itself."""
