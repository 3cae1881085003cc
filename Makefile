# Each target sets up what it needs in .venv; a second start takes seconds.
#   make chat [PROMPT="What is 17 + 25?"] [MODEL=folder]     a tritonserver and a chat with it
#   make serve [MODEL=…] [HTTP_PORT=…] [OPENAI_PORT=…]       the whole stack, in the foreground
#   make test                                                every gate and test
#   make check                                               the same without the server: pre-commit
#   make bench                                               server against bare engine
#   make soak                                                10,000 requests, some of them bad
PYTHON ?= python3
# On a machine without a GPU, name a CPU build of torch here (see README).
TORCH ?= torch==2.13.0
MODEL ?= demo
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
OPENAI_PORT ?= 9000
VENV := .venv
GPTOSS := $(VENV)/bin/gptoss

# Through the environment, so that no shell reads what is in it.
export PROMPT

.PHONY: chat serve test check bench soak clean
.DELETE_ON_ERROR:

$(VENV)/installed: pyproject.toml scripts/setup
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/setup $(VENV) server,openai
$(VENV)/installed-dev: $(VENV)/installed
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/setup $(VENV) server,openai,dev

chat: $(VENV)/installed
	@$(GPTOSS) chat --model "$(MODEL)" $(if $(PROMPT),-- "$$PROMPT")

serve: $(VENV)/installed
	@$(GPTOSS) serve --model "$(MODEL)" --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) \
	  --metrics-port $(METRICS_PORT) --openai-port $(OPENAI_PORT)

test check: $(VENV)/installed-dev
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check $(if $(filter check,$@),--fast)

bench: $(VENV)/installed
	@$(GPTOSS) bench serve --model "$(MODEL)"

soak: $(VENV)/installed
	@$(GPTOSS) soak --model "$(MODEL)"

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
