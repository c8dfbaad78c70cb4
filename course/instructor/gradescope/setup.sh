#!/usr/bin/env bash
# Gradescope runs this once, as it builds the image: Python 3.11 or newer, torch for CPUs.
set -euo pipefail
here=${AUTOGRADER:-/autograder}
apt-get update
apt-get install -y python3.11 python3.11-venv || apt-get install -y python3 python3-venv
"$(command -v python3.11 || command -v python3)" -m venv "$here/venv"
"$here/venv/bin/pip" install --no-cache-dir numpy==2.4.6 torch==2.13.0 \
    --extra-index-url https://download.pytorch.org/whl/cpu
