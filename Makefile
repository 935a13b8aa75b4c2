# make book   executes every notebook and writes _build/html/index.html; warnings are errors
# make test   runs the package's tests and every notebook
# make pages  looks at the built pages in headless Chromium, where there is one
# make sweep  runs the experiments at the laptop size into out/; make -j2 sweep on two cores at once
# make shields runs those of the defences
# make attack runs the exact attack on 800 digits and writes out/
# make address REPO=https://github.com/you/your-fork   sets the repository's address everywhere
# make clean  removes what was built, and the environment

PYTHON ?= python3
BIN := .venv/bin
PACKAGE := $(shell find cafe_tutorial -name '*.py' -o -name '*.json')
ADDRESS := $(shell sed -n 's/^  url: //p' _config.yml)

.PHONY: book test pages attack sweep shields address clean

.venv/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	touch $@

# jupyter-cache sees only the notebooks: when anything they call has changed, their stored outputs go.
_build/.sources: $(PACKAGE) requirements.txt pyproject.toml | .venv/.installed
	rm -rf _build
	mkdir -p _build
	touch $@

book: .venv/.installed _build/.sources
	$(BIN)/jupyter-book build -W --keep-going .

test: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --nbmake --nbmake-timeout=600 --nbmake-kernel=python3 book

pages: .venv/.installed
	$(BIN)/python -m pytest tests/book

attack: .venv/.installed
	$(BIN)/cafe-tutorial attack

SIZE ?= laptop
SWEEP := table2 table10 table3 variants floor horizontal table6 table4 table5 labels speed

sweep: $(SWEEP:%=out/$(SIZE)/%.json)

SHIELDS := defenses fakes learning tradeoff averaging trained table7 table8 order

shields: $(SHIELDS:%=out/$(SIZE)/%.json)

out/$(SIZE)/%.json: | .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/cafe-tutorial experiment $* --size $(SIZE) --quiet --out $@

address:
	@test -n "$(REPO)" || { echo "make address REPO=https://github.com/you/your-fork"; exit 1; }
	git grep -lF '$(ADDRESS)' | xargs sed -i.bak 's#$(ADDRESS)#$(REPO)#g'
	git ls-files | sed 's/$$/.bak/' | xargs rm -f

clean:
	rm -rf _build .venv out *.egg-info
