# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A free GPU: nano-sarathi on Colab
#
# **Untried on Colab.** Nobody has run this notebook there yet. Its cells run on a CPU, with the
# demo model, each time that the project is checked. On a GPU, expect mistakes.
#
# We expect it to take under 15 minutes on a T4, the GPU that Colab lends for free. It needs no
# Google Drive and no key. Before you start: *Runtime*, *Change runtime type*, *T4 GPU*. Then run
# the cells in order.
#
# 1. Get the project, and install what is missing.
# 2. What can this machine run?
# 3. The demo model writes text.
# 4. A model of 3 B parameters: what does a decode cost alone, and what beside a chunk? (Lesson 4)
# 5. The paper's main figure, Fig 9, measured here.
#
# ## 1. Get the project
#
# If the next cell asks you for a zip file, make it on your own machine, in the project's folder:
#
#     git archive --format=zip --output nano-sarathi.zip HEAD
#
# The zip file's name must begin with nano-sarathi. Its files may lie in an inner folder, such as
# nano-sarathi-main.

# %%
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = ""  # the project's address; without one, you upload a zip file


def folder():
    """Where the project is, if it is here."""
    places = [Path(), Path(".."), *Path().glob("*/"), *Path().glob("*/*/")]
    return next((place for place in places if (place / "experiments/fig9.py").is_file()), None)


if folder() is None and REPOSITORY:
    subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, "nano-sarathi"], check=True)

# %%
if folder() is None:
    print("This notebook does not know the project's address.")
    print("Please upload the project as nano-sarathi.zip: the text above says how to make it.")
    archives = list(Path().glob("nano-sarathi*.zip"))
    if not archives:
        from google.colab import files

        archives = files.upload()  # by name
    for archive in archives:
        shutil.unpack_archive(archive, "nano-sarathi")
if folder() is None:
    raise SystemExit("The project is not here. Upload nano-sarathi.zip, and run this cell again.")
os.chdir(folder())
sys.path.insert(0, os.getcwd())  # for this notebook; the next line is for the commands below
os.environ["PYTHONPATH"] = os.getcwd()
print("the project is here:", os.listdir("experiments")[:3], "...")

# %% [markdown]
# All packages that are there stay, whatever their versions. What is missing is installed. PyTorch
# is replaced if it is older than 2.10, or if its CUDA needs a newer driver.


# %%
def run(*command):
    """A command of the project, with its output as it comes."""
    words = [sys.executable, "-u", *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: its last lines say why")


run("notebooks/install_missing.py")

# %% [markdown]
# ## 2. What can this machine run?
#
# A T4 is older than the GPUs of today's kernels. It has no bfloat16, so the models run in float16.
# FlashAttention does not run on it.

# %%
run("-m", "fast.kernels")

# %% [markdown]
# ## 3. The demo model writes text
#
# The last line says where it ran, and which back end of attention was taken.

# %%
run("generate.py", "The with statement", "--policy", "sarathi", "--max-tokens", "64")

# %% [markdown]
# ## 4. A decode alone, and a decode beside a chunk (Lesson 4)
#
# The demo is so small that a GPU waits for Python to start its kernels. `llama3.2-3b` has the shape
# of Llama-3.2-3B: 6.4 GB of weights in float16. Each decode iteration reads them all, and that
# takes longer than to start the kernels. Its weights are random, so it downloads nothing, and its
# tokens mean nothing. Times do not depend on them.

# %%
import fast.first  # before torch  # noqa: F401

import torch

from configs import GPUS
from costmodel import CostModel, make_batch
from engine import LLM
from experiments.lib.common import print_table
from experiments.lib.measuring import hardware_of, time_batches

GPU = torch.cuda.is_available()
MODEL = "llama3.2-3b" if GPU else "demo"  # without a GPU, all cells run, and say little
llm = LLM(MODEL, max_batch_size=9, max_length=1024)
print(f"{MODEL}, {llm.config.parameters / 1e6:.0f} M parameters, on {hardware_of(llm)}")
print(f"attention by {llm.attention}")
if not GPU:
    print("PyTorch sees no GPU here. On Colab: Runtime, Change runtime type, T4 GPU.")

# %% [markdown]
# Three batches: a chunk of 252 tokens; 4 decodes; and both together, which are 256 rows. Beside
# each time stands what the cost model predicts for a T4. Nobody measured a T4: we use the A100's
# constants.

# %%
chunk = [(0, 252, 999)]  # start, length, and the whole prompt
shapes = {
    "chunk of 252": make_batch(chunk),
    "4 decodes": make_batch(decodes=4, context=512),
    "chunk of 252 + 4 decodes": make_batch(chunk, 4, 512),
}
cost = CostModel(llm.config, GPUS["t4"], software="vllm")
repeats = 20 if GPU else 2
seconds = [result.seconds for result in time_batches(llm, list(shapes.values()), repeats)]
rows = [
    [name, f"{1e3 * measured:.2f}", f"{1e3 * cost.seconds(batch):.2f}"]
    for (name, batch), measured in zip(shapes.items(), seconds, strict=True)
]
print_table(["batch", "measured here, ms", "predicted for a T4, ms"], rows, MODEL)
print(f"\nA guess: {cost.guess}.")

# %%
alone, decodes, both = seconds
print(f"a decode alone: {1e3 * decodes / 4:.2f} ms; beside a chunk: {1e3 * (both - alone) / 4:.2f}")
size = llm.config.parameters * llm.dtype.itemsize
print(f"the 4 decodes read {size / 1e9:.2g} GB of weights: {size / decodes / 1e9:.0f} GB/s")
print(f"a T4's data sheet has {GPUS['t4'].bandwidth / 1e9:.0f} GB/s")

# %% [markdown]
# Is a decode much cheaper beside a chunk? Then decode-maximal batching works here. Are the GB/s
# near the data sheet's? Then memory decides how long a decode takes, as it should. Far below, it is
# the start of the kernels, or an attention that copies.
#
# ## 5. Fig 9, measured here
#
# The same model under the baseline and under SARATHI. First it profiles single iterations, to find
# a chunk size. Then it measures the gain around the balance, P:D = C/(B-1).

# %%
import gc

del llm
gc.collect()
if GPU:
    torch.cuda.empty_cache()  # fig9.py is a process of its own, and needs the memory
size = ["--max-length", "1024"] if GPU else ["--quick"]
run("experiments/fig9.py", "--measure", "--model", MODEL, *size, "--out", "build/colab")

# %%
from IPython.display import Image, display

display(Image("build/colab/fig9.png"))

# %% [markdown]
# The panel at the bottom right is yours. If the gain is largest near the dotted line, the paper's
# rule holds here.
#
# Please keep the outputs of this notebook, of the cells that failed, too. Nobody had them before.
#
# **Next.** Read the [lessons](01_prefill_and_decode.ipynb) on your own machine: they need no GPU.
# `docs/gpu.md` lists what only a GPU can tell.
