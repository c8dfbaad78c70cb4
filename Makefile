# `make fig9` and `make test` work in a bare clone: they make .venv, install the pinned packages, and
# run. No GPU needed. docs/without_torch.toml lists the targets that need no torch.
PYTHON ?= python3
BIN := .venv/bin
# Python compiles what it imports, if it may keep that: pip need not compile all.
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
# A command, if it is Python 3.11 or newer.
recent = $(if $(shell $(1) -c 'import sys; print("yes" * (sys.version_info >= (3, 11)))' 2>/dev/null),$(1))
OTHERS = $(foreach each,python3.13 python3.12 python3.11 python3.14,$(call recent,$(each)))
# $(PYTHON). If it is too old, one line says what to type, before pip says many.
NEW = $(or $(call recent,$(PYTHON)),$(error this needs Python 3.11 or newer, and $(PYTHON) is \
	$(or $(shell $(PYTHON) --version 2>/dev/null),not there). \
	$(if $(OTHERS),,Install it (Debian or Ubuntu: sudo apt install python3.11-venv). )Then type: make \
	$(strip $(MAKECMDGOALS) $(filter-out PYTHON=%,$(MAKEOVERRIDES)) PYTHON=$(firstword $(OTHERS) python3.11))))
PYODIDE := build/npm/node_modules/pyodide
# The course installs in a bare clone alone: in class, nobody waits for pip again.
READY := $(if $(wildcard .venv/figures.stamp),,.venv/figures.stamp)

.PHONY: fig9 figures figure install serve live measure gpu docs site test cpus slow browser notebooks notebooks-refresh format lines book clean \
	course-start check hint picture submit grade gradescope page pictures-for-slides

# Flags follow in ARGS: make figures ARGS=--quick.
fig9: .venv/figures.stamp
	$(BIN)/python experiments/fig9.py $(ARGS)

figures: .venv/figures.stamp
	$(BIN)/python experiments/all.py $(ARGS)

# A new figure: its script, the page of all figures, the tests of both. make figure F=fig9
figure: .venv/dev.stamp
	$(BIN)/python experiments/$(or $(F),$(error name a figure: make figure F=fig9)).py
	$(BIN)/python experiments/all.py --page
	$(BIN)/python -m pytest tests/test_gallery.py tests/test_figures.py -k "test_gallery or $(F)"

# All that running a model needs: torch and its friends.
install: .venv/run.stamp

# The demo model behind OpenAI's API, and a page that shows its schedule: http://127.0.0.1:8000
serve: .venv/run.stamp
	$(BIN)/python serve.py

# The same page for a class, on a GPU that you do not have: it shows who stalls under which policy.
live: .venv/live.stamp
	$(BIN)/python serve.py --gpu a6000 --open $(ARGS)

measure: .venv/run.stamp
	$(BIN)/python experiments/fig9.py --measure

# What is worth knowing about your GPU, in ten minutes, in one file to send back: docs/gpu.md.
gpu: .venv/dev.stamp
	$(BIN)/python experiments/gpu_day.py

test: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not browser"

# Writes the numbers of README.md and docs/ from results/ and the code.
docs: .venv/run.stamp
	$(BIN)/python -m docs.fill

# README, documents, lessons, exercises, explorer and gallery for any web server: build/site.
site: .venv/site.stamp .venv/npm.stamp
	$(BIN)/python -m docs.site

# What depends on the CPU's instructions, under each set of them that this CPU has; and for ARM.
cpus: .venv/dev.stamp
	$(BIN)/python -m tests.cpus

# The tests that run whole commands, with engines in processes of their own or many simulations.
slow: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# The pages in a real browser. Without a Chromium, its tests are skipped; without npm, those with Python.
browser: .venv/browser.stamp site
	$(BIN)/python -m pytest -n 2 --dist worksteal -m browser

# Executes all lessons from scratch, writes nothing, and fails on any error. Offline once .venv is there.
notebooks: .venv/dev.stamp
	$(BIN)/python notebooks/execute.py

# The same, and writes the .ipynb files that are committed: after a change to a lesson's .py file, on
# an idle machine.
notebooks-refresh: .venv/dev.stamp
	$(BIN)/python notebooks/execute.py --refresh

# The course: course/README.md. `make check E=6` tries your exercise 6; `make grade DIR=submissions`.
course-start submit: $(READY)
	$(BIN)/python -m course $(patsubst course-%,%,$@)

# Without E: all exercises, a line for each. A wrong answer (status 1), or a file that cannot be loaded (2), is no error of make.
check: $(READY)
	@$(BIN)/python -m course check $(E) || test $$? -le 2

hint picture: $(READY)
	$(BIN)/python -m course $@ $(or $(E),$(error name an exercise: make $@ E=6)) $(N)

# make grade DIR=submissions ARGS="--only 1 9 --out first.csv"
grade: export GRADED = $(value DIR)
grade: .venv/run.stamp
	$(if $(value DIR),,$(error name a folder: make grade DIR=submissions))$(BIN)/python -m course grade "$$GRADED" $(ARGS)

# What Gradescope wants, in build/autograder.zip: files that git knows, as they are now (a rubric with
# points of your own), and two scripts.
gradescope:
	@mkdir -p build
	now=$$(git stash create) && git archive -o build/autograder.zip \
		--add-file=course/instructor/gradescope/setup.sh \
		--add-file=course/instructor/gradescope/run_autograder $${now:-HEAD} \
		'*.py' '*.md' '*.ipynb' pyproject.toml experiments/paper_numbers.csv course/planted.toml

# The exercises for a browser, in build/exercises. With npm, it needs no network when it is opened.
page: .venv/npm.stamp
	$(BIN)/python -m course page $$(test -d $(PYODIDE) && echo --pyodide $(PYODIDE))

# The lecture's pictures, large, in build/slides. Over a deck that is there: ARGS=--force.
pictures-for-slides: .venv/room.stamp
	$(BIN)/python -m course slides $(ARGS)

# Tokens of Python by folder, lines of tests by what they promise, and the book's lines.
lines:
	@$(NEW) tests/lines.py

# The nine files, and what they need, alone in build/book: a debugger meets nothing else there.
book: .venv/run.stamp
	$(BIN)/python tests/lines.py build/book
	cd build/book && ../../$(BIN)/python -c "from engine import LLM, SamplingParams; print(LLM().generate('The with statement', SamplingParams(24))[0].text)"

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A stamp is newer than the files that it depends on, so that a second make installs nothing.
.venv/figures.stamp: pyproject.toml
	@echo 'installing what the figures need into .venv; it takes a minute'
	$(if $(call recent,$(BIN)/python),test -e $(BIN)/pip || $(BIN)/python -m ensurepip,$(NEW) -m venv --clear .venv)
	$(PIP) -q -e .
	touch $@

.venv/live.stamp: .venv/figures.stamp
	@echo 'installing what the live page needs; it takes a few seconds'
	$(PIP) -q -e '.[live]'
	touch $@

.venv/run.stamp: requirements.txt .venv/figures.stamp
	@echo 'installing torch and the rest into .venv; the first time takes a few minutes'
	$(PIP) -r requirements.txt
	touch $@

.venv/room.stamp: .venv/run.stamp
	$(PIP) -e '.[room]'
	touch $@

.venv/dev.stamp: .venv/run.stamp
	$(PIP) -e '.[dev,room]'
	touch .venv/room.stamp $@

.venv/browser.stamp: .venv/dev.stamp .venv/npm.stamp
	$(PIP) -e '.[browser,site]'
	touch .venv/site.stamp $@

.venv/site.stamp: .venv/figures.stamp
	@echo 'installing what the site needs; it takes half a minute'
	$(PIP) -q -e '.[site]'
	touch $@

# Pyodide, the editor and its bundler, as more/web/package-lock.json pins them. Pages do without them.
.venv/npm.stamp: more/web/package.json more/web/package-lock.json .venv/figures.stamp
	mkdir -p build/npm
	cp more/web/package.json more/web/package-lock.json build/npm
	npm ci --prefix build/npm --no-audit --no-fund --ignore-scripts && touch $@ \
		|| echo "npm failed: the pages do without its packages; the next make tries again"

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
